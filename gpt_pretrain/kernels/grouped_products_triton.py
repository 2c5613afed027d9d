"""The linear layers of many small experts as one operator, for rows that are sorted by expert.

Transformer Engine's grouped layer calls cuBLAS once for each expert and product. A call takes about 65 µs of the host's
time, but only 5 µs of the GPU's for an expert of Qwen3-30B-A3B. Here each of a layer's three products is one kernel,
and a program computes one tile of one expert. Weights and main gradients stay separate tensors, which kernels find in
tables of addresses. Sums have a fixed order, so that results repeat to the bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

# The tile of the result that a program computes. In tiles half as wide rows times weights took 1.3 times as long
# (benchmarks/experts.md).
ROWS = 128
_COLUMNS = 256
# Terms of each sum that are loaded at a time, and how many such loads may be in flight if shared memory holds them.
_DEPTH = 64
_STAGES = 4
# Tiles of rows that are computed for all columns before the next ones, so that shared operands stay in L2.
_GROUP = 8
_WARPS = 8

# When it multiplies, Triton's interpreter reads the bits of BF16 as integers.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Addresses:
    """A table of the addresses of tensors, for kernels to read; rewritten only when one of them has moved."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self.table = torch.empty(0)
        """int64 [tensors], on their device."""
        self.alignment = 16
        """Bytes that divide every address, at most the 16 that one access reads."""

    def of(self, tensors: Sequence[torch.Tensor]) -> Self:
        """The table of these tensors until the next call; contiguous, they must outlive the kernels that read it."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self.table = torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
            self.alignment = math.gcd(16, *addresses)
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Which rows belong to which expert, on the device."""

    starts: torch.Tensor
    """int32 [experts + 1]: the first row of each expert, then the number of rows."""
    tiles: torch.Tensor
    """int32 [tiles, 3]: each tile's expert, its first row, and the end of the expert's rows."""


def place_rows(counts: Sequence[int], device: torch.device) -> ExpertRows:
    """Cuts the rows of experts, `counts` of each, into tiles."""
    of_expert = np.array(counts)
    starts = np.concatenate([[0], of_expert.cumsum()])
    num_tiles = (of_expert + ROWS - 1) // ROWS
    experts = np.repeat(np.arange(len(of_expert)), num_tiles)
    before = (num_tiles.cumsum() - num_tiles)[experts]
    first = starts[experts] + (np.arange(len(experts)) - before) * ROWS
    # One copy for both tensors, which does not wait for the device.
    tiles = np.stack([experts, first, starts[experts + 1]], axis=1)
    flat = torch.from_numpy(np.concatenate([starts, tiles.ravel()]).astype(np.int32))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return ExpertRows(starts=flat[: len(starts)], tiles=flat[len(starts) :].view(-1, 3))


class RowPlaces:
    """The rows of each expert, placed once for all products of a pass with the same counts."""

    def __init__(self) -> None:
        self._counts: list[int] | None = None
        self._rows: ExpertRows | None = None

    def of(self, counts: Sequence[int], device: torch.device) -> ExpertRows:
        """The places of `counts` rows of each expert; every call must name the same device."""
        asked = list(counts)
        if self._rows is None or asked != self._counts:
            self._counts, self._rows = asked, place_rows(asked, device)
        return self._rows


@triton.jit
def _place(program, num_rows, num_columns: tl.constexpr, GROUP: tl.constexpr):
    """The tile of rows and the tile of columns that a program computes."""
    programs_of_group = GROUP * num_columns
    first = program // programs_of_group * GROUP
    rows_of_group = tl.minimum(num_rows - first, GROUP)
    within = program % programs_of_group
    return first + within % rows_of_group, within // rows_of_group


@triton.jit
def _add_product(a, b, total):
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _as_bound(count):
    """A loaded number as the end of a range. In Triton's interpreter it is an array of one number."""
    return count.handle.data.item() if _INTERPRETED else count


@triton.jit
def _tensor_of(table, expert, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """An expert's tensor. Triton knows only the alignment of its arguments."""
    return tl.multiple_of(tl.load(table + expert).to(tl.pointer_type(dtype)), ALIGNMENT)


# Otherwise Triton would compile again, in the middle of a run, for a multiple of 16.
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm_kernel(
    inputs, weights, outputs, tiles, num_tiles,
    width: tl.constexpr, depth: tl.constexpr, column_step: tl.constexpr, depth_step: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """outputs[r, c] = sum over d of inputs[r, d] · weight[c · column_step + d · depth_step]."""
    row_tile, column_tile = _place(tl.program_id(0), num_tiles, tl.cdiv(width, COLUMNS), GROUP)
    expert = tl.load(tiles + 3 * row_tile)
    start = tl.load(tiles + 3 * row_tile + 1).to(tl.int64)
    count = tl.load(tiles + 3 * row_tile + 2) - start
    weight = _tensor_of(weights, expert, tl.bfloat16, ALIGNMENT)

    rows = tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    terms = tl.arange(0, DEPTH)
    # Rows beyond the expert's are computed from its last one, and not stored.
    given = inputs + start * depth + tl.minimum(rows, count - 1)[:, None] * depth + terms[None, :]
    weighed = weight + columns[None, :] * column_step + terms[:, None] * depth_step
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        is_term = first + terms < depth
        a = tl.load(given) if depth % DEPTH == 0 else tl.load(given, mask=is_term[None, :], other=0.0)
        if depth % DEPTH == 0 and width % COLUMNS == 0:
            b = tl.load(weighed)
        else:
            b = tl.load(weighed, mask=inside[None, :] & is_term[:, None], other=0.0)
        total = _add_product(a, b, total)
        given += DEPTH
        weighed += DEPTH * depth_step
    targets = outputs + start * width + rows[:, None] * width + columns[None, :]
    tl.store(targets, total.to(tl.bfloat16), mask=(rows < count)[:, None] & inside[None, :])


@triton.jit
def _grouped_wgrad_gemm_kernel(
    output_gradients, inputs, main_grads, starts, height: tl.constexpr, width: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """main_grad[r, c] += sum over an expert's rows i of output_gradients[i, r] · inputs[i, c]."""
    num_row_tiles: tl.constexpr = (height + ROWS - 1) // ROWS
    num_column_tiles: tl.constexpr = (width + COLUMNS - 1) // COLUMNS
    programs_of_expert: tl.constexpr = num_row_tiles * num_column_tiles
    expert = tl.program_id(0) // programs_of_expert
    start = tl.load(starts + expert).to(tl.int64)
    count = tl.load(starts + expert + 1) - tl.load(starts + expert)
    if count > 0:
        within = tl.program_id(0) % programs_of_expert
        row_tile, column_tile = _place(within, num_row_tiles, num_column_tiles, GROUP)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        terms = tl.arange(0, DEPTH)
        gradients = output_gradients + start * height + terms[:, None] * height + rows[None, :]
        given = inputs + start * width + terms[:, None] * width + columns[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, _as_bound(count), DEPTH):
            is_term = (first + terms < count)[:, None]
            if height % ROWS == 0:
                a = tl.load(gradients, mask=is_term, other=0.0)
            else:
                a = tl.load(gradients, mask=is_term & (rows < height)[None, :], other=0.0)
            if width % COLUMNS == 0:
                b = tl.load(given, mask=is_term, other=0.0)
            else:
                b = tl.load(given, mask=is_term & (columns < width)[None, :], other=0.0)
            total = _add_product(tl.trans(a), b, total)
            gradients += DEPTH * height
            given += DEPTH * width
        main_grad = _tensor_of(main_grads, expert, tl.float32, ALIGNMENT)
        targets = main_grad + rows[:, None] * width + columns[None, :]
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        # Atomic additions wait for nothing and need fewer registers. Each value gets one, so the order is fixed.
        tl.atomic_add(targets, total, mask=inside, sem="relaxed")


@cache
def _stages(device: torch.device) -> int:
    """Loads that may be in flight: four take 192 KiB, which Hopper has and smaller GPUs do not."""
    if device.type != "cuda":
        return 1
    of_one = (ROWS + _COLUMNS) * _DEPTH * torch.bfloat16.itemsize
    shared: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return min(_STAGES, shared // of_one)


def _multiply(
    values: torch.Tensor, weights: Addresses, rows: ExpertRows, width: int, steps: tuple[int, int]
) -> torch.Tensor:
    """Each row of `values`, contiguous BF16 [rows, depth], times the matrix of its expert: BF16 [rows, width].

    `weights` are the matrices, BF16 [depth, width]; `steps` are their strides: of columns, then of rows.
    """
    num_tiles, depth = len(rows.tiles), values.shape[1]
    result = values.new_empty(values.shape[0], width)
    if num_tiles:
        _grouped_gemm_kernel[(num_tiles * triton.cdiv(width, _COLUMNS),)](
            values, weights.table, result, rows.tiles, num_tiles, width, depth, *steps,
            ROWS, _COLUMNS, _DEPTH, _GROUP, weights.alignment, num_warps=_WARPS, num_stages=_stages(values.device),
        )  # fmt: skip
    return result


def _accumulate_weight_gradients(
    output_gradients: torch.Tensor, inputs: torch.Tensor, main_grads: Addresses, rows: ExpertRows
) -> None:
    """Adds the gradient of each weight to its main gradient, if the expert has rows.

    `output_gradients` [rows, out] and `inputs` [rows, in] are BF16, `main_grads` fp32 [out, in]; all are contiguous.
    """
    height, width = output_gradients.shape[1], inputs.shape[1]
    if not len(rows.tiles):
        return
    programs = triton.cdiv(height, ROWS) * triton.cdiv(width, _COLUMNS)
    _grouped_wgrad_gemm_kernel[(programs * (len(rows.starts) - 1),)](
        output_gradients, inputs, main_grads.table, rows.starts, height, width,
        ROWS, _COLUMNS, _DEPTH, _GROUP, main_grads.alignment, num_warps=_WARPS, num_stages=_stages(inputs.device),
    )  # fmt: skip


class GroupedWeights:
    """What one layer's products keep from one pass to the next; `rows` is shared with layers of the same rows."""

    def __init__(self, rows: RowPlaces) -> None:
        self.rows = rows
        self.weights = Addresses()
        self.main_grads = Addresses()
        self.gradients_added: Callable[[Sequence[torch.Tensor]], None] | None = None
        """Called with the weights whenever their gradients have been added to the main gradients."""
        # Stands for the weights in autograd. A node for each of 128, with data parallelism's hook, took the host 2.7 ms
        # per layer and pass, about what the kernels take the GPU (benchmarks/experts.md).
        self.stand_in = torch.empty(0, requires_grad=True)


def multiply_by_experts(
    inputs: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor], kept: GroupedWeights
) -> torch.Tensor:
    """Each row times the transposed weight of its expert, [rows, out] in BF16.

    The gradient of a weight is added to its `main_grad` (contiguous fp32 [out, in]). Autograd does not see the weights
    and calls none of their hooks; `kept.gradients_added` is called instead.

    Inputs, BF16 [rows, in], are sorted by expert; `counts` are the rows of each. Each expert has a weight, contiguous
    BF16 [out, in]. Either all of them are trained or none.
    """
    stand_in = kept.stand_in if weights[0].requires_grad else None
    product: torch.Tensor = _GroupedProducts.apply(inputs, stand_in, counts, weights, kept)  # type: ignore[no-untyped-call]
    return product


class _GroupedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        stand_in: torch.Tensor | None,
        counts: Sequence[int],
        weights: Sequence[torch.Tensor],
        kept: GroupedWeights,
    ) -> torch.Tensor:
        inputs = inputs.contiguous()
        rows = kept.rows.of(counts, inputs.device)
        ctx.save_for_backward(inputs)
        ctx.weights, ctx.kept, ctx.rows = weights, kept, rows
        out_features, in_features = weights[0].shape
        return _multiply(inputs, kept.weights.of(weights), rows, out_features, (in_features, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,), weights, kept, rows = ctx.saved_tensors, ctx.weights, ctx.kept, ctx.rows
        gradient = gradient.contiguous()
        input_gradient = None
        if ctx.needs_input_grad[0]:
            in_features = inputs.shape[1]
            input_gradient = _multiply(gradient, kept.weights.of(weights), rows, in_features, (1, in_features))
        if ctx.needs_input_grad[1]:
            main_grads = kept.main_grads.of([weight.main_grad for weight in weights])
            _accumulate_weight_gradients(gradient, inputs, main_grads, rows)
            if kept.gradients_added is not None:
                kept.gradients_added(weights)
        return input_gradient, None, None, None, None
