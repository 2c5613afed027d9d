"""The Triton kernels behind `cross_entropy`: one program per row, its columns in blocks.

Memory bounds both: the first reads the logits, the second reads and writes them. Imported on a GPU only.
"""

import torch
import triton
import triton.language as tl

# The fastest of six on an H200: 3.3 TB/s with 50k columns, 3.9 with 128k. One kernel for both is no faster.
_BLOCK = 8192
_STATISTICS_WARPS = 8
_GRADIENT_WARPS = 16


@triton.jit
def _statistics_kernel(logits, labels, statistics, num_rows, num_columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * num_columns
    label = tl.load(labels + row)
    largest = -float("inf")
    exponentials = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values))
        exponentials = exponentials * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger))
        largest = larger
    here = (label >= 0) & (label < num_columns)
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, exponentials)
    tl.store(statistics + 2 * num_rows + row, tl.load(logits + label, mask=here, other=-float("inf")).to(tl.float32))


@triton.jit
def _gradient_kernel(logits, labels, log_sum, loss_gradient, num_columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * num_columns
    label = tl.load(labels + row)
    shift = tl.load(log_sum + row)
    factor = tl.load(loss_gradient + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        values = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = (tl.exp(values - shift) - (columns == label).to(tl.float32)) * factor
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def launch_statistics(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """See `cross_entropy.row_statistics`."""
    num_rows, num_columns = logits.shape
    statistics = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    _statistics_kernel[(num_rows,)](
        logits, labels, statistics, num_rows, num_columns, BLOCK=_BLOCK, num_warps=_STATISTICS_WARPS
    )
    return statistics


def launch_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_sum: torch.Tensor, loss_gradient: torch.Tensor
) -> None:
    """See `cross_entropy.turn_into_gradient`."""
    num_rows, num_columns = logits.shape
    _gradient_kernel[(num_rows,)](
        logits, labels, log_sum, loss_gradient, num_columns, BLOCK=_BLOCK, num_warps=_GRADIENT_WARPS
    )
