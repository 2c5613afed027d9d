"""What FP8 does to the tensors of one step: largest magnitude, scale, values saturated, values flushed to zero.

`fp8/observer.py` watches the linear layers' products during one training step. Their operands are reduced on the device
into one table for the whole model, the same on every rank: a row for each of the three tensors of each linear layer.
One collective joins the ranks. Nothing waits for the device until the table is read.

What is counted:

- Each tensor in the product that reads it first: inputs and weights in forward, output gradients in dgrad. Weights
  count once a step, the others in every microbatch. A recomputed pass counts again, which changes no share.
- Saturated: codes of the format's largest magnitude, in casts where amax · scale exceeds that magnitude. Only delayed
  scales can be too large for their tensor; the others are computed from it.
- Flushed: codes that are zero. This is an upper bound, because values that were zero before the cast count, too.

Shares are means over all values of all microbatches and all ranks.

A sampled observation costs models of any size a small share of their steps. It looks at the first microbatch of some
layers: those of a large model take up to `MOST_TURNS` turns. Of each tensor it copies amax, scale and at most `SAMPLE`
rows and columns, evenly spaced and others each time. In these 16,384 values a share of 1e-3 is known to 2.5e-4, one of
0.1 to 2.3e-3 (one standard deviation, if values are independent; to 0.027 if tokens are all or nothing). A few kernels
count all tensors together, because on a GPU the host has to start every kernel.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.fp8.delayed import delayed_state
from gpt_pretrain.fp8.gemms import OPERANDS, Fp8Operand, Phase, Product, Role, count_codes, other_codes
from gpt_pretrain.fp8.local_layers import planned_name
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.run.products import Linear

# The codes of the largest finite magnitudes, without the sign bit (arXiv 2209.05433, table 1).
_LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
# Multiplied by its amax, a scale of fp8_max / amax may exceed fp8_max by a rounding of fp32.
_ROUNDING = 1.0 + 2.0**-20
# The code of the smallest magnitude that is not zero, in both formats.
_SMALLEST_CODE = 1
# Rows, and columns, of a tensor that a sample takes.
SAMPLE = 128
# The fewest linear layers in a turn, and the most turns that all layers take.
LAYERS_A_TURN = 12
MOST_TURNS = 4
# Columns of the maxima; the smallest scale is stored negated.
_AMAX, _MINUS_SCALE_MIN, _SCALE_MAX, _HISTORY = range(4)
# Columns of the sums. Saturation is judged for values whose amax is known. The last four are of samples: codes that are
# not zero, the smallest of them, weights compared with their masters, and those that differ.
_VALUES, _FLUSHED, _JUDGED, _SATURATED, _NOT_ZERO, _SMALLEST, _COMPARED, _LAGGING = range(8)


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
    smallest: float | None
    """Share of the format's smallest magnitude among a sample's codes that are not zero; None without any."""
    lagging: float | None
    """Share of a sample's codes that are not those of the weight now; None if they were not compared."""
    amax_history_used: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """The tensors that were cast in one step, in the order of the forward pass."""

    step: int
    tensors: list[TensorStatistics]


class StatisticsCollector:
    """Watches single steps, the same ones on every rank."""

    def __init__(self, linears: Sequence[Linear], chunks: Sequence[MegatronModule], device: torch.device) -> None:
        names = [linear.module for linear in linears]
        self._rows = {key: row for row, key in enumerate((name, role) for name in names for role in Role)}
        self._chunks = chunks
        self._device = device
        self._modules = {name: module for chunk in chunks for name, module in whole_model_modules(chunk)}
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._num_turns = max(1, min(MOST_TURNS, len(names) // LAYERS_A_TURN))
        # Neighbors share a turn, so that each turn looks at all kinds of layers.
        self._turns = {name: index * self._num_turns // len(names) for index, name in enumerate(names)}
        self._num_sampled = 0
        self._clear(sampled=False)

    def _clear(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self._maxima = torch.full((len(self._rows), 4), -torch.inf, device=self._device)
        self._sums = torch.zeros((len(self._rows), 8), dtype=torch.int64, device=self._device)
        self._counted_in: dict[tuple[str, Role], Phase] = {}
        self._asked: set[tuple[str, Phase]] = set()
        self._seen: list[_Seen] = []

    @contextmanager
    def observe(self, step: int, *, sampled: bool = False) -> Iterator[None]:
        """Watches the training step inside and then joins the tables of all ranks; every rank calls it."""
        self._clear(sampled=sampled)
        asks = self._asks if sampled else None
        with observe_products(self._chunks, self.add, asks=asks, measure_amax=not sampled):
            yield
        self._count_seen()
        if sampled:
            self._num_sampled += 1
        else:
            self._add_histories()
        table = torch.cat([self._maxima.double(), self._sums.double()], dim=1)
        tables = table.new_empty(torch.distributed.get_world_size() * len(table), table.shape[1])
        torch.distributed.all_gather_into_tensor(tables, table)
        maxima, sums = tables.view(-1, *table.shape).split([self._maxima.shape[1], self._sums.shape[1]], dim=2)
        self._pending.append((step, torch.cat([maxima.amax(dim=0), sums.sum(dim=0)], dim=1)))

    def _asks(self, layer: str, phase: Phase) -> bool:
        """Whether a sample needs a product: the first of its kind, if it has an operand that was not looked at."""
        if not self._is_its_turn(layer):
            return False
        is_first = (layer, phase) not in self._asked
        self._asked.add((layer, phase))
        return is_first and any((layer, role) not in self._counted_in for role in OPERANDS[phase])

    def _is_its_turn(self, layer: str) -> bool:
        return not self._sampled or self._turns.get(planned_name(layer)) == self._num_sampled % self._num_turns

    @torch.no_grad()
    def add(self, layer: str, product: Product) -> None:
        """Looks at those operands of a product that count there."""
        if not self._is_its_turn(layer):
            return
        for operand in product.operands:
            row = self._rows.get((planned_name(layer), operand.role))
            if row is None or not isinstance(operand, Fp8Operand):
                continue
            is_first = (layer, operand.role) not in self._counted_in
            is_in_phase = self._counted_in.setdefault((layer, operand.role), product.phase) is product.phase
            counts_again = is_in_phase and operand.role is not Role.weight and not self._sampled
            if is_first or counts_again:
                module = self._modules.get(layer)
                self._seen.append(self._look_at(row, operand, module, is_first=is_first))

    def _look_at(self, row: int, operand: Fp8Operand, module: torch.nn.Module | None, *, is_first: bool) -> "_Seen":
        codes = operand.codes
        scale_min, scale_max = _extremes(operand.scale)
        sample = self._sample(codes).reshape(-1).view(torch.uint8) if is_first else None
        return _Seen(
            row=row,
            format=operand.format,
            num_values=sample.numel() if self._sampled and sample is not None else codes.numel(),
            counts=None if self._sampled else count_codes(codes, _LARGEST_CODE[operand.format]),
            sample=sample,
            weight=self._sample_weight(operand, module) if is_first and operand.role is Role.weight else None,
            # Delayed scaling writes the next pass's amax into the same place.
            amax=None if operand.amax is None else operand.amax.detach().view(-1).amax(),
            scale_min=scale_min,
            scale_max=scale_max,
        )

    def _sample(self, matrix: torch.Tensor) -> torch.Tensor:
        """At most `SAMPLE` rows and columns, evenly spaced; others in the layer's next turn."""
        turn = self._num_sampled // self._num_turns
        matrix = matrix.detach().reshape(-1, matrix.shape[-1])
        (down, across) = (-(-size // SAMPLE) for size in matrix.shape)
        part = matrix[turn % down :: down, turn % across :: across]
        # Small tensors are copied, too, because the optimizer's step comes before they are counted.
        return part.clone(memory_format=torch.contiguous_format)

    def _sample_weight(self, operand: Fp8Operand, module: torch.nn.Module | None) -> torch.Tensor | None:
        """The sample's weights as they are now; None if stored in FP8 or cast in blocks, which the proof compares."""
        weight: Any = getattr(module, "weight", None)
        if weight is None or hasattr(weight, "_quantizer") or weight.shape != operand.codes.shape:
            return None
        return self._sample(weight).reshape(-1) if operand.scale.numel() == 1 else None

    @torch.no_grad()
    def _count_seen(self) -> None:
        """Adds up what was looked at, with a few kernels for all tensors."""
        seen, self._seen = self._seen, []
        by_size: dict[int, list[_Seen]] = defaultdict(list)
        by_weight: dict[tuple[int, str], list[_Seen]] = defaultdict(list)
        for each in seen:
            if each.sample is not None:
                by_size[each.sample.numel()].append(each)
            if each.weight is not None:
                by_weight[each.weight.numel(), each.format].append(each)
        for group in by_size.values():
            self._count_samples(group)
        for group in by_weight.values():
            self._compare_weights(group)
        if not seen:
            return
        # Counted one by one, or just now with a sample.
        counts = torch.stack([each.counts for each in seen if each.counts is not None])
        flushed, largest, highest = counts.unbind(dim=1)
        rows, values, largest_code = self._on_device(
            [[each.row, each.num_values, _LARGEST_CODE[each.format]] for each in seen]
        ).unbind(dim=1)
        limit, known = self._on_device(
            [[FORMAT_MAX[each.format] * _ROUNDING, float(each.amax is not None)] for each in seen]
        ).unbind(dim=1)
        known = known.bool()
        missing = torch.full((), -torch.inf, device=self._device)
        amax = torch.stack([missing if each.amax is None else each.amax for each in seen])
        amax = torch.where(known, _finite_or_inf(amax), missing)
        scale_min = _finite_or_inf(torch.stack([each.scale_min for each in seen]))
        scale_max = _finite_or_inf(torch.stack([each.scale_max for each in seen]))
        saturated = largest * (known & (amax * scale_min > limit))
        # Casts ignore NaN in the amax and leave it in the codes.
        amax = torch.where(highest > largest_code, torch.inf, amax)
        maxima = torch.stack([amax, -scale_min, scale_max], dim=1)
        index = rows[:, None].expand_as(maxima)
        self._maxima[:, :_HISTORY] = self._maxima[:, :_HISTORY].scatter_reduce(0, index, maxima, "amax")
        sums = torch.stack([values, flushed, values * known, saturated], dim=1)
        self._sums[:, :_NOT_ZERO] = self._sums[:, :_NOT_ZERO].index_add(0, rows, sums)

    def _count_samples(self, group: list["_Seen"]) -> None:
        """Counts samples of one size."""
        magnitudes = torch.stack([each.sample for each in group if each.sample is not None]) & 0x7F
        rows, largest = self._on_device([[each.row, _LARGEST_CODE[each.format]] for each in group]).unbind(dim=1)
        not_zero = torch.count_nonzero(magnitudes, dim=1)
        smallest = torch.count_nonzero(magnitudes == _SMALLEST_CODE, dim=1)
        self._sums[:, _NOT_ZERO].index_add_(0, rows, not_zero)
        self._sums[:, _SMALLEST].index_add_(0, rows, smallest)
        if self._sampled:
            full = torch.count_nonzero(magnitudes == largest[:, None], dim=1)
            counts = torch.stack([magnitudes.shape[1] - not_zero, full, magnitudes.amax(dim=1).long()], dim=1)
            for each, of_sample in zip(group, counts, strict=True):
                each.counts = of_sample

    def _compare_weights(self, group: list["_Seen"]) -> None:
        """Casts samples of weights once more, of one size and format.

        The last bit of the scale is unknown, because its inverse is stored beside the codes. So values in the middle
        between two codes may go either way: with some amaxes one in 128 values of a BF16 weight.
        """
        then = torch.stack([each.sample for each in group if each.sample is not None])
        now = torch.stack([each.weight for each in group if each.weight is not None])
        scale = torch.stack([each.scale_max for each in group])[:, None]
        other = other_codes(then, now, torch.zeros_like(scale), scale, group[0].format).sum(dim=1)
        compared = torch.full_like(other, then.shape[1])
        (rows,) = self._on_device([[each.row for each in group]])
        self._sums[:, _COMPARED:].index_add_(0, rows, torch.stack([compared, other], dim=1))

    def _on_device(self, table: list[list[int]] | list[list[float]]) -> torch.Tensor:
        """A table of numbers, copied without waiting for the device."""
        on_host = torch.tensor(table, pin_memory=self._device.type == "cuda")
        return on_host.to(self._device, non_blocking=True)

    def _add_histories(self) -> None:
        for (name, role), row in self._rows.items():
            state = delayed_state(self._modules[name], role) if name in self._modules else None
            if state is not None:
                # Row 0 belongs to the present pass; between passes it is zero.
                self._maxima[row, _HISTORY] = torch.count_nonzero(state[0][1:]) + 1

    def read(self) -> list[StepStatistics]:
        """Statistics of the steps observed since the last call; waits for the device if there were any."""
        pending, self._pending = self._pending, []
        return [StepStatistics(step=step, tensors=list(self._tensors(table))) for step, table in pending]

    def _tensors(self, table: torch.Tensor) -> Iterator[TensorStatistics]:
        num_maxima = self._maxima.shape[1]
        for (layer, role), row in zip(self._rows, table.tolist(), strict=True):
            sums = [round(number) for number in row[num_maxima:]]
            if sums[_VALUES]:
                yield _tensor(layer, role, row[:num_maxima], sums)


@dataclass(kw_only=True, slots=True)
class _Seen:
    """One operand as it was read."""

    row: int
    format: str
    num_values: int
    counts: torch.Tensor | None
    """int64 [3], as of `count_codes`; None until its sample is counted."""
    sample: torch.Tensor | None
    """uint8 [values]."""
    weight: torch.Tensor | None
    """The values of a weight's sample [values] as they are now."""
    amax: torch.Tensor | None
    """fp32 []."""
    scale_min: torch.Tensor
    scale_max: torch.Tensor


def _finite_or_inf(values: torch.Tensor) -> torch.Tensor:
    """NaN becomes infinity: collectives may drop a NaN from a maximum."""
    return torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def _extremes(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest of a tensor's scales, fp32 []."""
    scale = scale.detach().float()
    if scale.numel() == 1:
        return scale.view(()), scale.view(())
    # Entries that pad an array of block scales are NaN.
    missing = torch.isnan(scale)
    return torch.where(missing, torch.inf, scale).min(), torch.where(missing, -torch.inf, scale).max()


def _tensor(layer: str, role: Role, maxima: list[float], sums: list[int]) -> TensorStatistics:
    known = [None if maximum == -torch.inf else maximum for maximum in maxima]
    history = known[_HISTORY]
    return TensorStatistics(
        layer=layer,
        tensor=role.value,
        amax=known[_AMAX],
        # Known wherever the largest scale is; -inf can be a value.
        scale_min=None if known[_SCALE_MAX] is None else -maxima[_MINUS_SCALE_MIN],
        scale_max=known[_SCALE_MAX],
        saturated=sums[_SATURATED] / sums[_JUDGED] if sums[_JUDGED] else None,
        flushed=sums[_FLUSHED] / sums[_VALUES],
        smallest=sums[_SMALLEST] / sums[_NOT_ZERO] if sums[_NOT_ZERO] else None,
        lagging=sums[_LAGGING] / sums[_COMPARED] if sums[_COMPARED] else None,
        amax_history_used=None if history is None else round(history),
    )
