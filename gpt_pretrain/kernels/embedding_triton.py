"""The kernel behind `AccumulatingEmbedding`: token gradients, added to the rows of a table in a fixed order.

On a GPU `index_add_` adds with atomics, so that two runs differ in the last bit, and its values must be copied to fp32
first. Here tokens are sorted by their rows, and one program sums all gradients of a row in fp32 before it touches the
table.
"""

import torch
import triton
import triton.language as tl

# Tokens that a program adds at a time, and columns of the table that it adds them to. The fastest of eight on an H200,
# with about one token in four the same.
_TOKENS = 32
_COLUMNS = 128
_WARPS = 2


@triton.jit
def _add_rows_kernel(
    table, rows, order, ends, gradients, width: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0)
    row = tl.load(rows + first)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    # The first token of a row acts for all of them. -1 is no row of this rank, and stands before the first token.
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

    `rows`, int64 [tokens], is -1 for a token without a row. Table and gradients are contiguous.
    """
    num_tokens, width = gradients.shape
    by_row, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(by_row, by_row, right=True)
    grid = (num_tokens, triton.cdiv(width, _COLUMNS))
    _add_rows_kernel[grid](table, by_row, order, ends, gradients, width, _TOKENS, _COLUMNS, num_warps=_WARPS)
