"""Kernels on FP8 codes: writing them, also transposed; counting them; searching for the infinities that they hide.

A cast reads a matrix twice: for its amaxes (`measure`), and to write its codes and their transpose (`cast`). Hopper's
FP8 products sum along contiguous memory, so a matrix that one product sums over its rows and another over its columns
is needed both ways. torch.compile would read the values for each direction, and transpose codes in another kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# Triton's interpreter does not run assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)

# The tile that a program writes, its rows in pairs. Of thirteen sizes on an H200 none was faster by more than 1%.
TILE_PAIRS = tl.constexpr(32)
TILE_COLUMNS = tl.constexpr(64)
TILE_WARPS = 4

_BLOCK = tl.constexpr(4096)
_BLOCKS_PER_PROGRAM = tl.constexpr(16)
# Values that share a scale, and rows of such blocks that a program searches.
_SCALED = tl.constexpr(128)
_ROWS = tl.constexpr(64)


def tile_grid(rows: int, width: int) -> tuple[int, int]:
    """Tiles across and down."""
    return triton.cdiv(width, TILE_COLUMNS.value), triton.cdiv(rows, 2 * TILE_PAIRS.value)


@triton.jit
def _word(even, odd, dtype: tl.constexpr):
    """The codes of two rows, one above the other, as one number: GPUs transpose numbers of two bytes, not of one.

    Not assembled from single codes: ptxas 12.8 reads the wrong register when it shifts the second one.
    """
    if ASSEMBLY:
        # Two values at a time.
        tl.static_assert((dtype == tl.float8e4nv) | (dtype == tl.float8e5))
        convert: tl.constexpr = (
            "cvt.rn.satfinite.e4m3x2.f32" if dtype == tl.float8e4nv else "cvt.rn.satfinite.e5m2x2.f32"
        )
        first: tl.constexpr = "{ .reg .b16 a, b; " + convert + " a, $3, $1; "
        word = tl.inline_asm_elementwise(
            first + convert + " b, $4, $2; mov.b32 $0, {a, b}; }", "=r,r,r,r,r", [even, odd], tl.uint16, True, 2
        )
    else:
        tl.static_assert(dtype == tl.float16)
        low = even.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        word = low | (odd.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return word


@triton.jit
def store_transposed(even, odd, into, pairs, columns, inside, num_pairs) -> None:
    """Stores the codes of scaled values transposed: `into` is [all columns, 2 · num_pairs].

    `even` and `odd`, fp32 [pairs, columns], are even rows and the rows after them; `pairs` and `columns` are their
    numbers in the tensor, which has the columns `inside`.
    """
    words = _word(even, odd, into.dtype.element_ty)
    places = into.to(tl.pointer_type(words.dtype)) + columns.to(tl.int64)[:, None] * num_pairs
    tl.store(places + pairs[None, :], tl.trans(words), mask=inside[:, None] & (pairs < num_pairs)[None, :])


@triton.jit
def read_factor(scale, inverse_scale, amax, LARGEST: tl.constexpr, EPSILON: tl.constexpr) -> tl.tensor:
    """The factor of the values; one program stores its inverse. `LARGEST`: of the codes, to find it from the amax."""
    if LARGEST == 0:
        factor = tl.load(scale)
    else:
        # Transformer Engine's compute_scale_from_amax.
        measured = tl.maximum(tl.load(amax), EPSILON)
        factor = tl.where((measured > 0) & (measured < float("inf")), tl.div_rn(LARGEST * 1.0, measured), 1.0)
        factor = tl.minimum(factor, 3.4028234663852886e38)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_scale, tl.div_rn(1.0, factor))
    return factor


@triton.jit
def raise_amax(magnitudes, amax) -> None:
    """Raises the amax, fp32 [1], to the largest of a tile."""
    # Transformer Engine's amax ignores NaN, and so does a maximum unless everything is NaN.
    largest = tl.max(magnitudes)
    tl.atomic_max(amax, tl.where(largest == largest, largest, 0.0), sem="relaxed")  # noqa: PLR0124


@triton.jit
def store_codes(
    even, odd, into, into_transposed, factor, pairs, columns, inside, num_rows,
    stride: tl.constexpr, TRANSPOSES: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the codes of values times `factor`: in rows of `stride`, and transposed as `store_transposed` does."""
    even, odd = even * factor, odd * factor
    rows = 2 * pairs
    places = into + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, even.to(into.dtype.element_ty), mask=(rows < num_rows)[:, None] & inside[None, :])
    tl.store(places + stride, odd.to(into.dtype.element_ty), mask=(rows + 1 < num_rows)[:, None] & inside[None, :])
    if TRANSPOSES:
        store_transposed(even, odd, into_transposed, pairs, columns, inside, num_rows // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CastInto:
    """Where a kernel writes an FP8 tensor, and with which scale."""

    codes: torch.Tensor
    """[rows, columns], float8_e4m3fn or float8_e5m2."""
    transposed: torch.Tensor | None
    """[columns, rows], the same codes; None where no weight gradient reads them."""
    scale: torch.Tensor
    """[1], fp32: the factor of the values, unless `scale_from_amax`."""
    inverse_scale: torch.Tensor
    """[1], fp32: receives the inverse of the scale."""
    amax: torch.Tensor
    """[1], fp32: raised to the largest magnitude."""
    scale_from_amax: bool
    """The scale maps the largest magnitude to the largest code."""
    amax_epsilon: float
    """A smaller amax counts as this one."""


def cast_passes(into: CastInto) -> Iterator[dict[str, Any]]:
    """What a kernel that casts does in each of its passes, as its constants.

    A scale from the amax takes a second pass, which computes the values again: storing them would move more bytes.
    """
    by_amax = into.scale_from_amax
    for measures, writes in ((True, False), (False, True)) if by_amax else ((True, True),):
        yield {
            "MEASURES": measures,
            "WRITES": writes,
            "TRANSPOSES": into.transposed is not None,
            "LARGEST": torch.finfo(into.codes.dtype).max if by_amax else 0.0,
            "EPSILON": into.amax_epsilon,
        }


@triton.jit
def _fp8_amax_kernel(
    values, whole, of_rows, of_columns, num_rows, width, OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr
):
    rows = tl.program_id(1) * 2 * TILE_PAIRS + tl.arange(0, 2 * TILE_PAIRS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = values + rows.to(tl.int64)[:, None] * width + columns[None, :]
    # The bits of magnitudes have their order, with NaN on top.
    magnitudes = tl.load(places, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if OF_ROWS:
        tl.atomic_max(of_rows + rows, tl.max(magnitudes, axis=1), mask=rows < num_rows, sem="relaxed")
    if OF_COLUMNS:
        tl.atomic_max(of_columns + columns, tl.max(magnitudes, axis=0), mask=columns < width, sem="relaxed")
    tl.atomic_max(whole, tl.max(magnitudes), sem="relaxed")


@triton.jit
def _fp8_codes_kernel(
    values, codes, transposed, scales, transposed_scales, num_rows, width,
    PER_ROW: tl.constexpr, TRANSPOSES: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(1) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    rows, across = 2 * pairs, columns < width
    # Rows come in pairs, so that both are inside or neither is.
    inside = (rows < num_rows)[:, None] & across[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    even = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(values + offsets + width, mask=inside, other=0.0).to(tl.float32)
    if PER_ROW:
        of_even = tl.load(scales + rows, mask=rows < num_rows, other=1.0)[:, None]
        of_odd = tl.load(scales + rows + 1, mask=rows < num_rows, other=1.0)[:, None]
    else:
        of_even = tl.load(scales)
        of_odd = of_even
    tl.store(codes + offsets, (even * of_even).to(codes.dtype.element_ty), mask=inside)
    tl.store(codes + offsets + width, (odd * of_odd).to(codes.dtype.element_ty), mask=inside)
    if TRANSPOSES:
        if PER_COLUMN:
            scale = tl.load(transposed_scales + columns, mask=across, other=1.0)[None, :]
        else:
            scale = tl.load(transposed_scales)
        store_transposed(even * scale, odd * scale, transposed, pairs, columns, across, num_rows // 2)


def measure(
    values: torch.Tensor, *, of_rows: bool, of_columns: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The largest magnitudes, fp32, of a contiguous matrix [1], of its rows [rows, 1] and of its columns [1, columns].

    NaN is larger than any number.
    """
    rows, width = values.shape
    whole = values.new_zeros(1, dtype=torch.float32)
    each_row = values.new_zeros(rows, 1, dtype=torch.float32) if of_rows else None
    each_column = values.new_zeros(1, width, dtype=torch.float32) if of_columns else None
    _fp8_amax_kernel[tile_grid(rows, width)](
        values,
        *(None if amaxes is None else amaxes.view(torch.int32) for amaxes in (whole, each_row, each_column)),
        rows, width, OF_ROWS=of_rows, OF_COLUMNS=of_columns, num_warps=TILE_WARPS,
    )  # fmt: skip
    return whole, each_row, each_column


def cast(
    values: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor, transposed_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The codes of a contiguous matrix [rows, columns]; with `transposed_scales` also codes in contiguous columns.

    A code is value times scale in fp32, saturated and rounded to nearest; NaN stays NaN. `scales` are fp32 [1] or
    [rows, 1], `transposed_scales` fp32 [1] or [1, columns]. The number of rows is even.
    """
    rows, width = values.shape
    assert rows % 2 == 0, f"rows are transposed in pairs, and there are {rows}"
    codes = torch.empty_like(values, dtype=dtype)
    transposed = None if transposed_scales is None else values.new_empty(width, rows, dtype=dtype)
    _fp8_codes_kernel[tile_grid(rows, width)](
        values, codes, transposed, scales, transposed_scales, rows, width,
        PER_ROW=scales.numel() > 1, TRANSPOSES=transposed is not None,
        PER_COLUMN=transposed_scales is not None and transposed_scales.numel() > 1, num_warps=TILE_WARPS,
    )  # fmt: skip
    return (codes,) if transposed is None else (codes, transposed.t())


@triton.jit
def _count(codes, counts, size, largest):
    first = tl.program_id(0).to(tl.int64) * _BLOCK * _BLOCKS_PER_PROGRAM
    zero = tl.zeros([_BLOCK], dtype=tl.int32)
    full = tl.zeros([_BLOCK], dtype=tl.int32)
    highest = tl.zeros([_BLOCK], dtype=tl.int32)
    for index in range(_BLOCKS_PER_PROGRAM):
        offsets = first + index * _BLOCK + tl.arange(0, _BLOCK)
        inside = offsets < size
        magnitudes = tl.load(codes + offsets, mask=inside, other=0).to(tl.int32) & 0x7F
        zero += (inside & (magnitudes == 0)).to(tl.int32)
        full += (magnitudes == largest).to(tl.int32)
        highest = tl.maximum(highest, magnitudes)
    tl.atomic_add(counts, tl.sum(zero, axis=0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(full, axis=0).to(tl.int64))
    tl.atomic_max(counts + 2, tl.max(highest, axis=0).to(tl.int64))


def count_bytes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """`count_codes` for codes as bytes: uint8, any shape, contiguous."""
    counts = torch.zeros(3, dtype=torch.int64, device=codes.device)
    programs = triton.cdiv(codes.numel(), _BLOCK.value * _BLOCKS_PER_PROGRAM.value)
    if programs:
        _count[(programs,)](codes, counts, codes.numel(), largest)
    return counts


@triton.jit
def _search(values, scale_inv, found, num_rows, num_columns, stride):
    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    inverses = tl.load(scale_inv + tl.program_id(1) * stride + rows, mask=rows < num_rows, other=0.0)
    suspicious = inverses == 1.0
    if tl.max(suspicious.to(tl.int32), axis=0) > 0:
        columns = tl.program_id(1) * _SCALED + tl.arange(0, _SCALED)
        inside = suspicious[:, None] & (columns < num_columns)[None, :]
        places = values + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        magnitudes = tl.abs(tl.load(places, mask=inside, other=0.0).to(tl.float32))
        if tl.max(tl.max((magnitudes == float("inf")).to(tl.int32), axis=1), axis=0) > 0:
            tl.store(found, 1.0)


def search_blocks(values: torch.Tensor, scale_inv: torch.Tensor, found: torch.Tensor) -> None:
    """Sets the flag `found`, fp32 [1], if values [..., columns] that were cast in blocks of 1×128 contain infinity.

    Blocks with infinity have scale 1, so only the values of such blocks are read. `scale_inv` has the inverse scales,
    fp32 [blocks of a row, at least the rows], contiguous.
    """
    values = values.contiguous()
    num_columns = values.shape[-1]
    num_rows = values.numel() // num_columns
    grid = (triton.cdiv(num_rows, _ROWS.value), scale_inv.shape[0])
    _search[grid](values, scale_inv, found, num_rows, num_columns, scale_inv.stride(0))
