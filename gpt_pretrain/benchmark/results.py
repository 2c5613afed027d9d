"""What the processes of a benchmark return (as JSON files, see `worker`), and a variant's figures computed from it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.products import Resolved

MFU_FORMULA = "TFLOP/s × (FP8 share ÷ FP8 ceiling + the rest ÷ ceiling of the parameters' type)"


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCeiling(JsonObject):
    """How fast square matrix products of one type are on this machine."""

    dtype: str
    """float32, bfloat16 or fp8."""
    side: int
    """Rows and columns of both operands."""
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(JsonObject):
    """What the runs were measured on."""

    device: str
    """Name of the GPU, or of the processor."""
    memory_gib: float | None
    """Of one GPU; null without one."""
    driver: str | None
    """NVIDIA's; null without one."""
    versions: tuple[str, ...]
    """Of Python and the libraries that matter."""
    gemms: tuple[GemmCeiling, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(JsonObject):
    """What one rank of one process measured."""

    first_step_s: float
    """From the start of the process to the end of its first step."""
    step_times_s: tuple[float, ...]
    """Mean seconds per step of each interval."""
    memory_gib: float
    """Peak memory on this rank's GPU after the timed steps; without a GPU, the process's resident memory."""
    loss: float | None
    """Cross entropy in nats per token, mean of the last interval; null for the bare loop, which has other data."""
    dtype: str
    """Of parameters and of products that are not in FP8: bfloat16 or float32."""
    attended: float | None = None
    """Length of the document that a token is in, on average over the timed steps; null where documents see each
    other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformSeen(JsonObject):
    """The machine as a process sees it, which decides whether it can run a variant."""

    platform: Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSeen(PlatformSeen):
    """The same with its products measured."""

    machine: Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(JsonObject):
    """Why one rank failed."""

    time_unix: float
    """Seconds since 1970-01-01 UTC: the rank that fails first knows why, the others only miss it."""
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures(JsonObject):
    """A variant's measurements."""

    dtype: str
    """Of parameters and of products that are not in FP8."""
    fp8_flops_share: float
    """Share of the matrix operations that run in FP8."""
    step_times_s: tuple[float, ...]
    """Mean seconds per step of each interval of all rounds."""
    step_time_s: float
    """Their median."""
    tokens_per_s_per_gpu: float
    """Of the median step."""
    tflops_per_gpu: float
    """Model TFLOP/s of the median step, by `config.derived.flops_per_token`."""
    mfu: float | None
    """Share of what the machine's own products reach in the same mix of types; null if one was not measured."""
    memory_gib: float
    """Peak on the rank that needs most."""
    first_step_s: float
    """From launch to the end of the first step, median over the rounds."""
    loss: float | None
    """Like the fields below, rank 0's in the first round; see `Measured`."""
    attended: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(JsonObject):
    """A variant in the table."""

    name: str
    loop: str
    overrides: tuple[str, ...]
    num_gpus: int
    """Processes, with a GPU each if there are any."""
    problem: str | None
    """Why there are no figures."""
    figures: Figures | None
    speed_ratio: float | None = None
    """Tokens per second and GPU, over the first variant's."""
    memory_ratio: float | None = None


def attainable_tflops(ceilings: Sequence[GemmCeiling], dtype: str, fp8_share: float) -> float | None:
    """TFLOP/s of a run whose products all reach the machine's ceilings; None if one is unknown."""
    by_dtype = {ceiling.dtype: ceiling.tflops for ceiling in ceilings}
    shares = {dtype: 1 - fp8_share, "fp8": fp8_share}
    if any(share and name not in by_dtype for name, share in shares.items()):
        return None
    return 1 / sum(share / by_dtype[name] for name, share in shares.items() if share)


def compute_figures(rounds: Sequence[Sequence[Measured]], run: Resolved, ceilings: Sequence[GemmCeiling]) -> Figures:
    """A variant's figures from what each rank measured in each round, rank 0 first."""
    model = run.model
    first, num_gpus = rounds[0][0], len(rounds[0])
    times = tuple(time for ranks in rounds for time in ranks[0].step_times_s)
    step_time_s = statistics.median(times)
    tokens_per_s_per_gpu = model.global_batch_size * model.encoder_seq_length / step_time_s / num_gpus
    tflops = tokens_per_s_per_gpu * flops_per_token(model, first.attended) / 1e12
    # Emulated FP8 multiplies in the run's own precision.
    fp8_share = 0.0 if model.fp8_emulate else run.fp8_flops_share_of(run.linears, first.attended)
    attainable = attainable_tflops(ceilings, first.dtype, fp8_share)
    return Figures(
        dtype=first.dtype,
        fp8_flops_share=fp8_share,
        step_times_s=times,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        tflops_per_gpu=tflops,
        mfu=None if attainable is None else tflops / attainable,
        memory_gib=max(rank.memory_gib for ranks in rounds for rank in ranks),
        first_step_s=statistics.median(ranks[0].first_step_s for ranks in rounds),
        loss=first.loss,
        attended=first.attended,
    )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with ratios to the first, if both have figures."""
    first = rows[0].figures
    if first is None:
        return list(rows)
    return [
        row
        if row.figures is None
        else replace(
            row,
            speed_ratio=row.figures.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu,
            memory_ratio=row.figures.memory_gib / first.memory_gib,
        )
        for row in rows
    ]
