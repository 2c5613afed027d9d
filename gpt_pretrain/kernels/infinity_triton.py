"""The kernel that searches tensors cast in blocks for infinities (`fp8/infinities.py`), at a fraction of a cast's cost.

A block with an infinity has scale 1. The kernel reads all scales, a number for each 128 values, and the values of those
blocks alone.
"""

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(128)
_ROWS = tl.constexpr(64)


@triton.jit
def _search(values, scale_inv, found, num_rows, num_columns, stride):
    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    inverses = tl.load(scale_inv + tl.program_id(1) * stride + rows, mask=rows < num_rows, other=0.0)
    suspicious = inverses == 1.0
    if tl.max(suspicious.to(tl.int32), axis=0) > 0:
        columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
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
