"""The kernels behind `AccumulatingEmbedding`, `split_and_rotate` and `cross_entropy`. Imported on a GPU only.

Each program of the loss takes one row of logits, its columns in blocks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Tokens that a program adds at a time, and columns of the table: the fastest of eight choices on an H200, where about
# one token in four repeated another.
_TABLE_TOKENS = 32
_TABLE_COLUMNS = 128
_TABLE_WARPS = 2
# On an H200 each direction takes 115 µs for 16,384 tokens of Llama 3 8B; torch copies as many bytes in 103. More tokens
# or several groups per program, or reading heads ahead, saved 2% at most.
_ROPE_TOKENS = 8
_ROPE_WARPS = 2
# Memory bounds both kernels of the loss. The fastest block of six on an H200: 3.3 TB/s with 50k columns, 3.9 with 128k.
# One kernel for both is no faster.
_LOGITS_BLOCK = 8192
_STATISTICS_WARPS = 8
_GRADIENT_WARPS = 16


@triton.jit
def _add_rows_kernel(
    table, rows, order, ends, gradients, width: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0)
    row = tl.load(rows + first)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    # The first token of a row acts for all of them. Tokens without a row (-1) come first and are skipped.
    if row != before:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        end = tl.load(ends + first)
        total = tl.zeros([COLUMNS], tl.float32)
        start = first
        while start < end:
            places = start + tl.arange(0, TOKENS)
            tokens = tl.load(order + places, mask=places < end, other=0)
            tile = (places < end)[:, None] & inside[None, :]
            values = tl.load(gradients + tokens[:, None] * width + columns[None, :], mask=tile, other=0.0)
            total += tl.sum(values.to(tl.float32), axis=0)
            start += TOKENS
        target = table + row * width + columns
        tl.store(target, tl.load(target, mask=inside) + total, mask=inside)


def add_rows(table: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor) -> None:
    """Adds the gradient of each token, [tokens, h] of any floating type, to its row of a table, fp32 [rows, h].

    `rows`, int64 [tokens], is -1 for a token without a row. Table and gradients are contiguous. Tokens are sorted by
    row, and one program sums all gradients of a row in a fixed order. `index_add_` would add with atomics, so that two
    runs differ in the last bit, and need gradients in fp32.
    """
    num_tokens, width = gradients.shape
    by_row, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(by_row, by_row, right=True)
    grid = (num_tokens, triton.cdiv(width, _TABLE_COLUMNS))
    _add_rows_kernel[grid](
        table, by_row, order, ends, gradients, width, _TABLE_TOKENS, _TABLE_COLUMNS, num_warps=_TABLE_WARPS
    )


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
    """Splits a projection into rotated queries, rotated keys, and values; or `joins` their gradients into its gradient.

    A program handles one group of a few tokens. It computes cosines and sines once for all heads.

    Args:
        mixed: [s, b, groups, (heads of a group + 2) · width], contiguous; read, or written if `joins`.
        parts: Queries [s, b, groups · heads of a group, width], keys and values [s, b, groups, width]; written, or read
            if `joins`. Any strides, but the elements of a head are contiguous.
        angles: The angles of each position, fp32 [≥ s, 1, 1, turned], contiguous; the second half equals the first.
            Elements of a head beyond `turned` are copied unrotated.
        joins: Rotates back.
    """
    queries, keys, values = parts
    length, batch, num_groups, _ = mixed.shape
    width, turned = queries.size(-1), angles.size(-1)
    grid = triton.cdiv(length * batch, _ROPE_TOKENS), num_groups
    _qkv_rope_kernel[grid](
        mixed, queries, keys, values, angles, length * batch, batch, num_groups,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        HEADS=queries.size(2) // num_groups, WIDTH=width, HALF=turned // 2, JOINS=joins, TOKENS=_ROPE_TOKENS,
        num_warps=_ROPE_WARPS,
    )  # fmt: skip


@triton.jit
def _tanh(values):
    # Its error is 1e-7 everywhere: relative to a capped logit's own fp32 rounding that is enough.
    return 1 - 2 / (tl.exp(2 * values) + 1)


@triton.jit
def _statistics_kernel(
    logits, labels, statistics, num_rows, num_columns: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * num_columns
    label = tl.load(labels + row)
    largest = -float("inf")
    exponentials = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        values = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if CAP > 0:
            values = tl.where(inside, CAP * _tanh(values / CAP), -float("inf"))
        larger = tl.maximum(largest, tl.max(values))
        exponentials = exponentials * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger))
        largest = larger
    here = (label >= 0) & (label < num_columns)
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, exponentials)
    labelled = tl.load(logits + label, mask=here, other=-float("inf")).to(tl.float32)
    if CAP > 0:
        labelled = tl.where(here, CAP * _tanh(labelled / CAP), -float("inf"))
    tl.store(statistics + 2 * num_rows + row, labelled)


@triton.jit
def _gradient_kernel(
    logits, labels, log_sum, loss_gradient, num_columns: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * num_columns
    label = tl.load(labels + row)
    shift = tl.load(log_sum + row)
    factor = tl.load(loss_gradient + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        values = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        slope = factor
        if CAP > 0:
            share = _tanh(values / CAP)
            values, slope = CAP * share, factor * (1 - share * share)
        gradient = (tl.exp(values - shift) - (columns == label).to(tl.float32)) * slope
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def launch_statistics(logits: torch.Tensor, labels: torch.Tensor, cap: float | None = None) -> torch.Tensor:
    """See `cross_entropy.row_statistics`."""
    num_rows, num_columns = logits.shape
    statistics = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    _statistics_kernel[(num_rows,)](
        logits, labels, statistics, num_rows, num_columns,
        CAP=cap or 0.0, BLOCK=_LOGITS_BLOCK, num_warps=_STATISTICS_WARPS,
    )  # fmt: skip
    return statistics


def launch_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum: torch.Tensor,
    loss_gradient: torch.Tensor,
    cap: float | None = None,
) -> None:
    """See `cross_entropy.turn_into_gradient`."""
    num_rows, num_columns = logits.shape
    _gradient_kernel[(num_rows,)](
        logits, labels, log_sum, loss_gradient, num_columns,
        CAP=cap or 0.0, BLOCK=_LOGITS_BLOCK, num_warps=_GRADIENT_WARPS,
    )  # fmt: skip
