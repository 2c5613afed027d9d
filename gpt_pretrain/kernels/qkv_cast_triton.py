"""The kernel that joins gradients of queries, keys and values as FP8 (`qkv_rope`). Imported on a GPU only."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gpt_pretrain.kernels.fp8_codes_triton import CastInto, cast_passes, raise_amax, read_factor, store_codes
from gpt_pretrain.kernels.qkv_rope_triton import rotate

# Pairs of rows that a program casts, of all heads of a group.
_CAST_PAIRS = 32
_CAST_WARPS = 8


@triton.jit
def _load_back(head, offsets, inside, cos, sin, TURNS: tl.constexpr, HALF: tl.constexpr):
    """The halves of a head, rotated back and rounded to the type of the layers."""
    places = head + offsets + tl.arange(0, HALF)[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if TURNS:
        first, second = rotate(first, second, cos, -sin)
        first = first.to(head.dtype.element_ty).to(tl.float32)
        second = second.to(head.dtype.element_ty).to(tl.float32)
    return first, second


@triton.jit
def _cast_head(
    head, even, odd, cos_even, sin_even, cos_odd, sin_odd, into, into_transposed, factor, largest, pairs, column,
    inside, num_rows, width: tl.constexpr, TURNS: tl.constexpr, HALF: tl.constexpr, WRITES: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):  # fmt: skip
    """Writes one head of even rows and of those after them; returns the largest magnitudes so far, by place."""
    even_first, even_second = _load_back(head, even, inside, cos_even, sin_even, TURNS, HALF)
    odd_first, odd_second = _load_back(head, odd, inside, cos_odd, sin_odd, TURNS, HALF)
    if WRITES:
        columns = column + tl.arange(0, HALF)
        across = columns < width
        store_codes(
            even_first, odd_first, into, into_transposed, factor, pairs, columns, across, num_rows, width, TRANSPOSES
        )
        columns += HALF
        store_codes(
            even_second, odd_second, into, into_transposed, factor, pairs, columns, across, num_rows, width, TRANSPOSES
        )
    of_even = tl.maximum(tl.abs(even_first), tl.abs(even_second))
    of_odd = tl.maximum(tl.abs(odd_first), tl.abs(odd_second))
    return tl.maximum(largest, tl.maximum(of_even, of_odd))


@triton.jit
def _offsets(rows, batch, position_stride, sequence_stride):
    return ((rows // batch).to(tl.int64) * position_stride + (rows % batch).to(tl.int64) * sequence_stride)[:, None]


@triton.jit
def _turns(angles, rows, batch, inside, HALF: tl.constexpr):
    places = angles + (rows // batch)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    angle = tl.load(places, mask=inside, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _rope_cast_kernel(
    into, into_transposed, scale, inverse_scale, amax, queries, keys, values, angles, num_rows, batch,
    query_position, query_sequence, query_head,
    key_position, key_sequence, key_head,
    value_position, value_sequence, value_head,
    width: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    MEASURES: tl.constexpr, WRITES: tl.constexpr, TRANSPOSES: tl.constexpr, LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    # Multiplied by a stride it may exceed 32 bits.
    group = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    even, odd = 2 * pairs, 2 * pairs + 1
    factor = 1.0
    if WRITES:
        factor = read_factor(scale, inverse_scale, amax, LARGEST, EPSILON)
    # Rows come in pairs, so that both are inside or neither is.
    inside = (even < num_rows)[:, None]
    cos_even, sin_even = _turns(angles, even, batch, inside, HALF)
    cos_odd, sin_odd = _turns(angles, odd, batch, inside, HALF)
    largest = tl.zeros([PAIRS, HALF], tl.float32)
    column = tl.program_id(0) * ((HEADS + 2) * 2 * HALF)
    of_even = _offsets(even, batch, query_position, query_sequence)
    of_odd = _offsets(odd, batch, query_position, query_sequence)
    for head in range(HEADS):
        largest = _cast_head(
            queries + (group * HEADS + head) * query_head, of_even, of_odd, cos_even, sin_even, cos_odd, sin_odd,
            into, into_transposed, factor, largest, pairs, column + head * (2 * HALF), inside, num_rows, width, True,
            HALF, WRITES, TRANSPOSES,
        )  # fmt: skip
    of_even = _offsets(even, batch, key_position, key_sequence)
    of_odd = _offsets(odd, batch, key_position, key_sequence)
    largest = _cast_head(
        keys + group * key_head, of_even, of_odd, cos_even, sin_even, cos_odd, sin_odd, into, into_transposed, factor,
        largest, pairs, column + HEADS * (2 * HALF), inside, num_rows, width, True, HALF, WRITES, TRANSPOSES,
    )  # fmt: skip
    of_even = _offsets(even, batch, value_position, value_sequence)
    of_odd = _offsets(odd, batch, value_position, value_sequence)
    largest = _cast_head(
        values + group * value_head, of_even, of_odd, cos_even, sin_even, cos_odd, sin_odd, into, into_transposed,
        factor, largest, pairs, column + (HEADS + 1) * (2 * HALF), inside, num_rows, width, False, HALF, WRITES,
        TRANSPOSES,
    )  # fmt: skip
    if MEASURES:
        raise_amax(largest, amax)


def launch_rope_cast(
    parts: Sequence[torch.Tensor], angles: torch.Tensor, into: CastInto, *, batch: int, num_groups: int
) -> None:
    """Joins gradients as `launch_qkv_rope` does, and writes them as FP8.

    The result is [s · b, groups · (heads of a group + 2) · width]. Values are rounded to the type of `parts` before
    they are cast, as if they had been stored in between.

    Args:
        parts: The gradients of queries, keys and values, as of `launch_qkv_rope`.
        angles: The angles of each position, for whole heads of a power of two.
        into: Where to write; its rows are even in number.
        batch: Sequences.
        num_groups: Of heads.
    """
    queries, keys, values = parts
    rows, width = into.codes.shape
    half = queries.size(-1) // 2
    assert angles.size(-1) == 2 * half, "heads are rotated whole"
    assert rows % 2 == 0, f"rows are transposed in pairs, and there are {rows}"
    grid = num_groups, triton.cdiv(rows, 2 * _CAST_PAIRS)
    for constants in cast_passes(into):
        _rope_cast_kernel[grid](
            into.codes, into.transposed, into.scale, into.inverse_scale, into.amax, queries, keys, values, angles,
            rows, batch, *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            width=width, HEADS=queries.size(2) // num_groups, HALF=half, PAIRS=_CAST_PAIRS, **constants,
            num_warps=_CAST_WARPS,
        )  # fmt: skip
