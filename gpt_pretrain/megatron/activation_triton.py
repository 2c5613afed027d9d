"""The kernels behind `activation_cast`: an activation and its gradient, written as FP8 codes and as their transpose.

One program takes a tile: it reads what the activation needs once, computes in fp32, rounds to the type of the layers as
separate kernels would, and writes the tile's codes twice. Both are bound by memory. A module of its own, as Triton is
not installed everywhere.
"""

# Triton reads annotations and takes none but its own, and kernels are called with everything by place.
# ruff: noqa: ANN001, ANN202, PLR0917

import torch
import triton
import triton.language as tl

from gpt_pretrain.megatron.activation_cast import CastInto

# Rows and columns of a tile.
_ROWS = 64
_COLUMNS = 64
_WARPS = 4


@triton.jit
def _sigmoid(values):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-values))


@triton.jit
def _gelu_parts(values):  # type: ignore[no-untyped-def]
    # The tanh form: x·(1 + tanh(z))/2 = x·sigmoid(2z), with 2z = 2·sqrt(2/pi)·(x + 0.044715 x³); and the slope of 2z.
    share = _sigmoid(1.5957691216057308 * values * (1 + 0.044715 * values * values))
    return share, 1.5957691216057308 * (1 + 0.134145 * values * values)


@triton.jit  # type: ignore[untyped-decorator]
def _read(tensor, rows, columns, inside, stride: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tensor + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _read_biased(inputs, bias, rows, columns, inside, width: tl.constexpr, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    values = _read(inputs, rows, columns, inside, width)
    if BIASED:
        values += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _factor(scale, amax, LARGEST: tl.constexpr, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    if LARGEST == 0:
        factor = tl.load(scale)
    else:
        # Transformer Engine's compute_scale_from_amax.
        measured = tl.maximum(tl.load(amax), EPSILON)
        factor = tl.where((measured > 0) & (measured < float("inf")), tl.div_rn(LARGEST * 1.0, measured), 1.0)
        factor = tl.minimum(factor, 3.4028234663852886e38)
    return factor


@triton.jit
def _magnitudes(values):  # type: ignore[no-untyped-def]
    # Transformer Engine's amax passes over NaN, which differs from itself.
    return tl.where(values == values, tl.abs(values), 0.0)  # noqa: PLR0124


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    values,
    into,
    into_transposed,
    factor,
    rows,
    columns,
    inside,
    num_rows,
    stride: tl.constexpr,
    TRANSPOSES: tl.constexpr,
):
    codes = (values * factor).to(into.dtype.element_ty)
    tl.store(into + rows.to(tl.int64)[:, None] * stride + columns[None, :], codes, mask=inside)
    if TRANSPOSES:
        places = into_transposed + columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
        tl.store(places, tl.trans(codes), mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator]
def _activation_kernel(  # type: ignore[no-untyped-def]
    inputs,
    bias,
    into,
    into_transposed,
    scale,
    inverse_scale,
    amax,
    num_rows,
    width: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    MEASURES: tl.constexpr,
    WRITES: tl.constexpr,
    TRANSPOSES: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    if GATED:
        gate = _read(inputs, rows, columns, inside, 2 * width)
        values = gate * _sigmoid(gate) * _read(inputs, rows, columns + width, inside, 2 * width)
    else:
        biased = _read_biased(inputs, bias, rows, columns, inside, width, BIASED)
        share, _ = _gelu_parts(biased)
        values = biased * share
    # Outside of the tensor a bias is left.
    values = tl.where(inside, values, 0.0).to(inputs.dtype.element_ty).to(tl.float32)
    if MEASURES:
        tl.atomic_max(amax, tl.max(_magnitudes(values)), sem="relaxed")
    if WRITES:
        factor = _factor(scale, amax, LARGEST, EPSILON)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse_scale, tl.div_rn(1.0, factor))
        _write(values, into, into_transposed, factor, rows, columns, inside, num_rows, width, TRANSPOSES)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    gradients,
    inputs,
    bias,
    bias_gradients,
    into,
    into_transposed,
    scale,
    inverse_scale,
    amax,
    num_rows,
    width: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    MEASURES: tl.constexpr,
    WRITES: tl.constexpr,
    TRANSPOSES: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    arriving = _read(gradients, rows, columns, inside, width)
    if GATED:
        gate = _read(inputs, rows, columns, inside, 2 * width)
        linear = _read(inputs, rows, columns + width, inside, 2 * width)
        share = _sigmoid(gate)
        values = (arriving * share * (1 + gate * (1 - share)) * linear).to(inputs.dtype.element_ty).to(tl.float32)
        of_linear = (arriving * gate * share).to(inputs.dtype.element_ty).to(tl.float32)
        largest = tl.max(tl.maximum(_magnitudes(values), _magnitudes(of_linear)))
    else:
        biased = _read_biased(inputs, bias, rows, columns, inside, width, BIASED)
        share, slope = _gelu_parts(biased)
        values = arriving * share * (1 + biased * (1 - share) * slope)
        values = values.to(inputs.dtype.element_ty).to(tl.float32)
        largest = tl.max(_magnitudes(values))
    if MEASURES:
        tl.atomic_max(amax, largest, sem="relaxed")
    if WRITES:
        factor = _factor(scale, amax, LARGEST, EPSILON)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse_scale, tl.div_rn(1.0, factor))
        if GATED:
            _write(values, into, into_transposed, factor, rows, columns, inside, num_rows, 2 * width, TRANSPOSES)
            beside = columns + width
            _write(of_linear, into, into_transposed, factor, rows, beside, inside, num_rows, 2 * width, TRANSPOSES)
        else:
            _write(values, into, into_transposed, factor, rows, columns, inside, num_rows, width, TRANSPOSES)
        if BIASED:
            sums = bias_gradients + tl.program_id(1) * width + columns
            tl.store(sums, tl.sum(values, axis=0), mask=columns < width)


def launch_activation(inputs: torch.Tensor, bias: torch.Tensor | None, into: CastInto) -> None:
    """Writes the activation as FP8.

    Args:
        inputs: [rows, 2 · width] of a SwiGLU, gates first, or [rows, width] of a GELU, contiguous.
        bias: [width], added to the inputs of a GELU; or None.
        into: FP8 of [rows, width].
    """
    rows, width = into.codes.shape
    grid = triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS)
    for measures, writes in _passes(into):
        _activation_kernel[grid](
            inputs,
            bias,
            into.codes,
            into.transposed,
            into.scale,
            into.inverse_scale,
            into.amax,
            rows,
            width,
            GATED=inputs.size(1) != width,
            BIASED=bias is not None,
            MEASURES=measures,
            WRITES=writes,
            TRANSPOSES=into.transposed is not None,
            LARGEST=_largest(into),
            EPSILON=into.amax_epsilon,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )


def launch_gradient(
    gradients: torch.Tensor, inputs: torch.Tensor, bias: torch.Tensor | None, into: CastInto
) -> torch.Tensor | None:
    """Writes the gradient of the activation's inputs as FP8, and returns that of the bias, [width] in fp32.

    Args:
        gradients: [rows, width], of what the activation computed, contiguous.
        inputs: As for `launch_activation`, and so is the bias.
        bias: As there.
        into: FP8 of the inputs' shape.
    """
    rows, width = gradients.shape
    grid = triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS)
    sums = None if bias is None else torch.empty(grid[1], width, dtype=torch.float32, device=inputs.device)
    for measures, writes in _passes(into):
        _gradient_kernel[grid](
            gradients,
            inputs,
            bias,
            sums,
            into.codes,
            into.transposed,
            into.scale,
            into.inverse_scale,
            into.amax,
            rows,
            width,
            GATED=inputs.size(1) != width,
            BIASED=bias is not None,
            MEASURES=measures,
            WRITES=writes,
            TRANSPOSES=into.transposed is not None,
            LARGEST=_largest(into),
            EPSILON=into.amax_epsilon,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )
    return None if sums is None else sums.sum(dim=0)


def _passes(into: CastInto) -> tuple[tuple[bool, bool], ...]:
    """Whether each pass looks for the amax, and whether it writes: a scale that comes from the amax takes two passes.

    The second computes the activation anew, which moves fewer bytes than to write it and to read it back.
    """
    return ((True, False), (False, True)) if into.scale_from_amax else ((True, True),)


def _largest(into: CastInto) -> float:
    return torch.finfo(into.codes.dtype).max if into.scale_from_amax else 0.0
