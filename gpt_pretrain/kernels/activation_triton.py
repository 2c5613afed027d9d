"""The kernels behind `CastingMLP`: an activation and its gradient, written as FP8 codes and as their transpose.

Each program reads the inputs of one tile once, computes in fp32, rounds to the type of the layers as separate kernels
would, and writes the tile's codes twice. Instructions count here as much as bytes: a third fewer of them raised the
SwiGLU of Llama 3 8B on an H200 from 3.6 to 4.1 TB/s, and its gradient from 2.8 to 3.9.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from gpt_pretrain.kernels.fp8_codes_triton import (
    ASSEMBLY,
    TILE_COLUMNS,
    TILE_PAIRS,
    TILE_WARPS,
    CastInto,
    cast_passes,
    raise_amax,
    read_factor,
    store_codes,
    tile_grid,
)


@triton.jit
def _sigmoid(values):
    # Cheaper than tl.exp and a division, which handle subnormal numbers. Here those vanish beside 1 or become code 0.
    inverse = 1 + tl.exp2(-1.4426950408889634 * values)
    if ASSEMBLY:
        share = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [inverse], tl.float32, True, 1)
    else:
        share = 1 / inverse
    return share


@triton.jit
def _gelu_parts(values):
    # The tanh form: x·(1 + tanh(z))/2 = x·sigmoid(2z), with 2z = 2·sqrt(2/pi)·(x + 0.044715 x³); and the slope of 2z.
    share = _sigmoid(1.5957691216057308 * values * (1 + 0.044715 * values * values))
    return share, 1.5957691216057308 * (1 + 0.134145 * values * values)


@triton.jit
def _read(tensor, rows, columns, inside, stride: tl.constexpr):
    places = tensor + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _read_biased(inputs, bias, rows, columns, inside, width: tl.constexpr, BIASED: tl.constexpr):
    values = _read(inputs, rows, columns, inside, width)
    if BIASED:
        values += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return values


@triton.jit
def _activate(
    inputs, bias, rows, columns, num_rows, width: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr
):
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    if ACTIVATION == "swiglu":
        gate = _read(inputs, rows, columns, inside, 2 * width)
        values = gate * _sigmoid(gate) * _read(inputs, rows, columns + width, inside, 2 * width)
    else:
        biased = _read_biased(inputs, bias, rows, columns, inside, width, BIASED)
        if ACTIVATION == "squared_relu":
            # NaN stays NaN.
            values = tl.where(biased <= 0, 0.0, biased * biased)
        else:
            tl.static_assert(ACTIVATION == "gelu_tanh")
            share, _ = _gelu_parts(biased)
            values = biased * share
    if BIASED:
        # Outside the tensor the bias would remain.
        values = tl.where(inside, values, 0.0)
    return values.to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def _activation_kernel(
    inputs, bias, into, into_transposed, scale, inverse_scale, amax, num_rows,
    width: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, MEASURES: tl.constexpr, WRITES: tl.constexpr,
    TRANSPOSES: tl.constexpr, LARGEST: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(1) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if WRITES:
        # First, so that no tile waits for it.
        factor = read_factor(scale, inverse_scale, amax, LARGEST, EPSILON)
    even = _activate(inputs, bias, 2 * pairs, columns, num_rows, width, ACTIVATION, BIASED)
    odd = _activate(inputs, bias, 2 * pairs + 1, columns, num_rows, width, ACTIVATION, BIASED)
    if MEASURES:
        raise_amax(tl.maximum(tl.abs(even), tl.abs(odd)), amax)
    if WRITES:
        inside = columns < width
        store_codes(even, odd, into, into_transposed, factor, pairs, columns, inside, num_rows, width, TRANSPOSES)


@triton.jit
def _differentiate(
    gradients, inputs, bias, rows, columns, num_rows,
    width: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs or of a SwiGLU's gates, and that of the values that gates multiply."""
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    arriving = _read(gradients, rows, columns, inside, width)
    if ACTIVATION == "swiglu":
        gate = _read(inputs, rows, columns, inside, 2 * width)
        linear = _read(inputs, rows, columns + width, inside, 2 * width)
        share = _sigmoid(gate)
        values = (arriving * share * (1 + gate * (1 - share)) * linear).to(inputs.dtype.element_ty).to(tl.float32)
        of_linear = (arriving * gate * share).to(inputs.dtype.element_ty).to(tl.float32)
    else:
        biased = _read_biased(inputs, bias, rows, columns, inside, width, BIASED)
        if ACTIVATION == "squared_relu":
            values = tl.where(biased <= 0, 0.0, arriving * (2 * biased))
        else:
            tl.static_assert(ACTIVATION == "gelu_tanh")
            share, slope = _gelu_parts(biased)
            values = arriving * share * (1 + biased * (1 - share) * slope)
        values = values.to(inputs.dtype.element_ty).to(tl.float32)
        # Only a SwiGLU has gates, and a Triton function cannot return None.
        of_linear = values
    return values, of_linear


@triton.jit
def _gradient_kernel(
    gradients, bias_gradients, inputs, bias, into, into_transposed, scale, inverse_scale, amax, num_rows,
    width: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, MEASURES: tl.constexpr, WRITES: tl.constexpr,
    TRANSPOSES: tl.constexpr, LARGEST: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(1) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if WRITES:
        # First, so that no tile waits for it.
        factor = read_factor(scale, inverse_scale, amax, LARGEST, EPSILON)
    above, below = 2 * pairs, 2 * pairs + 1
    even, even_linear = _differentiate(gradients, inputs, bias, above, columns, num_rows, width, ACTIVATION, BIASED)
    odd, odd_linear = _differentiate(gradients, inputs, bias, below, columns, num_rows, width, ACTIVATION, BIASED)
    if MEASURES:
        magnitudes = tl.maximum(tl.abs(even), tl.abs(odd))
        if ACTIVATION == "swiglu":
            magnitudes = tl.maximum(magnitudes, tl.maximum(tl.abs(even_linear), tl.abs(odd_linear)))
        raise_amax(magnitudes, amax)
    if WRITES:
        inside = columns < width
        if ACTIVATION == "swiglu":
            beside = columns + width
            store_codes(
                even, odd, into, into_transposed, factor, pairs, columns, inside, num_rows, 2 * width, TRANSPOSES
            )
            even, odd = even_linear, odd_linear
            store_codes(
                even, odd, into, into_transposed, factor, pairs, beside, inside, num_rows, 2 * width, TRANSPOSES
            )
        else:
            store_codes(even, odd, into, into_transposed, factor, pairs, columns, inside, num_rows, width, TRANSPOSES)
        if BIASED:
            sums = bias_gradients + tl.program_id(1) * width + columns
            tl.store(sums, tl.sum(even + odd, axis=0), mask=columns < width)


def launch_activation(activation: str, inputs: torch.Tensor, bias: torch.Tensor | None, into: CastInto) -> None:
    """Writes the activation as FP8 of [rows, width].

    Inputs, contiguous, are [rows, 2 · width] of a "swiglu", gates first, or [rows, width] of a "gelu_tanh" or
    "squared_relu", to which a bias [width] may be added.
    """
    _launch(_activation_kernel, activation, inputs, bias, into, into.codes.shape[1])


def launch_gradient(
    activation: str, gradients: torch.Tensor, inputs: torch.Tensor, bias: torch.Tensor | None, into: CastInto
) -> torch.Tensor | None:
    """Writes the gradient of the activation's inputs as FP8 of their shape, and returns that of the bias, fp32 [width].

    Activation, inputs and bias are those of `launch_activation`; `gradients`, contiguous [rows, width], are those of
    its results.
    """
    rows, width = gradients.shape
    sums = None
    if bias is not None:
        sums = torch.empty(tile_grid(rows, width)[1], width, dtype=torch.float32, device=inputs.device)
    _launch(_gradient_kernel, activation, inputs, bias, into, width, gradients, sums)
    return None if sums is None else sums.sum(dim=0)


def _launch(
    kernel: Any,
    activation: str,
    inputs: torch.Tensor,
    bias: torch.Tensor | None,
    into: CastInto,
    width: int,
    *more: torch.Tensor | None,
) -> None:
    rows = inputs.size(0)
    # Transformer Engine's own rule for FP8. It pairs every row and lets codes be stored in words.
    assert rows % 8 == 0 and width % 16 == 0, f"no FP8 tensor has {rows} rows of {width}"  # noqa: PT018
    for constants in cast_passes(into):
        kernel[tile_grid(rows, width)](
            *more, inputs, bias, into.codes, into.transposed, into.scale, into.inverse_scale, into.amax, rows, width,
            ACTIVATION=activation, BIASED=bias is not None, **constants, num_warps=TILE_WARPS,
        )  # fmt: skip
