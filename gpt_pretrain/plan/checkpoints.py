"""When a run saves, how large a checkpoint is, and what a save costs.

A checkpoint holds weights, masters and moments, each once, however many GPUs hold copies; each GPU writes about the
same number of bytes. The two rates were measured on one H200 with a local disk, with the 21.8 GB of gpt2_1_5b
(benchmarks/gpt2_1_5b_1xh200.md). A disk that many GPUs share has its own rate.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import MainParamsDtype, MomentDtype
from gpt_pretrain.config.derived import max_time_s, save_interval_s
from gpt_pretrain.config.errors import format_amount, format_bytes, format_seconds
from gpt_pretrain.config.schema import Config
from gpt_pretrain.spec.core_fields import Dtype, params_dtype
from gpt_pretrain.spec.optimizers import OPTIMIZERS
from gpt_pretrain.spec.run_spec import RunSpec

# Bytes a second of one GPU: to host memory, while the loop stands still; and from there to the disk, beside the loop
# (`checkpoint.async_save`) or not.
_COPIED, _WRITTEN_BESIDE, _WRITTEN_ALONE = 31e9, 1.58e9, 0.81e9
# While a checkpoint is written beside them, steps take this much longer.
_SLOWER = 0.2
# A checkpoint has moments in the smallest plain type that holds them exactly (`kernels.adam`).
_SAVED_MOMENT_BYTES = {MomentDtype.fp32: 4, MomentDtype.bf16: 2, MomentDtype.fp16: 4, MomentDtype.fp8: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointForecast:
    """A checkpoint and its saves."""

    num_bytes: float
    """Of the whole checkpoint."""
    bytes_per_gpu: float
    """Of each GPU's part, which a save that goes on beside the loop also takes of host memory."""
    stall_s: float
    """Seconds that a save holds the loop."""
    write_s: float
    """Seconds until the disk has it; with `async_save` beside the loop, after the stall."""
    time_share: float | None
    """Share of the run's time that saves by the clock cost; None where the clock asks for none."""
    saves: str
    """When the run saves (`describe_saves`)."""

    @property
    def sentence(self) -> str:
        """What a person should know of it."""
        if not self.saves:
            return "Checkpoints: NONE is written."
        size = f"{format_bytes(int(self.num_bytes))} each, {format_bytes(int(self.bytes_per_gpu))} a GPU"
        cost = f"a save stops the loop for {format_seconds(self.stall_s)}"
        if self.write_s:
            cost += f" and is on a local disk {format_seconds(self.write_s)} later"
        percent = None if self.time_share is None else format_amount(100 * self.time_share)
        share = "" if percent is None else f"; those by the clock take {percent}% of the time"
        return f"Checkpoints: {self.saves}; {size}; {cost}{share}."


def _saves_by_clock(config: Config) -> bool:
    interval, limit = save_interval_s(config.checkpoint), max_time_s(config.trainer)
    return interval is not None and (limit is None or interval < limit)


def describe_saves(config: Config) -> str:
    """When a run saves: "every 500 steps, every 30 minutes, at the end"; empty where it never does."""
    saves = config.checkpoint
    times = [f"every {saves.save_interval} steps"] if saves.save_interval is not None else []
    times += [f"every {saves.save_interval_minutes:g} minutes"] if _saves_by_clock(config) else []
    times += ["at the end"] if saves.save_at_end else []
    return ", ".join(times)


def forecast_checkpoint(spec: RunSpec, num_parameters: int) -> CheckpointForecast:
    """The checkpoints of a checked configuration."""
    optim, saves = spec.model.optim, spec.config.checkpoint
    weight = 2 if params_dtype(spec) is Dtype.bf16 else 4
    master, moments = 0.0 if weight == 4 else 4.0, OPTIMIZERS[optim.name].state_bytes(optim)
    if optim.use_precision_aware_optimizer:
        master = 2.0 if optim.main_params_dtype is MainParamsDtype.fp16 else 4.0
        moments = _SAVED_MOMENT_BYTES[optim.exp_avg_dtype] + _SAVED_MOMENT_BYTES[optim.exp_avg_sq_dtype]
    num_bytes = num_parameters * (weight + master + moments)
    bytes_per_gpu = num_bytes / spec.launch.world_size
    stall_s, write_s = bytes_per_gpu / _COPIED, bytes_per_gpu / _WRITTEN_BESIDE
    if not saves.async_save:
        stall_s, write_s = bytes_per_gpu / _WRITTEN_ALONE, 0.0
    interval = save_interval_s(saves) if _saves_by_clock(spec.config) else None
    return CheckpointForecast(
        num_bytes=num_bytes,
        bytes_per_gpu=bytes_per_gpu,
        stall_s=stall_s,
        write_s=write_s,
        time_share=None if interval is None else (stall_s + _SLOWER * write_s) / interval,
        saves=describe_saves(spec.config),
    )
