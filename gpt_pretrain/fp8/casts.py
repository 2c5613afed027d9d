r"""Casts to FP8 and back, and which cast each recipe makes of a linear layer's tensors.

**A cast** multiplies values by a scale, saturates, and rounds to the nearest code. An FP8 number has few values: E4M3
±448 with three bits of mantissa, E5M2 ±57,344 with two. A scale moves a tensor, or a block of it, into that range:

    code = round(saturate(x · scale))        x ≈ code / scale

The product x · scale is taken in fp32. What lies beyond the largest code becomes the largest code, infinities too;
rounding goes to the nearest code, ties to even; NaN stays NaN. Values below half the smallest subnormal code (2^-9 in
E4M3, 2^-16 in E5M2) become zero.

**A recipe** is where the scale comes from. From the tensor itself (`scale_from_amax`) it is the largest code over the
largest magnitude, "amax". From blocks of the tensor it is one per block, kept to powers of two, so that scaling is
exact: rounded down from the same quotient on Hopper (`power_of_two_scale`), or stored as an exponent alone
(`e8m0_scale`). Delayed scaling brings its own (`delayed.py`). TorchAO's scales are of a tensor or of its rows
(`torchao_scale`).

**Directions.** A tensor takes part in two products, which sum over different dimensions of it:

    input x [tokens, in]              over in (forward, x·wᵀ) and over tokens (wgrad, dyᵀ·x)
    weight w [out, in]                over in (forward) and over out (dgrad, dy·w)
    gradient of the output dy [tokens, out]    over out (dgrad) and over tokens (wgrad)

One scale for the tensor serves both. Blocks with one scale each must lie along the dimension that is summed over, so
such a tensor is cast twice, both times from the values themselves.

The rules are those of Transformer Engine (TE) 2.12's kernels: common/recipe/recipe_common.cuh
(`compute_scale_from_amax`), common/transpose/quantize_transpose_*_blockwise.cu, common/cast/mxfp8 and `float_to_e8m0`
of common/util/ptx.cuh. As there, amax passes over NaN. TorchAO's are those of torchao.float8 0.18: `amax_to_scale`, in
fp64, and `matmul_with_hp_or_float8_args`; there a NaN makes the scale NaN, and with it all of its values.
Nothing here waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gpt_pretrain.config.choices import Fp8Backend, Fp8RecipeName
from gpt_pretrain.fp8.gemms import CODE_TYPES, Role, role_format, spread_over_blocks
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.recipes import FORMAT_MAX, Recipe

FP32_MAX = torch.finfo(torch.float32).max

# fp32 is one bit of sign, eight of exponent (biased by 127), 23 of mantissa.
_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x007FFFFF
_LARGEST_E8M0 = 254

# Values that share a scale under Float8BlockScaling and MXFP8BlockScaling.
_BLOCK, _MICRO_BLOCK = 128, 32

# (amax of each block in fp32, format of the codes, type of the values) → scale of each block, fp32.
ScaleRule = Callable[[torch.Tensor, str, torch.dtype], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """A matrix in FP8."""

    format: str
    """"e4m3" or "e5m2"."""
    codes: torch.Tensor
    """[rows, columns], float8_e4m3fn or float8_e5m2."""
    scale: torch.Tensor
    """fp32: the factor of the values; [1], or [blocks of rows, blocks of columns]."""
    amax: torch.Tensor
    """fp32 [1]: the largest magnitude of the values."""
    block: tuple[int, int] | None
    """Rows and columns of a block; None where the tensor has one scale."""

    def values(self) -> torch.Tensor:
        """The values of the codes, fp32 [rows, columns]: code times the reciprocal of the scale, which TE stores."""
        inverse = self.scale.reciprocal()
        if self.block is not None:
            rows, columns = self.codes.shape
            inverse = spread_over_blocks(inverse, self.block, (rows, columns))
        return self.codes.float() * inverse


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor, ignoring NaN; fp32 [1]."""
    return _magnitudes(x).amax().float().reshape(1)


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=torch.inf)


def scale_from_amax(amax: torch.Tensor, format: str, largest: float = FP32_MAX) -> torch.Tensor:
    """The largest code over amax (fp32, any shape); 1 where amax is zero or infinite, `largest` beyond fp32."""
    # A number over a tensor would be computed as the number times the reciprocal, which rounds twice.
    scale = torch.full_like(amax, FORMAT_MAX[format]) / amax
    scale = torch.where(torch.isinf(scale), largest, scale)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)


def power_of_two_scale(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """`scale_from_amax`, rounded down to a power of two by dropping the mantissa; a `ScaleRule`.

    The largest finite number of the values' type stands for a quotient beyond fp32.
    """
    scale = scale_from_amax(amax, format, largest=torch.finfo(dtype).max)
    return (scale.view(torch.int32) & ~_MANTISSA_MASK).view(torch.float32)


def e8m0_scale(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """2^-e for the smallest e with amax / 2^e within the format; a `ScaleRule` for values of any type.

    E8M0 stores e + 127 in eight bits, rounded up.
    """
    needed = (amax * torch.full_like(amax, FORMAT_MAX[format]).reciprocal()).view(torch.int32)
    exponent, mantissa = needed >> _MANTISSA_BITS, needed & _MANTISSA_MASK
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + rounds_up).clamp(max=_LARGEST_E8M0)
    scale = ((_LARGEST_E8M0 - exponent) << _MANTISSA_BITS).view(torch.float32)
    # A block of zeros, or of values that no scale brings back.
    return torch.where(exponent == 0, 1.0, scale)


def torchao_scale(format: str, recipe: Recipe, amax: torch.Tensor) -> torch.Tensor:
    """The largest code over amax, by TorchAO's operations, which decide its last bit.

    `amax` is of the values' type and any shape, `recipe` one of TorchAO's.
    """
    scale = (FORMAT_MAX[format] / amax.double().clamp(min=recipe.least_amax)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if recipe.powers_of_two else scale


def _codes(x: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    largest = FORMAT_MAX[format]
    return (x.float() * scale).clamp(-largest, largest).to(CODE_TYPES[format])


def cast_tensor(x: torch.Tensor, format: str, scale: torch.Tensor, amax: torch.Tensor) -> Quantised:
    """Casts a matrix [rows, columns] with one given scale [1]; `amax` [1] is kept beside it."""
    return Quantised(format=format, codes=_codes(x, scale, format), scale=scale, amax=amax, block=None)


def cast_blocks(x: torch.Tensor, format: str, block: tuple[int, int], rule: ScaleRule) -> Quantised:
    """Casts a matrix [rows, columns] with one scale for each block of it, by the rule.

    `block` is its rows and columns; blocks at the lower and right edge may be smaller.
    """
    (rows, columns), (height, width) = x.shape, block
    # Zeros change no amax.
    padded = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    tiles = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = _magnitudes(tiles).amax(dim=(1, 3), keepdim=True).float()
    scale = rule(amax, format, x.dtype)
    codes = _codes(tiles, scale, format).reshape(padded.shape)[:rows, :columns]
    return Quantised(
        format=format,
        codes=codes,
        scale=scale.reshape(scale.shape[0], scale.shape[2]),
        amax=amax.amax().reshape(1),
        block=block,
    )


@dataclass(frozen=True, slots=True)
class Directions:
    """A matrix [rows, columns] in FP8, as the products need it."""

    along_rows: Quantised
    """For the product that sums over its columns: blocks lie within rows."""
    along_columns: Quantised
    """For the product that sums over its rows: blocks lie within columns."""


# How a layer's tensors become FP8: casts a matrix [rows, columns], gathered where tensor parallel ranks split its rows.
type Cast = Callable[[torch.Tensor, Role], Directions]


def _current_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale per tensor, from the tensor itself (TE: Float8CurrentScaling).

    For a tensor that is split over the sequence, TE reduces the amax over the tensor parallel ranks; here the tensor
    comes whole. Both scale weights, inputs of row-parallel layers and gradients of column-parallel layers by each
    rank's own part.
    """
    format, amax = role_format(settings, role), tensor_amax(x)
    quantised = cast_tensor(x, format, scale_from_amax(amax, format), amax)
    return Directions(quantised, quantised)


def _block_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale, a power of two, per 1×128 values of inputs and gradients, per 128×128 of weights.

    TE: Float8BlockScaling with its defaults, on Hopper. Where ranks split the sequence TE casts the parts, which are
    multiples of 128 tokens, and gathers codes; that gives the blocks of the whole.
    """
    format = role_format(settings, role)
    if role is Role.weight:
        quantised = cast_blocks(x, format, (_BLOCK, _BLOCK), power_of_two_scale)
        return Directions(quantised, quantised)
    return _cast_both_ways(x, format, _BLOCK, power_of_two_scale)


def _micro_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale, an exponent in eight bits, per 32 values (TE: MXFP8BlockScaling)."""
    return _cast_both_ways(x, role_format(settings, role), _MICRO_BLOCK, e8m0_scale)


def _torchao_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale per tensor, or per row and per column (`Float8LinearConfig.from_recipe_name`).

    As for TE, tensors come whole where ranks split the sequence, and each rank's own part is scaled where they split
    weights or features: TorchAO's linear layers know nothing of other ranks.
    """
    recipe, format = settings.recipe, role_format(settings, role)

    def cast(block: tuple[int, int] | None) -> Quantised:
        rows, columns = x.shape
        # NaN counts: it stays in a maximum of torch.
        along = {(1, columns): 1, (rows, 1): 0}
        of_parts = x.abs().amax() if block is None else x.abs().amax(dim=along[block], keepdim=True)
        scale = torchao_scale(format, recipe, of_parts)
        return Quantised(
            format=format,
            codes=_codes(x, scale, format),
            scale=scale.reshape(1) if block is None else scale,
            amax=of_parts.amax().float().reshape(1),
            block=block,
        )

    if recipe.scales_tensors:
        quantised = cast(None)
        return Directions(quantised, quantised)
    is_whole = recipe.scales_dgrad_weight_whole and role is Role.weight
    return Directions(along_rows=cast((1, x.shape[1])), along_columns=cast(None if is_whole else (x.shape[0], 1)))


def _cast_both_ways(x: torch.Tensor, format: str, length: int, rule: ScaleRule) -> Directions:
    return Directions(
        along_rows=cast_blocks(x, format, (1, length), rule),
        along_columns=cast_blocks(x, format, (length, 1), rule),
    )


def stateless_cast(settings: Fp8Settings) -> Cast:
    """The cast of a recipe whose scales come from the tensors themselves: all but delayed.

    Raises:
        NotImplementedError: The recipe has no cast here.
    """
    if settings.recipe.backend is Fp8Backend.torchao:
        return partial(_torchao_scaling, settings)
    casts: dict[Fp8RecipeName, Callable[[Fp8Settings, torch.Tensor, Role], Directions]] = {
        Fp8RecipeName.tensorwise: _current_scaling,
        Fp8RecipeName.blockwise: _block_scaling,
        Fp8RecipeName.mxfp8: _micro_scaling,
    }
    name = settings.recipe.name
    if Fp8RecipeName[name] not in casts:
        raise NotImplementedError(
            f"model.fp8_emulate=true cannot cast for model.fp8_recipe={name}; use one of "
            f"{', '.join(known.name for known in casts)}"
        )
    return partial(casts[Fp8RecipeName[name]], settings)
