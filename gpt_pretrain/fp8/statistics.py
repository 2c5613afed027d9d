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

Delayed scaling also has state, its scales and amax histories: at the end of the file is what training asks and
changes of it before a model's first step and after one that was skipped.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.fp8.gemms import Operand, Phase, Product, Role
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.kernels.fp8_codes import count_codes
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import FORMAT_MAX

# The codes of the largest finite magnitudes, without the sign bit (arXiv 2209.05433, table 1).
_LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
# Multiplied by its amax, a scale of fp8_max / amax may exceed fp8_max by a rounding of fp32.
_ROUNDING = 1.0 + 2.0**-20
# Columns of the maxima; the smallest scale is stored negated.
_AMAX, _MINUS_SCALE_MIN, _SCALE_MAX, _HISTORY = range(4)
# Columns of the sums. Saturation can be judged only for values whose amax is known.
_VALUES, _FLUSHED, _JUDGED, _SATURATED = range(4)
# Where delayed scaling keeps a tensor's history: which of the module's states, and which column.
_HISTORY_OF = {
    Role.input: ("scaling_fwd", 0),
    Role.weight: ("scaling_fwd", 1),
    Role.output_gradient: ("scaling_bwd", 0),
}


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


def amax_history(module: torch.nn.Module, role: Role) -> torch.Tensor | None:
    """A tensor's amax history, fp32 [fp8_amax_history_len], of Transformer Engine's or emulated linear layers.

    None for modules without FP8 and for recipes without a history.
    """
    state, column = _state_of(module, role)
    history = getattr(state, "amax_history", None)
    return None if history is None else history[:, column]


def delayed_scale(module: torch.nn.Module, role: Role) -> torch.Tensor | None:
    """The scale of a tensor's next cast, fp32 [], where `amax_history` is not None; 1 until a pass has set one."""
    state, column = _state_of(module, role)
    return None if getattr(state, "amax_history", None) is None else state.scale[column]


def _state_of(module: torch.nn.Module, role: Role) -> tuple[Any, int]:
    name, column = _HISTORY_OF[role]
    return getattr(module, "fp8_meta", {}).get(name), column


@torch.no_grad()
def forget_non_finite_amaxes(chunks: Sequence[MegatronModule]) -> None:
    """Replaces NaN and infinity in all amax histories with 0; recipes without histories have none.

    A skipped step updates nothing, but its amaxes would stay in the histories for `model.fp8_amax_history_len` steps.
    All that time Transformer Engine would leave the scales unchanged, because no scale follows from an infinite amax.
    """
    for module in _modules(chunks):
        for role in Role:
            history = amax_history(module, role)
            if history is not None:
                history.masked_fill_(~torch.isfinite(history), 0.0)


def gradient_scales(chunks: Sequence[MegatronModule]) -> torch.Tensor:
    """The scales of the next casts of output gradients, fp32 [FP8 layers of this rank].

    A scale is 1 only where no pass has shown an amax: the largest code over an amax is not 1.
    """
    found = (delayed_scale(module, Role.output_gradient) for module in _modules(chunks))
    scales = [scale for scale in found if scale is not None]
    # A stacked copy stays when Transformer Engine writes the next scales in place.
    return torch.stack(scales) if scales else torch.empty(0, device=torch.cuda.current_device())


def _modules(chunks: Sequence[MegatronModule]) -> Iterator[torch.nn.Module]:
    return (module for chunk in chunks for module in chunk.modules())


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
