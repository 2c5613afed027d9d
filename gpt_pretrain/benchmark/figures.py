"""From what the processes measured to the figures of a variant: medians, rates and ratios. Pure arithmetic."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.benchmark.results import Forecast, GemmCeiling, Kernel, Measured, Part
from gpt_pretrain.benchmark.variants import Variant
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.report.json_object import JsonObject
from gpt_pretrain.spec.resolved import Resolved

MFU_FORMULA = "TFLOP/s × (FP8 share ÷ FP8 ceiling + the rest ÷ ceiling of the parameters' type)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures(JsonObject):
    """A variant's measurements."""

    dtype: str
    """Type of parameters and of the products that are not in FP8."""
    fp8_flops_share: float
    """Share of the matrix operations that the machine does in FP8."""
    step_times_s: tuple[float, ...]
    """Mean seconds per step of each interval, all rounds."""
    step_time_s: float
    """Their median."""
    fastest_step_s: float
    slowest_step_s: float
    tokens_per_s_per_gpu: float
    """Of the median step."""
    tflops_per_gpu: float
    """Model TFLOP/s of the median step, by `config.derived.flops_per_token`."""
    mfu: float | None
    """Share of what the machine's own products reach in the same mix of types; null where one was not measured."""
    memory_gib: float
    """Peak on the rank that needs most."""
    first_step_s: float
    """Seconds from launch to the end of the first step, median over the rounds."""
    loss: float | None
    """Cross entropy in nats per token, mean of the last interval of the first round; null of the bare loop."""
    losses: tuple[float, ...]
    """Of every step of the first round; empty of the bare loop."""
    kernels: tuple[Kernel, ...]
    """The longest, where steps were profiled."""
    parts: tuple[Part, ...]
    """Where all of a GPU's step goes, where steps were profiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(JsonObject):
    """A variant in the table."""

    name: str
    loop: str
    overrides: tuple[str, ...]
    num_gpus: int
    """Processes, each with a GPU where there are any."""
    problem: str | None
    """Why there are no figures."""
    figures: Figures | None
    speed_ratio: float | None
    """Tokens per second and GPU over those of the first variant."""
    memory_ratio: float | None
    loss_difference: float | None
    """Largest relative difference of a step's loss from the first variant's same step; infinite or NaN where one is."""
    forecast: Forecast | None
    """Where it was asked for and could be made."""


def attainable_tflops(ceilings: Sequence[GemmCeiling], dtype: str, fp8_share: float) -> float | None:
    """TFLOP/s of a run whose products all reach the machine's ceilings; None where one of those is not known."""
    by_dtype = {ceiling.dtype: ceiling.tflops for ceiling in ceilings}
    shares = {dtype: 1 - fp8_share, "fp8": fp8_share}
    if any(share and name not in by_dtype for name, share in shares.items()):
        return None
    return 1 / sum(share / by_dtype[name] for name, share in shares.items() if share)


def compute_figures(rounds: Sequence[Sequence[Measured]], run: Resolved, ceilings: Sequence[GemmCeiling]) -> Figures:
    """The figures of a variant.

    Args:
        rounds: What each rank measured in each round, rank 0's first.
        run: The variant.
        ceilings: The machine's products.
    """
    model = run.model
    first, num_gpus = rounds[0][0], len(rounds[0])
    times = tuple(time for ranks in rounds for time in ranks[0].step_times_s)
    step_time_s = statistics.median(times)
    tokens_per_s_per_gpu = model.global_batch_size * model.encoder_seq_length / step_time_s / num_gpus
    tflops = tokens_per_s_per_gpu * flops_per_token(model) / 1e12
    # Emulated FP8 multiplies in the run's precision.
    fp8_share = 0.0 if model.fp8_emulate else run.fp8_flops_share
    attainable = attainable_tflops(ceilings, first.dtype, fp8_share)
    return Figures(
        dtype=first.dtype,
        fp8_flops_share=fp8_share,
        step_times_s=times,
        step_time_s=step_time_s,
        fastest_step_s=min(times),
        slowest_step_s=max(times),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        tflops_per_gpu=tflops,
        mfu=None if attainable is None else tflops / attainable,
        memory_gib=max(rank.memory_gib for ranks in rounds for rank in ranks),
        first_step_s=statistics.median(ranks[0].first_step_s for ranks in rounds),
        loss=first.loss,
        losses=first.losses,
        kernels=first.kernels,
        parts=first.parts,
    )


def build_row(
    variant: Variant, num_gpus: int, figures: Figures | None, problem: str | None, forecast: Forecast | None
) -> Row:
    """A variant's row, without ratios yet."""
    return Row(
        name=variant.name,
        loop=variant.loop.name,
        overrides=variant.overrides,
        num_gpus=num_gpus,
        problem=problem,
        figures=figures,
        speed_ratio=None,
        memory_ratio=None,
        loss_difference=None,
        forecast=forecast,
    )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratios to the first and their differences from it, where both have figures."""
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
            loss_difference=_largest_difference(row.figures.losses, first.losses),
        )
        for row in rows
    ]


def _largest_difference(losses: Sequence[float], first: Sequence[float]) -> float | None:
    if not losses or not first:
        return None
    differences = [_relative_difference(loss, other) for loss, other in zip(losses, first, strict=True)]
    # The largest of numbers with NaN among them depends on their order.
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _relative_difference(loss: float, other: float) -> float:
    apart = abs(loss - other)
    if apart == 0:
        return 0.0
    return apart / abs(other) if other else apart * math.inf
