"""The kernel behind `embedding_gradient`: gradients of tokens, added to the rows of a table in an order that is fixed.

`index_add_` adds with atomics on a GPU, so that two runs differ in the last bit; and its values would have to be copied
to fp32. Here tokens are sorted by their rows, and one program adds all those of one row, in fp32, before it touches the
table. A module of its own, as Triton is not installed everywhere.
"""

# Triton reads annotations and takes none but its own, and kernels are called with everything by place.
# ruff: noqa: ANN001, ANN202, PLR0917

import torch
import triton
import triton.language as tl

# Tokens that a program adds at a time, and columns of the table that it adds them to: the fastest of eight on an H200,
# where about one token in four is the same.
_TOKENS = 32
_COLUMNS = 128
_WARPS = 2


@triton.jit  # type: ignore[untyped-decorator]
def _add_rows_kernel(  # type: ignore[no-untyped-def]
    table, rows, order, ends, gradients, width: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0)
    row = tl.load(rows + first)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    # The first of a row's tokens stands for all of them; -1 before it is no row's, and a row of another rank.
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
    """Adds each token's gradient to its row of a table.

    Args:
        table: [rows, h] in fp32, contiguous.
        rows: Each token's row, int64 [tokens]; -1 where it has none.
        gradients: [tokens, h] of any floating type, contiguous.
    """
    num_tokens, width = gradients.shape
    by_row, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(by_row, by_row, right=True)
    grid = (num_tokens, triton.cdiv(width, _COLUMNS))
    _add_rows_kernel[grid](table, by_row, order, ends, gradients, width, _TOKENS, _COLUMNS, num_warps=_WARPS)
