"""Warnings about FP8 tensors, from their statistics, and what to do about them.

Each warning appears once, and again only after its tensor has recovered. Layers whose tensors begin to show the same
condition at the same step share one. Observations are `logging.fp8_statistics_interval` steps apart: nothing between
them is seen, and a scale that jumps has differed from one observation to the next, not from step to step.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator

import torch

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.fp8.gemms import Role
from gpt_pretrain.fp8.statistics import StepStatistics, TensorStatistics
from gpt_pretrain.spec.recipes import FORMAT_MAX, Fp8Settings

# Consecutive observations whose scales must each differ from the one before by at least this many powers of two.
JUMP_OBSERVATIONS = 4
JUMP_BINADES = 2
# Layers that a warning names besides the one that it describes.
LAYERS_NAMED = 3
# What Transformer Engine uses for a scale that would be infinite (TE 2.12, pytorch/quantization.py).
_INFINITE = torch.finfo(torch.float32).max


class Alarms:
    """Remembers its warnings and the scales that it has seen.

    Args:
        settings: The run's FP8.
        saturation_threshold: Share of saturated values above which a tensor is warned about.
        interval: Steps between two observations.
    """

    def __init__(self, settings: Fp8Settings, saturation_threshold: float, interval: int) -> None:
        self._settings = settings
        self._threshold = saturation_threshold
        self._interval = interval
        self._active: set[tuple[str, str, str]] = set()
        self._scales: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=JUMP_OBSERVATIONS))

    @property
    def _one_scale_per_tensor(self) -> bool:
        return self._settings.recipe.scales_tensors

    def check(self, statistics: StepStatistics) -> list[str]:
        """The new warnings of a step: one for all layers that begin to show a condition in the same kind of tensor."""
        active: set[tuple[str, str, str]] = set()
        new: dict[tuple[str, str], list[tuple[TensorStatistics, str]]] = defaultdict(list)
        for tensor in statistics.tensors:
            for condition, message in self._conditions(tensor):
                key = tensor.layer, tensor.tensor, condition
                active.add(key)
                if key not in self._active:
                    new[tensor.tensor, condition].append((tensor, message))
        self._active = active
        return [_joined(statistics.step, found) for found in new.values()]

    def _conditions(self, tensor: TensorStatistics) -> Iterator[tuple[str, str]]:
        """Each condition that a tensor shows, with its message."""
        degenerate = self._degenerate(tensor)
        if degenerate is not None:
            yield "degenerate", degenerate
        if tensor.saturated is not None and tensor.saturated > self._threshold:
            yield "saturated", self._saturated(tensor, tensor.saturated)
        if self._jumps(tensor, degenerate is not None):
            yield "jumping", self._jumping(tensor)

    def _degenerate(self, tensor: TensorStatistics) -> str | None:
        if tensor.amax is not None and math.isinf(tensor.amax):
            return (
                "it contains inf or NaN, which no scale can represent; lower model.optim.lr or lengthen "
                f"model.optim.sched.warmup_steps, and see whether {self._without(tensor)} avoids it"
            )
        if tensor.scale_min == 0.0:
            return (
                "its scale is 0, so that all its values become zero; it came from an infinite amax: lower "
                f"model.optim.lr, or keep the layer out of FP8 with {self._without(tensor)}"
            )
        # A single block of (nearly) zeros is not unusual.
        scale = tensor.scale_max if self._one_scale_per_tensor else tensor.scale_min
        if scale is not None and scale >= _INFINITE:
            return (
                f"its scale is infinite, because all its values are (nearly) zero (amax {_number(tensor.amax)}); "
                "nothing reaches this layer: check its inputs and model.init_method_std, or keep it out of FP8 with "
                f"{self._without(tensor)}"
            )
        return None

    def _saturated(self, tensor: TensorStatistics, share: float) -> str:
        settings = self._settings
        message = (
            f"{100 * share:.2g}% of its values are saturated (logging.fp8_saturation_threshold="
            f"{self._threshold:g}), amax {_number(tensor.amax)} at scale {_number(tensor.scale_max)}; "
        )
        if not settings.recipe.keeps_history:
            return message + f"keep the layer out of FP8 with {self._without(tensor)}"
        message += (
            f"raise model.fp8_margin from {settings.margin} to {settings.margin + self._missing_margin(tensor)}, "
        )
        if settings.amax_compute_algo is AmaxComputeAlgo.most_recent:
            message += "set model.fp8_amax_compute_algo=max, "
        return message + f"choose fp8=tensorwise, or keep the layer out of FP8 with {self._without(tensor)}"

    def _missing_margin(self, tensor: TensorStatistics) -> int:
        """Powers of two by which the scale was too large, at least 1."""
        if tensor.amax is None or tensor.scale_max is None:
            return 1
        excess = tensor.amax * tensor.scale_max / FORMAT_MAX[self._format(tensor)]
        return max(1, math.ceil(math.log2(excess))) if math.isfinite(excess) and excess > 0 else 1

    def _format(self, tensor: TensorStatistics) -> str:
        gradient = tensor.tensor == Role.output_gradient.value
        return self._settings.gradient_format if gradient else self._settings.forward_format

    def _jumps(self, tensor: TensorStatistics, degenerate: bool) -> bool:
        """Whether the scale changed strongly at each of the last observations; blocks have no single scale."""
        scales = self._scales[tensor.layer, tensor.tensor]
        if not self._one_scale_per_tensor or tensor.scale_min is None:
            return False
        if degenerate:
            scales.clear()
            return False
        scales.append(math.log2(tensor.scale_min))
        steps = [abs(after - before) for before, after in zip(scales, list(scales)[1:], strict=False)]
        return len(steps) == JUMP_OBSERVATIONS - 1 and min(steps) >= JUMP_BINADES

    def _jumping(self, tensor: TensorStatistics) -> str:
        settings = self._settings
        seen = ", ".join(f"{2.0**scale:.2g}" for scale in self._scales[tensor.layer, tensor.tensor])
        every = "step" if self._interval == 1 else f"{self._interval} steps"
        message = f"its scale jumps, by a factor of {2**JUMP_BINADES} or more every {every}: {seen}; "
        if not settings.recipe.keeps_history:
            return message + (
                "current scales follow, but the tensor itself varies that much: if the loss spikes too, lower "
                "model.optim.lr or lengthen model.optim.sched.warmup_steps"
            )
        if settings.amax_compute_algo is AmaxComputeAlgo.most_recent:
            message += "set model.fp8_amax_compute_algo=max, "
        else:
            message += f"lengthen model.fp8_amax_history_len (now {settings.amax_history_len}), "
        return message + "choose fp8=tensorwise, or lower model.optim.lr"

    def _without(self, tensor: TensorStatistics) -> str:
        return f'model.fp8_exclude=["{tensor.layer}"]'


def _joined(step: int, found: list[tuple[TensorStatistics, str]]) -> str:
    """One warning for several layers: the message of the one that saturates most, and the names of some others."""
    worst, message = max(found, key=lambda each: each[0].saturated or 0.0)
    others = [tensor.layer for tensor, _ in found if tensor is not worst]
    text = f"FP8 at step {step}: {worst.tensor} of {worst.layer}: {message}"
    if not others:
        return text
    unnamed = len(others) - LAYERS_NAMED
    return f"{text}; likewise {', '.join(others[:LAYERS_NAMED])}" + (f" and {unnamed} more" if unnamed > 0 else "")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
