"""Warns about FP8 tensors, from their statistics, and says what to do.

A warning appears again only after its tensor has recovered. Layers that begin to show the same condition in the same
kind of tensor at the same step share one. A step may observe only some layers; the others keep their state.
"""

import math
from collections import defaultdict, deque
from itertools import pairwise

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.fp8.gemms import Role, role_format
from gpt_pretrain.fp8.statistics import StepStatistics, TensorStatistics
from gpt_pretrain.run.fp8 import Fp8Settings

# A scale jumps if it changes by at least so many powers of two between each two of so many consecutive observations.
JUMP_OBSERVATIONS = 4
JUMP_BINADES = 2
# A normal distribution has a tenth of its values flushed if its standard deviation is four times the smallest
# magnitude: the typical value has lost its mantissa. Sound runs of the tests' models flush 3% at most.
FLUSHED_SHARE = 0.1
# Values that were zero before the cast have no such neighbors. Values spread evenly over E5M2's 32 powers of two have
# 5% at its smallest magnitude, a normal distribution that loses a tenth has 21%.
SMALLEST_SHARE = 1 / 32
# Values up to here round to the largest magnitude: it plus half of the spacing below it, 16 and 4,096.
_ROUNDS_DOWN = {"e4m3": 464.0, "e5m2": 61440.0}
# The smallest magnitude with a full mantissa (arXiv 2209.05433, table 1).
_SMALLEST_NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
LAGGING_SHARE = 1e-3
# Layers that a warning names besides the one that it describes.
LAYERS_NAMED = 3


class Alarms:
    """Remembers its warnings and the scales that it has seen."""

    def __init__(self, settings: Fp8Settings, saturation_threshold: float) -> None:
        self._settings = settings
        self._threshold = saturation_threshold
        # Layer, tensor and condition of the warnings in force.
        self._active: set[tuple[str, str, str]] = set()
        self._saturating: set[tuple[str, str]] = set()
        self._scales: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=JUMP_OBSERVATIONS))

    def check(self, statistics: StepStatistics) -> list[str]:
        """The new warnings of a step."""
        observed = {(tensor.layer, tensor.tensor) for tensor in statistics.tensors}
        active = {key for key in self._active if key[:2] not in observed}
        new: dict[tuple[str, str], list[tuple[TensorStatistics, str]]] = defaultdict(list)
        for tensor in statistics.tensors:
            for condition, message in self._conditions(tensor).items():
                if message is None:
                    continue
                key = tensor.layer, tensor.tensor, condition
                active.add(key)
                if key not in self._active:
                    new[tensor.tensor, condition].append((tensor, message))
        self._active = active
        return [_joined(statistics.step, found) for found in new.values()]

    def _conditions(self, tensor: TensorStatistics) -> dict[str, str | None]:
        """Each condition, with its message if the tensor shows it."""
        degenerate = self._degenerate(tensor)
        return {
            "degenerate": degenerate,
            "saturated": self._saturated(tensor),
            "flushed": self._flushed(tensor) if degenerate is None else None,
            "jumping": self._jumping(tensor, is_degenerate=degenerate is not None),
            "unset": self._unset(tensor),
            "lagging": self._lagging(tensor),
        }

    def _format(self, tensor: TensorStatistics) -> str:
        return role_format(self._settings, Role(tensor.tensor))

    def _degenerate(self, tensor: TensorStatistics) -> str | None:
        if tensor.amax is not None and math.isinf(tensor.amax):
            return (
                "it contains inf or NaN, which no scale can represent; lower model.optim.lr or lengthen "
                f"model.optim.sched.warmup_steps, and see whether {_without(tensor)} avoids it"
            )
        if tensor.scale_min == 0.0:
            return (
                "its scale is 0, which makes all its values zero and comes from an infinite amax: lower "
                f"model.optim.lr, or keep the layer out of FP8 with {_without(tensor)}"
            )
        # A single block of (nearly) zeros is not unusual.
        scale = tensor.scale_max if self._settings.recipe.numerics.scales_tensors else tensor.scale_min
        if scale is not None and scale >= self._settings.recipe.numerics.largest_scale(self._format(tensor)):
            return (
                "its scale is as large as scales get, because all its values are (nearly) zero (amax "
                f"{_number(tensor.amax)}); nothing reaches this layer: check its inputs and model.init_method_std, "
                f"or keep it out of FP8 with {_without(tensor)}"
            )
        return None

    def _saturated(self, tensor: TensorStatistics) -> str | None:
        """It saturates in this observation and the one before: growing tensors may for a step.

        Values that change by no more than others are rounded do not count.
        """
        if tensor.saturated is None:
            return None
        key, settings = (tensor.layer, tensor.tensor), self._settings
        largest = math.inf if tensor.amax is None or tensor.scale_max is None else tensor.amax * tensor.scale_max
        did = key in self._saturating
        does = tensor.saturated > self._threshold and largest > _ROUNDS_DOWN[self._format(tensor)]
        (self._saturating.add if does else self._saturating.discard)(key)
        if not (did and does):
            return None
        message = (
            f"{100 * tensor.saturated:.2g}% of its values are saturated (logging.fp8_saturation_threshold="
            f"{self._threshold:g}), amax {_number(tensor.amax)} at scale {_number(tensor.scale_max)}; "
        )
        if not settings.recipe.keeps_history:
            return message + f"keep the layer out of FP8 with {_without(tensor)}"
        # Powers of two by which the scale was too large.
        excess = largest / FORMAT_MAX[self._format(tensor)]
        missing = max(1, math.ceil(math.log2(excess))) if math.isfinite(excess) and excess > 0 else 1
        message += f"raise model.fp8_margin from {settings.margin} to {settings.margin + missing}, "
        if settings.amax_compute_algo is AmaxComputeAlgo.most_recent:
            message += "set model.fp8_amax_compute_algo=max, "
        return message + f"choose fp8=tensorwise, or keep the layer out of FP8 with {_without(tensor)}"

    def _flushed(self, tensor: TensorStatistics) -> str | None:
        """The cast made many of the values zero, or left the largest without a full mantissa."""
        smallest_normal = _SMALLEST_NORMAL[self._format(tensor)]
        is_coarse = tensor.amax and tensor.scale_max is not None and tensor.amax * tensor.scale_max < smallest_normal
        is_emptied = tensor.flushed > FLUSHED_SHARE and (tensor.smallest or 0.0) > SMALLEST_SHARE
        if not is_coarse and not is_emptied:
            return None
        choice = self._settings.recipe.words.finer
        return (
            f"{100 * tensor.flushed:.2g}% of its values became zero (amax {_number(tensor.amax)} at scale "
            f"{_number(tensor.scale_max)}), and values near zero are coarse; "
            + (f"choose {choice}, or " if choice else "")
            + f"keep it out of FP8 with {_without(tensor)}"
        )

    def _jumping(self, tensor: TensorStatistics, *, is_degenerate: bool) -> str | None:
        """The scale, if there is a single one, changed strongly at each of the last observations."""
        settings, scales = self._settings, self._scales[tensor.layer, tensor.tensor]
        if not settings.recipe.numerics.scales_tensors or tensor.scale_min is None:
            return None
        if is_degenerate:
            scales.clear()
            return None
        scales.append(math.log2(tensor.scale_min))
        if len(scales) < JUMP_OBSERVATIONS or min(abs(b - a) for a, b in pairwise(scales)) < JUMP_BINADES:
            return None
        message = (
            f"its scale jumps, by a factor of {2**JUMP_BINADES} or more from one observation to the next: "
            f"{', '.join(f'{2.0**scale:.2g}' for scale in scales)}; "
        )
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

    def _unset(self, tensor: TensorStatistics) -> str | None:
        """A delayed scale was 1 in this observation and the one before, although its amax does not call for 1."""
        scales = list(self._scales[tensor.layer, tensor.tensor])
        if not self._settings.recipe.keeps_history or not tensor.amax or scales[-2:] != [0.0, 0.0]:
            return None
        if 0.5 < FORMAT_MAX[self._format(tensor)] * 2.0**-self._settings.margin / tensor.amax < 2.0:
            return None
        return (
            f"its scale is still 1 at amax {_number(tensor.amax)}: no pass has set it; if it came from a checkpoint, "
            "reset scales with checkpoint.reset_fp8_state=true, or choose fp8=tensorwise, which keeps none"
        )

    def _lagging(self, tensor: TensorStatistics) -> str | None:
        if tensor.lagging is None or tensor.lagging <= LAGGING_SHARE:
            return None
        return (
            f"{100 * tensor.lagging:.2g}% of its codes are not those of the weight now: the layer computes with an "
            f"older one, which no setting asks for; keep it out of FP8 with {_without(tensor)}"
        )


def _joined(step: int, found: list[tuple[TensorStatistics, str]]) -> str:
    """One warning for several layers: the message of the one that saturates most, and names of others."""
    worst, message = max(found, key=lambda each: each[0].saturated or 0.0)
    others = [tensor.layer for tensor, _ in found if tensor is not worst]
    text = f"FP8 at step {step}: {worst.tensor} of {worst.layer}: {message}"
    if not others:
        return text
    unnamed = len(others) - LAYERS_NAMED
    return f"{text}; likewise {', '.join(others[:LAYERS_NAMED])}" + (f" and {unnamed} more" if unnamed > 0 else "")


def _without(tensor: TensorStatistics) -> str:
    return f'model.fp8_exclude=["{tensor.layer}"]'


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
