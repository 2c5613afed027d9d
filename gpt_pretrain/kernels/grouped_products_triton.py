"""Products of many small experts in one kernel each: forward, the gradient of inputs, and that of weights.

cuBLAS computes one expert after the other, and with many small ones the host needs longer to launch a product than the
GPU to compute it. Here a program computes one tile of one expert. Weights and their main gradients stay the separate
tensors that they are: kernels find them in tables of addresses (`Addresses`).

The rows of all experts are one tensor, sorted by expert. Sums have a fixed order, so that results repeat to the bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How a kernel cuts its product: the tile of the result that a program computes, and how it does so."""

    rows: int
    columns: int
    depth: int
    """Terms of each sum that are loaded at a time."""
    group: int = 8
    """Tiles of rows that are computed for all columns before the next ones, so that what both read stays in L2."""
    num_warps: int = 8
    num_stages: int = 3
    adds_in_l2: bool = True
    """Weight gradients: send the sums to be added where the main gradient is, rather than wait for it. Needs fewer
    registers; each value gets one sum, so that the order is fixed either way."""


# Rows of one expert that a program computes, forward and in the gradient of inputs.
ROWS = 128
FORWARD = Tiles(rows=ROWS, columns=128, depth=64)
INPUT_GRADIENT = Tiles(rows=ROWS, columns=128, depth=64)
WEIGHT_GRADIENT = Tiles(rows=128, columns=128, depth=64)

# Triton's interpreter takes the bits of BF16 for integers when it multiplies.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Where tensors are, for kernels to read."""

    addresses: torch.Tensor
    """int64 [tensors], on their device."""
    alignment: int
    """Bytes that divide all of them, at most 16: what one access reads."""


class Addresses:
    """A table of the addresses of tensors, written anew only where one of them has moved."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._table: Table | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Table:
        """The table of these tensors, which must be contiguous and outlive the kernels that read it."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._table is None or addresses != self._addresses:
            self._addresses = addresses
            on_device = torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
            self._table = Table(addresses=on_device, alignment=math.gcd(16, *addresses))
        return self._table


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Which rows belong to which expert, on the device."""

    starts: torch.Tensor
    """int32 [experts + 1]: the first row of each expert, and the number of all rows."""
    tiles: torch.Tensor
    """int32 [tiles, 3]: of each tile of rows the expert, the first row, and the end of the expert's rows."""


def place_rows(counts: Sequence[int], device: torch.device, *, rows: int = ROWS) -> ExpertRows:
    """Cuts the rows of experts into tiles, without waiting for the device.

    Args:
        counts: Rows of each expert.
        device: Where the kernels run.
        rows: Of a tile.
    """
    of_expert = torch.tensor(counts)
    starts = torch.nn.functional.pad(of_expert.cumsum(0), (1, 0))
    num_tiles = (of_expert + rows - 1) // rows
    experts = torch.repeat_interleave(num_tiles)
    before = (num_tiles.cumsum(0) - num_tiles)[experts]
    first = starts[experts] + (torch.arange(len(experts)) - before) * rows
    # One copy for both.
    flat = torch.cat([starts, torch.stack([experts, first, starts[experts + 1]], dim=1).flatten()]).to(torch.int32)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return ExpertRows(starts=flat[: len(starts)], tiles=flat[len(starts) :].view(-1, 3))


@triton.jit
def _place(program, num_rows, num_columns: tl.constexpr, GROUP: tl.constexpr):
    """The tile of rows and the tile of columns that a program computes, by the program's number."""
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
    """A loaded number that Triton's interpreter, too, can count up to: there it is an array of one number."""
    return count.handle.data.item() if _INTERPRETED else count


@triton.jit
def _tensor_of(table, expert, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """An expert's tensor. Triton knows the alignment of its arguments alone."""
    return tl.multiple_of(tl.load(table + expert).to(tl.pointer_type(dtype)), ALIGNMENT)


# A number of tiles that is a multiple of 16 is no reason to compile anew in the middle of a run.
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm_kernel(
    inputs,
    weights,
    outputs,
    tiles,
    num_tiles,
    width: tl.constexpr,
    depth: tl.constexpr,
    column_step: tl.constexpr,
    depth_step: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
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
    # Rows behind the expert's are computed from its last one, and not stored.
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
    output_gradients,
    inputs,
    main_grads,
    starts,
    height: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ADDS_IN_L2: tl.constexpr,
):
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
        if ADDS_IN_L2:
            tl.atomic_add(targets, total, mask=inside, sem="relaxed")
        else:
            tl.store(targets, tl.load(targets, mask=inside) + total, mask=inside)


def _multiply(
    values: torch.Tensor, weights: Table, rows: ExpertRows, width: int, steps: tuple[int, int], tiles: Tiles
) -> torch.Tensor:
    depth = values.shape[1]
    result = values.new_empty(values.shape[0], width)
    num_tiles = len(rows.tiles)
    grid = (num_tiles * triton.cdiv(width, tiles.columns),)
    if num_tiles:
        _grouped_gemm_kernel[grid](
            values,
            weights.addresses,
            result,
            rows.tiles,
            num_tiles,
            width,
            depth,
            *steps,
            tiles.rows,
            tiles.columns,
            tiles.depth,
            tiles.group,
            weights.alignment,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return result


def multiply(
    inputs: torch.Tensor, weights: Table, rows: ExpertRows, out_features: int, tiles: Tiles = FORWARD
) -> torch.Tensor:
    """Each row times the transposed weight of its expert: [rows, out] in BF16.

    Args:
        inputs: [rows, in] in BF16, contiguous, sorted by expert.
        weights: `Addresses` of [out, in] in BF16, one of each expert.
        rows: Which row belongs to which expert, in tiles of `tiles.rows`.
        out_features: Rows of each weight.
        tiles: How to cut it.
    """
    return _multiply(inputs, weights, rows, out_features, (inputs.shape[1], 1), tiles)


def multiply_gradients(
    output_gradients: torch.Tensor,
    weights: Table,
    rows: ExpertRows,
    in_features: int,
    tiles: Tiles = INPUT_GRADIENT,
) -> torch.Tensor:
    """The gradient of `multiply`'s inputs, [rows, in], from that of its result, [rows, out]; otherwise as there."""
    return _multiply(output_gradients, weights, rows, in_features, (1, in_features), tiles)


def accumulate_weight_gradients(
    output_gradients: torch.Tensor,
    inputs: torch.Tensor,
    main_grads: Table,
    rows: ExpertRows,
    tiles: Tiles = WEIGHT_GRADIENT,
) -> None:
    """Adds the gradient of each weight of `multiply` to the weight's main gradient; experts without rows add none.

    Args:
        output_gradients: [rows, out] in BF16, contiguous.
        inputs: [rows, in] in BF16, contiguous.
        main_grads: `Addresses` of [out, in] in fp32, one of each expert.
        rows: Which row belongs to which expert.
        tiles: How to cut it.
    """
    height, width = output_gradients.shape[1], inputs.shape[1]
    if not len(rows.tiles):
        return
    programs = triton.cdiv(height, tiles.rows) * triton.cdiv(width, tiles.columns)
    _grouped_wgrad_gemm_kernel[(programs * (len(rows.starts) - 1),)](
        output_gradients,
        inputs,
        main_grads.addresses,
        rows.starts,
        height,
        width,
        tiles.rows,
        tiles.columns,
        tiles.depth,
        tiles.group,
        main_grads.alignment,
        tiles.adds_in_l2,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
