"""The kernels behind `AccumulatingEmbedding` and `cross_entropy`. Imported on a GPU only.

Each program of the loss takes one row of logits, its columns in blocks.
"""

import torch
import triton
import triton.language as tl

# Tokens that a program adds at a time, and columns of the table: the fastest of eight choices on an H200, where about
# one token in four repeated another.
_TABLE_TOKENS = 32
_TABLE_COLUMNS = 128
_TABLE_WARPS = 2
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
        total += tl.load(target, mask=inside).to(tl.float32)
        tl.store(target, total.to(table.dtype.element_ty), mask=inside)


def add_rows(table: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor) -> None:
    """Adds the gradient of each token, [tokens, h], to its row of a table, [rows, h]; both of any floating type.

    `rows`, int64 [tokens], is -1 for a token without a row. Table and gradients are contiguous. Tokens are sorted by
    row, and one program sums all gradients of a row in fp32, in a fixed order, and rounds once. `index_add_` would add
    with atomics, so that two runs differ in the last bit, and would round each gradient to the table's type.
    """
    num_tokens, width = gradients.shape
    by_row, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(by_row, by_row, right=True)
    grid = (num_tokens, triton.cdiv(width, _TABLE_COLUMNS))
    _add_rows_kernel[grid](
        table, by_row, order, ends, gradients, width, _TABLE_TOKENS, _TABLE_COLUMNS, num_warps=_TABLE_WARPS
    )


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
