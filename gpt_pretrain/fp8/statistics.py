"""What FP8 does to the tensors of one step: largest magnitude, scale, values saturated, values flushed to zero.

`fp8/observer.py` watches the linear layers' products during one training step. Their operands are reduced on the device
into one table for the whole model, the same on every rank: a row for each of the three tensors of each linear layer.
Two collectives, a maximum and a sum, join the ranks whatever each holds: tensor parallel shards, data parallel
replicas, pipeline stages, or nothing in FP8. Nothing waits for the device until the table is read.

What is counted:

- Each tensor where it is read first: inputs and weights in the forward product, output gradients in dgrad. Weights
  count once a step, the others in every microbatch; a recomputed pass counts again and changes no share. The other
  product of a tensor reads the same codes, transposed, or with block scales codes that were cast along its other axis.
- Saturated: codes of the format's largest magnitude, in casts where amax · scale exceeds that magnitude. Only delayed
  scales can be too large for their tensor; the others are computed from it.
- Flushed: codes that are zero. This is an upper bound, because values that were zero before the cast count, too.

Shares are means over all values of all microbatches and all ranks.

`Alarms` warns about tensors, from their statistics, and says what to do. Each warning appears once, and again only
after its tensor has recovered. Layers whose tensors begin to show the same condition at the same step share one.
Observations are `logging.fp8_statistics_interval` steps apart: nothing between them is seen, and a scale that jumps has
differed from one observation to the next, not from step to step.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.fp8.gemms import Operand, Phase, Product, Role, amax_history, role_format
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.kernels.fp8_codes import count_codes
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import FORMAT_MAX, Fp8Settings

# The codes of the largest finite magnitudes, without the sign bit (arXiv 2209.05433, table 1).
_LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
# Multiplied by its amax, a scale of fp8_max / amax may exceed fp8_max by a rounding of fp32.
_ROUNDING = 1.0 + 2.0**-20
# Columns of the maxima; the smallest scale is stored negated.
_AMAX, _MINUS_SCALE_MIN, _SCALE_MAX, _HISTORY = range(4)
# Columns of the sums. Saturation can be judged only for values whose amax is known.
_VALUES, _FLUSHED, _JUDGED, _SATURATED = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorStatistics:
    """A tensor of a linear layer in one step, with the fields of `report.records.Fp8Tensor`."""

    layer: str
    tensor: str
    amax: float | None
    scale_min: float | None
    scale_max: float | None
    saturated: float | None
    flushed: float
    amax_history_used: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """All tensors that were cast in one step, in the order of the forward pass."""

    step: int
    tensors: list[TensorStatistics]


class StatisticsCollector:
    """Watches single steps; every rank watches the same ones, so that their collectives meet.

    Args:
        linears: The linear layers of the whole model, the rows of the table.
        chunks: This rank's model chunks.
        device: The device of the chunks.
    """

    def __init__(self, linears: Sequence[Linear], chunks: Sequence[MegatronModule], device: torch.device) -> None:
        names = [linear.module for linear in linears]
        self._rows = {key: row for row, key in enumerate((name, role) for name in names for role in Role)}
        self._chunks = chunks
        self._device = device
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        size = len(self._rows), 4
        self._maxima = torch.full(size, -torch.inf, device=self._device)
        self._sums = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._counted_in: dict[tuple[str, Role], Phase] = {}

    @contextmanager
    def observe(self, step: int) -> Iterator[None]:
        """Watches the training step inside and then joins the tables of all ranks; every rank calls it.

        Args:
            step: The number of the step.
        """
        self._clear()
        with observe_products(self._chunks, self.add, measure_amax=True):
            yield
        self._add_histories()
        torch.distributed.all_reduce(self._maxima, op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(self._sums)
        self._pending.append((step, self._maxima, self._sums))

    @torch.no_grad()
    def add(self, layer: str, product: Product) -> None:
        """Counts those operands of a product that count there; does not wait for the device."""
        for operand in product.operands:
            row = self._rows.get((layer, operand.role))
            if row is not None and operand.codes is not None and self._counts(layer, operand.role, product.phase):
                self._add_operand(row, operand, operand.codes)

    def _counts(self, layer: str, role: Role, phase: Phase) -> bool:
        new = (layer, role) not in self._counted_in
        counted_in = self._counted_in.setdefault((layer, role), phase)
        return new if role is Role.weight else counted_in is phase

    def _add_operand(self, row: int, operand: Operand, codes: torch.Tensor) -> None:
        largest_code = _LARGEST_CODE[operand.format]
        flushed, largest, highest = count_codes(codes, largest_code)
        values = torch.full((), codes.numel(), dtype=torch.int64, device=self._device)
        scale_min, scale_max = _extremes(operand.scale)
        if operand.amax is None:
            amax, judged, saturated = torch.full_like(scale_min, -torch.inf), 0 * values, 0 * values
        else:
            amax, judged = _finite_or_inf(operand.amax.detach().float()).max(), values
            saturated = largest * (amax * scale_min > FORMAT_MAX[operand.format] * _ROUNDING)
        # Casts ignore NaN when they take the amax, and leave it in the codes.
        amax = torch.where(highest > largest_code, torch.inf, amax)
        seen = torch.stack([amax, -scale_min, scale_max])
        self._maxima[row, :_HISTORY] = torch.maximum(self._maxima[row, :_HISTORY], seen)
        self._sums[row] += torch.stack([values, flushed, judged, saturated])

    def _add_histories(self) -> None:
        for chunk in self._chunks:
            for name, module in whole_model_modules(chunk):
                for role in Role:
                    history = amax_history(module, role)
                    if history is not None and (name, role) in self._rows:
                        # The first row belongs to the present pass; between passes it is zero.
                        used = torch.count_nonzero(history[1:]) + 1
                        self._maxima[self._rows[name, role], _HISTORY] = used

    def read(self) -> list[StepStatistics]:
        """Statistics of the steps observed since the last call; waits for the device if there were any."""
        pending, self._pending = self._pending, []
        return [
            StepStatistics(step=step, tensors=self._tensors(maxima.tolist(), sums.tolist()))
            for step, maxima, sums in pending
        ]

    def _tensors(self, maxima: list[list[float]], sums: list[list[int]]) -> list[TensorStatistics]:
        return [
            _tensor(layer, role, maxima[row], sums[row])
            for (layer, role), row in self._rows.items()
            if sums[row][_VALUES]
        ]


def _finite_or_inf(values: torch.Tensor) -> torch.Tensor:
    """NaN becomes infinity, because collectives may drop a NaN from a maximum."""
    return torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def _extremes(scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest of a tensor's scales, fp32 []."""
    assert scale is not None, "FP8 codes have a scale"
    scale = scale.detach().float()
    if scale.numel() == 1:
        only = _finite_or_inf(scale).max()
        return only, only
    # Entries that only pad an array of block scales are NaN.
    missing = torch.isnan(scale)
    return torch.where(missing, torch.inf, scale).min(), torch.where(missing, -torch.inf, scale).max()


def _tensor(layer: str, role: Role, maxima: list[float], sums: list[int]) -> TensorStatistics:
    known = [None if maximum == -torch.inf else maximum for maximum in maxima]
    history = known[_HISTORY]
    return TensorStatistics(
        layer=layer,
        tensor=role.value,
        amax=known[_AMAX],
        # Here -inf can be a value: the smallest scale is known wherever the largest is.
        scale_min=None if known[_SCALE_MAX] is None else -maxima[_MINUS_SCALE_MIN],
        scale_max=known[_SCALE_MAX],
        saturated=sums[_SATURATED] / sums[_JUDGED] if sums[_JUDGED] else None,
        flushed=sums[_FLUSHED] / sums[_VALUES],
        amax_history_used=None if history is None else round(history),
    )


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
        scale = tensor.scale_max if self._settings.recipe.scales_tensors else tensor.scale_min
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
        excess = tensor.amax * tensor.scale_max / FORMAT_MAX[role_format(self._settings, Role(tensor.tensor))]
        return max(1, math.ceil(math.log2(excess))) if math.isfinite(excess) and excess > 0 else 1

    def _jumps(self, tensor: TensorStatistics, degenerate: bool) -> bool:
        """Whether the scale changed strongly at each of the last observations; blocks have no single scale."""
        scales = self._scales[tensor.layer, tensor.tensor]
        if not self._settings.recipe.scales_tensors or tensor.scale_min is None:
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
