"""The kernel behind `split_and_rotate`: queries, keys and values split and rotated, or their gradients rejoined.

A program takes one group of a few tokens. It computes cosines and sines once for all heads, and reads and writes every
element once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Tokens per program. On an H200 each direction takes 115 µs for 16,384 tokens of Llama 3 8B; torch copies as many bytes
# in 103. More tokens, several groups per program, or reading heads ahead saved 2% at most.
_TOKENS = 8
_WARPS = 2


@triton.jit
def _move_head(joined, part, inside, cos, sin, HALF: tl.constexpr, WIDTH: tl.constexpr, JOINS: tl.constexpr):
    if JOINS:
        source, into = part, joined
    else:
        source, into = joined, part
    if HALF > 0:
        columns = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        tile = inside & (columns < HALF)
        first = tl.load(source + columns, mask=tile).to(tl.float32)
        second = tl.load(source + HALF + columns, mask=tile).to(tl.float32)
        # What compilers make of first · cos - second · sin, spelled out: only one of the two products is rounded.
        tl.store(into + columns, tl.fma(first, cos, -(second * sin)).to(into.dtype.element_ty), mask=tile)
        tl.store(into + HALF + columns, tl.fma(second, cos, first * sin).to(into.dtype.element_ty), mask=tile)
    if 2 * HALF < WIDTH:
        columns = 2 * HALF + tl.arange(0, triton.next_power_of_2(WIDTH - 2 * HALF))[None, :]
        tile = inside & (columns < WIDTH)
        tl.store(into + columns, tl.load(source + columns, mask=tile), mask=tile)


@triton.jit
def _qkv_rope_kernel(
    mixed, queries, keys, values, angles, num_tokens, batch, num_groups,
    query_position, query_sequence, query_head,
    key_position, key_sequence, key_head,
    value_position, value_sequence, value_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, JOINS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    # Multiplied by a stride it may exceed 32 bits.
    group = tl.program_id(1).to(tl.int64)
    inside = tokens < num_tokens
    position, sequence = (tokens // batch).to(tl.int64), (tokens % batch).to(tl.int64)
    columns = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    angle = tl.load(angles + position * (2 * HALF) + columns, mask=inside & (columns < HALF), other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if JOINS:
        sin = -sin
    joined = mixed + (tokens * num_groups + group) * ((HEADS + 2) * WIDTH)
    part = queries + position * query_position + sequence * query_sequence
    for head in range(HEADS):
        of_head = part + (group * HEADS + head) * query_head
        _move_head(joined + head * WIDTH, of_head, inside, cos, sin, HALF, WIDTH, JOINS)
    part = keys + position * key_position + sequence * key_sequence + group * key_head
    _move_head(joined + HEADS * WIDTH, part, inside, cos, sin, HALF, WIDTH, JOINS)
    part = values + position * value_position + sequence * value_sequence + group * value_head
    _move_head(joined + (HEADS + 1) * WIDTH, part, inside, cos, sin, 0, WIDTH, JOINS)


def launch_qkv_rope(mixed: torch.Tensor, parts: Sequence[torch.Tensor], angles: torch.Tensor, *, joins: bool) -> None:
    """Splits a projection into rotated queries, rotated keys, and values; or joins their gradients into its gradient.

    Args:
        mixed: [s, b, groups, (heads of a group + 2) · width], contiguous; read, or written if `joins`.
        parts: Queries [s, b, groups · heads of a group, width], keys and values [s, b, groups, width]; written, or read
            if `joins`. Any strides, but the elements of a head are contiguous.
        angles: The angles of each position, fp32 [≥ s, 1, 1, turned], contiguous; the second half equals the first.
            Elements of a head beyond `turned` are copied unrotated.
        joins: Goes from the parts to `mixed`, and back through the rotation.
    """
    queries, keys, values = parts
    length, batch, num_groups, _ = mixed.shape
    width, turned = queries.size(-1), angles.size(-1)
    grid = triton.cdiv(length * batch, _TOKENS), num_groups
    _qkv_rope_kernel[grid](
        mixed, queries, keys, values, angles, length * batch, batch, num_groups,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        HEADS=queries.size(2) // num_groups, WIDTH=width, HALF=turned // 2, JOINS=joins, TOKENS=_TOKENS,
        num_warps=_WARPS,
    )  # fmt: skip
