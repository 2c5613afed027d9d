"""A cast to FP8 that reads a matrix twice: once for its amaxes, once to write its codes and their transpose.

Hopper's FP8 products sum along contiguous memory, so a matrix that is summed over its rows in one product and over its
columns in another is needed twice, once transposed. What torch.compile makes of TorchAO's operations reads the values
for each direction again and transposes codes in kernels of their own.
"""

import torch
import triton
import triton.language as tl

from gpt_pretrain.kernels.fp8_codes_triton import TILE_COLUMNS, TILE_PAIRS, TILE_WARPS, store_transposed, tile_grid


@triton.jit
def _fp8_amax_kernel(
    values,
    whole,
    of_rows,
    of_columns,
    num_rows,
    width,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = values + rows.to(tl.int64)[:, None] * width + columns[None, :]
    # As whole numbers magnitudes have the same order, and NaN comes out on top.
    magnitudes = tl.load(places, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if OF_ROWS:
        tl.atomic_max(of_rows + rows, tl.max(magnitudes, axis=1), mask=rows < num_rows, sem="relaxed")
    if OF_COLUMNS:
        tl.atomic_max(of_columns + columns, tl.max(magnitudes, axis=0), mask=columns < width, sem="relaxed")
    tl.atomic_max(whole, tl.max(magnitudes), sem="relaxed")


@triton.jit
def _fp8_codes_kernel(
    values,
    codes,
    transposed,
    scales,
    transposed_scales,
    num_rows,
    width,
    PER_ROW: tl.constexpr,
    TRANSPOSES: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows, across = 2 * pairs, columns < width
    # Rows come in pairs, so that both are inside or neither is.
    inside = (rows < num_rows)[:, None] & across[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    even = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(values + offsets + width, mask=inside, other=0.0).to(tl.float32)
    if PER_ROW:
        of_even = tl.load(scales + rows, mask=rows < num_rows, other=1.0)[:, None]
        of_odd = tl.load(scales + rows + 1, mask=rows < num_rows, other=1.0)[:, None]
    else:
        of_even = tl.load(scales)
        of_odd = of_even
    tl.store(codes + offsets, (even * of_even).to(codes.dtype.element_ty), mask=inside)
    tl.store(codes + offsets + width, (odd * of_odd).to(codes.dtype.element_ty), mask=inside)
    if TRANSPOSES:
        if PER_COLUMN:
            scale = tl.load(transposed_scales + columns, mask=across, other=1.0)[None, :]
        else:
            scale = tl.load(transposed_scales)
        store_transposed(even * scale, odd * scale, transposed, pairs, columns, across, num_rows // 2)


def measure(
    values: torch.Tensor, *, of_rows: bool, of_columns: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The largest magnitudes of a contiguous matrix [rows, columns], read once. NaN is larger than any number.

    Returns:
        fp32: of the whole, [1], of rows, [rows, 1], and of columns, [1, columns]; None where nobody asked.
    """
    rows, width = values.shape
    whole = values.new_zeros(1, dtype=torch.float32)
    each_row = values.new_zeros(rows, 1, dtype=torch.float32) if of_rows else None
    each_column = values.new_zeros(1, width, dtype=torch.float32) if of_columns else None
    _fp8_amax_kernel[tile_grid(rows, width)](
        values,
        *(None if amaxes is None else amaxes.view(torch.int32) for amaxes in (whole, each_row, each_column)),
        rows,
        width,
        OF_ROWS=of_rows,
        OF_COLUMNS=of_columns,
        ROWS=2 * TILE_PAIRS,
        COLUMNS=TILE_COLUMNS,
        num_warps=TILE_WARPS,
    )
    return whole, each_row, each_column


def cast(
    values: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor, transposed_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The codes of a matrix: values times scale in fp32, saturated, rounded to nearest; NaN stays NaN.

    Args:
        values: [rows, columns], contiguous; an even number of rows.
        dtype: float8_e4m3fn or float8_e5m2.
        scales: Factors of the first result, fp32 [1] or [rows, 1].
        transposed_scales: Factors of a second one, fp32 [1] or [1, columns].

    Returns:
        Codes [rows, columns], contiguous; then those of the second factors, of which each column is contiguous.
    """
    rows, width = values.shape
    assert rows % 2 == 0, f"rows are transposed in pairs, and there are {rows}"
    codes = torch.empty_like(values, dtype=dtype)
    transposed = None if transposed_scales is None else values.new_empty(width, rows, dtype=dtype)
    _fp8_codes_kernel[tile_grid(rows, width)](
        values,
        codes,
        transposed,
        scales,
        transposed_scales,
        rows,
        width,
        PER_ROW=scales.numel() > 1,
        TRANSPOSES=transposed is not None,
        PER_COLUMN=transposed_scales is not None and transposed_scales.numel() > 1,
        PAIRS=TILE_PAIRS,
        COLUMNS=TILE_COLUMNS,
        num_warps=TILE_WARPS,
    )
    return (codes,) if transposed is None else (codes, transposed.t())
