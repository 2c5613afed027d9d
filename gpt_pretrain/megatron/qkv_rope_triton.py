"""The kernel behind `qkv_rope`: queries, keys and values split and rotated, or their gradients turned back and joined.

A program takes some tokens and goes through their heads. It computes cosines and sines once for all of them, and reads
and writes every element once. A module of its own, as Triton is not installed everywhere.
"""

# Triton reads annotations and takes none but its own, and kernels are called with everything by place.
# ruff: noqa: ANN001, ANN202, PLR0917

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Tokens of a program, the most groups of heads that it goes through, and the heads that it reads before it writes one.
_TOKENS = 16
_GROUPS = 4
_AT_ONCE = 4
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _move_heads(  # type: ignore[no-untyped-def]
    joined,
    parts,
    part_stride,
    inside,
    cos,
    sin,
    NUM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    JOINS: tl.constexpr,
):
    # All are read before one is written: the compiler does not know that these are different tensors, and would wait.
    if JOINS:
        sources, source_stride, into, into_stride = parts, part_stride, joined, WIDTH
    else:
        sources, source_stride, into, into_stride = joined, WIDTH, parts, part_stride
    if HALF > 0:
        columns = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        tile = inside & (columns < HALF)
        firsts, seconds = (), ()
        for head in tl.static_range(NUM):
            firsts += (tl.load(sources + head * source_stride + columns, mask=tile),)  # type: ignore[assignment]
            seconds += (tl.load(sources + head * source_stride + HALF + columns, mask=tile),)  # type: ignore[assignment]
        for head in tl.static_range(NUM):
            first = firsts[head].to(tl.float32)  # type: ignore[var-annotated]
            second = seconds[head].to(tl.float32)
            # What compilers make of first · cos - second · sin, written out: one product is rounded, the other is not.
            turned_first, turned_second = tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)
            place = into + head * into_stride + columns
            tl.store(place, turned_first.to(into.dtype.element_ty), mask=tile)
            tl.store(place + HALF, turned_second.to(into.dtype.element_ty), mask=tile)
    if 2 * HALF < WIDTH:
        columns = 2 * HALF + tl.arange(0, triton.next_power_of_2(WIDTH - 2 * HALF))[None, :]
        tile = inside & (columns < WIDTH)
        for head in tl.static_range(NUM):
            copied = tl.load(sources + head * source_stride + columns, mask=tile)
            tl.store(into + head * into_stride + columns, copied, mask=tile)


@triton.jit  # type: ignore[untyped-decorator]
def _qkv_rope_kernel(  # type: ignore[no-untyped-def]
    mixed,
    queries,
    keys,
    values,
    angles,
    num_tokens,
    batch,
    num_groups,
    query_position,
    query_sequence,
    query_head,
    key_position,
    key_sequence,
    key_head,
    value_position,
    value_sequence,
    value_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    JOINS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    inside = tokens < num_tokens
    position, sequence = (tokens // batch).to(tl.int64), (tokens % batch).to(tl.int64)
    columns = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    angle = tl.load(angles + position * (2 * HALF) + columns, mask=inside & (columns < HALF), other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if JOINS:
        sin = -sin
    mixed += tokens.to(tl.int64) * (num_groups * (HEADS + 2) * WIDTH)
    queries += position * query_position + sequence * query_sequence
    keys += position * key_position + sequence * key_sequence
    values += position * value_position + sequence * value_sequence
    for index in range(GROUPS):
        group = tl.program_id(1) * GROUPS + index
        here = inside & (group < num_groups)
        joined = mixed + group * ((HEADS + 2) * WIDTH)
        part = queries + group * HEADS * query_head
        for head in range(0, HEADS - HEADS % AT_ONCE, AT_ONCE):
            heads, parts = joined + head * WIDTH, part + head * query_head
            _move_heads(heads, parts, query_head, here, cos, sin, AT_ONCE, HALF, WIDTH, JOINS)
        if HEADS % AT_ONCE > 0:
            heads, parts = joined + (HEADS - HEADS % AT_ONCE) * WIDTH, part + (HEADS - HEADS % AT_ONCE) * query_head
            _move_heads(heads, parts, query_head, here, cos, sin, HEADS % AT_ONCE, HALF, WIDTH, JOINS)
        _move_heads(joined + HEADS * WIDTH, keys + group * key_head, 0, here, cos, sin, 1, HALF, WIDTH, JOINS)
        _move_heads(joined + (HEADS + 1) * WIDTH, values + group * value_head, 0, here, cos, sin, 1, 0, WIDTH, JOINS)


def launch_qkv_rope(mixed: torch.Tensor, parts: Sequence[torch.Tensor], angles: torch.Tensor, *, joins: bool) -> None:
    """Writes rotated queries, rotated keys, and values; or, of gradients of these, those of what they came from.

    Args:
        mixed: [s, b, groups, (heads of a group + 2) · width], contiguous; read, or written if `joins`.
        parts: Queries [s, b, groups · heads of a group, width], keys and values [s, b, groups, width]. Any strides, but
            elements of a head lie beside each other. Written, or read if `joins`.
        angles: Of each position, fp32 [≥ s, 1, 1, turned], contiguous, the second half as the first; `turned` is the
            width, or less: then the rest of a head is left as it is.
        joins: From the parts to `mixed`, and back through the rotation.
    """
    queries, keys, values = parts
    length, batch, num_groups, _ = mixed.shape
    width, turned = queries.size(-1), angles.size(-1)
    grid = triton.cdiv(length * batch, _TOKENS), triton.cdiv(num_groups, _GROUPS)
    _qkv_rope_kernel[grid](
        mixed,
        queries,
        keys,
        values,
        angles,
        length * batch,
        batch,
        num_groups,
        *queries.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        HEADS=queries.size(2) // num_groups,
        WIDTH=width,
        HALF=turned // 2,
        JOINS=joins,
        TOKENS=_TOKENS,
        GROUPS=_GROUPS,
        AT_ONCE=min(_AT_ONCE, queries.size(2) // num_groups),
        num_warps=_WARPS,
    )
