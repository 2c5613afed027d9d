"""Kernels on FP8 codes: counting them (`fp8_codes.count_codes`), writing them transposed, searching what they hide.

A block with an infinity has scale 1 (`fp8/infinities.py`). The search reads all scales, a number for each 128 values,
and the values of those blocks alone: a fraction of a cast's cost.
"""

import torch
import triton
import triton.language as tl

# Triton's interpreter does not run assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)

# The tile that a program writes, its rows in pairs. Of thirteen sizes on an H200 none was faster by more than 1%.
TILE_PAIRS = 32
TILE_COLUMNS = 64
TILE_WARPS = 4

_BLOCK = tl.constexpr(4096)
_BLOCKS_PER_PROGRAM = tl.constexpr(16)
# Values of a block that has one scale, and rows of blocks that a program searches.
_SCALED = tl.constexpr(128)
_ROWS = tl.constexpr(64)


def tile_grid(rows: int, width: int) -> tuple[int, int]:
    """Tiles across and down."""
    return triton.cdiv(width, TILE_COLUMNS), triton.cdiv(rows, 2 * TILE_PAIRS)


@triton.jit
def _word(even, odd, dtype: tl.constexpr):
    """The codes of two rows, one above the other, as one number: GPUs transpose numbers of two bytes, not of one.

    They are not assembled from single codes: to shift the second one out of a conversion, ptxas 12.8 reads the wrong
    register.
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
    """Stores the codes of scaled values as a matrix of columns; rows come in pairs, one even and one odd.

    Args:
        even: fp32 [pairs, columns], of even rows.
        odd: Of the rows after them.
        into: Codes [all columns, 2 · num_pairs].
        pairs: Which pairs of rows these are.
        columns: Which columns.
        inside: Whether each column is one of the tensor.
        num_pairs: Of the tensor's rows.
    """
    words = _word(even, odd, into.dtype.element_ty)
    places = into.to(tl.pointer_type(words.dtype)) + columns.to(tl.int64)[:, None] * num_pairs
    tl.store(places + pairs[None, :], tl.trans(words), mask=inside[:, None] & (pairs < num_pairs)[None, :])


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
    """Sets a flag where there is an infinity in values that were cast in blocks of 1×128.

    Args:
        values: [..., columns].
        scale_inv: fp32 [blocks of a row, at least the rows], contiguous: the inverse scales of the blocks.
        found: fp32 [1].
    """
    values = values.contiguous()
    num_columns = values.shape[-1]
    num_rows = values.numel() // num_columns
    grid = (triton.cdiv(num_rows, _ROWS.value), scale_inv.shape[0])
    _search[grid](values, scale_inv, found, num_rows, num_columns, scale_inv.stride(0))
