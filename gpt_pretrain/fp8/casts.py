"""Casts to FP8 and back, and the casts that each recipe makes of a linear layer's tensors.

**A cast** multiplies values by a scale, saturates, and rounds to the nearest code. E4M3 ends at ±448 and has three bits
of mantissa, E5M2 ends at ±57,344 and has two. The scale moves a tensor, or a block of it, into that range:

    code = round(saturate(x · scale))        x ≈ code / scale

The product x · scale is taken in fp32. Values beyond the largest code become the largest code, infinities too. Rounding
goes to the nearest code, ties to even; NaN stays NaN. Values below half the smallest subnormal code (2^-9 in E4M3,
2^-16 in E5M2) become zero.

**A recipe** determines the scale. For a whole tensor it is the largest code over the largest magnitude, "amax"
(`scale_from_amax`). Scales of blocks are powers of two, so that scaling is exact: the same quotient rounded down on
Hopper (`power_of_two_scale`), or a mere exponent (`e8m0_scale`). Delayed scaling has its own (`delayed.py`), TorchAO
scales of a tensor or of its rows (`torchao_scale`).

**Directions.** A tensor takes part in two products, which sum over different dimensions of it:

    input x [tokens, in]                       over in (forward, x·wᵀ) and over tokens (wgrad, dyᵀ·x)
    weight w [out, in]                         over in (forward) and over out (dgrad, dy·w)
    gradient of the output dy [tokens, out]    over out (dgrad) and over tokens (wgrad)

One scale for the tensor serves both. Blocks must lie along the dimension that is summed over, so such a tensor is cast
twice, both times from the values themselves.

Sources: Transformer Engine (TE) 2.12's kernels, where amax ignores NaN: common/recipe/recipe_common.cuh
(`compute_scale_from_amax`), common/transpose/quantize_transpose_*_blockwise.cu, common/cast/mxfp8, and `float_to_e8m0`
of common/util/ptx.cuh. torchao.float8 0.18: `amax_to_scale`, in fp64, where a NaN makes the scale and all of its values
NaN, and `matmul_with_hp_or_float8_args`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import FORMAT_MAX, Numerics, Recipe, recipes_of
from gpt_pretrain.fp8.gemms import CODE_TYPES, Role, role_format, spread_over_blocks
from gpt_pretrain.run.fp8 import Fp8Settings

FP32_MAX = torch.finfo(torch.float32).max

# fp32 is one bit of sign, eight of exponent (biased by 127), 23 of mantissa.
_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x007FFFFF
_LARGEST_E8M0 = 254

# From the amax of each block in fp32, the codes' format and the values' type to the scale of each block, fp32.
ScaleRule = Callable[[torch.Tensor, str, torch.dtype], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
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
    """Rows and columns of a block; None if the tensor has one scale."""

    def values(self) -> torch.Tensor:
        """The values of the codes, fp32 [rows, columns]: code times the reciprocal of the scale, which TE stores."""
        inverse = self.scale.reciprocal()
        if self.block is not None:
            inverse = spread_over_blocks(inverse, self.block, self.codes.shape)
        return self.codes.float() * inverse


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor, ignoring NaN; fp32 [1]."""
    return _magnitudes(x).amax().float().reshape(1)


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=torch.inf)


def scale_from_amax(amax: torch.Tensor, format: str, largest: float = FP32_MAX) -> torch.Tensor:
    """The largest code over amax (fp32, any shape); 1 where amax is zero or infinite, `largest` beyond fp32."""
    # torch computes a number over a tensor as the number times the reciprocal, which rounds twice.
    scale = torch.full_like(amax, FORMAT_MAX[format]) / amax
    scale = torch.where(torch.isinf(scale), largest, scale)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)


def exact_scale(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """`scale_from_amax`, the type's largest number beyond fp32; a `ScaleRule`."""
    return scale_from_amax(amax, format, largest=torch.finfo(dtype).max)


def power_of_two_scale(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """`scale_from_amax`, rounded down to a power of two; a `ScaleRule`.

    A quotient beyond fp32 counts as the largest finite number of the values' type.
    """
    return (exact_scale(amax, format, dtype).view(torch.int32) & ~_MANTISSA_MASK).view(torch.float32)


def e8m0_scale(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """2^-e for the smallest e with amax / 2^e within the format, where E8M0 stores e + 127; a `ScaleRule`."""
    needed = (amax * torch.full_like(amax, FORMAT_MAX[format]).reciprocal()).view(torch.int32)
    exponent, mantissa = needed >> _MANTISSA_BITS, needed & _MANTISSA_MASK
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + rounds_up).clamp(max=_LARGEST_E8M0)
    scale = ((_LARGEST_E8M0 - exponent) << _MANTISSA_BITS).view(torch.float32)
    # A block of zeros, or of values that no scale brings back.
    return torch.where(exponent == 0, 1.0, scale)


def torchao_scale(format: str, recipe: Recipe, amax: torch.Tensor) -> torch.Tensor:
    """The largest code over amax (of the values' type, any shape), to the last bit as TorchAO computes it."""
    scale = (FORMAT_MAX[format] / amax.double().clamp(min=recipe.numerics.least_amax)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if recipe.numerics.powers_of_two else scale


def _codes(x: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    largest = FORMAT_MAX[format]
    return (x.float() * scale).clamp(-largest, largest).to(CODE_TYPES[format])


def cast_tensor(x: torch.Tensor, format: str, scale: torch.Tensor, amax: torch.Tensor) -> Quantized:
    """Casts a matrix [rows, columns] with a given scale [1]; `amax` [1] is kept beside it."""
    return Quantized(format=format, codes=_codes(x, scale, format), scale=scale, amax=amax, block=None)


def cast_blocks(x: torch.Tensor, format: str, block: tuple[int, int], rule: ScaleRule) -> Quantized:
    """Casts a matrix [rows, columns] with one scale for each block of it, by the rule.

    Blocks at the lower and right edge may be smaller.
    """
    (rows, columns), (height, width) = x.shape, block
    # Zeros change no amax.
    padded = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    tiles = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = _magnitudes(tiles).amax(dim=(1, 3), keepdim=True).float()
    scale = rule(amax, format, x.dtype)
    codes = _codes(tiles, scale, format).reshape(padded.shape)[:rows, :columns]
    return Quantized(format=format, codes=codes, scale=scale[:, 0, :, 0], amax=amax.amax().reshape(1), block=block)


@dataclass(frozen=True, slots=True)
class Directions:
    """A matrix [rows, columns] in FP8, as the products need it."""

    along_rows: Quantized
    """For the product that sums over its columns: blocks lie within rows."""
    along_columns: Quantized
    """For the product that sums over its rows: blocks lie within columns."""


# Casts a matrix [rows, columns] of a layer; rows that tensor parallel ranks split have been gathered.
type Cast = Callable[[torch.Tensor, Role], Directions]


def _scale_rule(numerics: Numerics) -> ScaleRule:
    if numerics.has_exponents:
        return e8m0_scale
    return power_of_two_scale if numerics.powers_of_two else exact_scale


def _current_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale per tensor, from the tensor itself (TE: Float8CurrentScaling).

    TE reduces the amax of a tensor that ranks split over the sequence; here it comes whole. If they split weights or
    features, each rank's part has its own scale in both.
    """
    format, amax = role_format(settings, role), tensor_amax(x)
    scale = _scale_rule(settings.recipe.numerics)(amax, format, torch.float32)
    quantized = cast_tensor(x, format, scale, amax)
    return Directions(quantized, quantized)


def _block_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale for each block (TE: Float8BlockScaling with its defaults, on Hopper, and MXFP8BlockScaling).

    If ranks split the sequence, TE casts the parts and gathers codes, with the same blocks, because parts are multiples
    of a block's tokens.
    """
    numerics, format = settings.recipe.numerics, role_format(settings, role)
    length, rule = numerics.block, _scale_rule(numerics)
    assert length is not None, "the recipe has blocks"
    if role is Role.weight and numerics.squares_weights:
        quantized = cast_blocks(x, format, (length, length), rule)
        return Directions(quantized, quantized)
    return Directions(cast_blocks(x, format, (1, length), rule), cast_blocks(x, format, (length, 1), rule))


def _torchao_scaling(settings: Fp8Settings, x: torch.Tensor, role: Role) -> Directions:
    """One scale per tensor, or per row and per column (`Float8LinearConfig.from_recipe_name`)."""
    recipe, format = settings.recipe, role_format(settings, role)

    def cast(dim: int | None) -> Quantized:
        # torch's maximum keeps NaN.
        amax = x.abs().amax().reshape(1) if dim is None else x.abs().amax(dim=dim, keepdim=True)
        scale = torchao_scale(format, recipe, amax)
        block = None if dim is None else ((x.shape[0], 1), (1, x.shape[1]))[dim]
        codes, whole = _codes(x, scale, format), amax.amax().float().reshape(1)
        return Quantized(format=format, codes=codes, scale=scale, amax=whole, block=block)

    if recipe.numerics.scales_tensors:
        quantized = cast(None)
        return Directions(quantized, quantized)
    is_whole = recipe.numerics.scales_dgrad_weight_whole and role is Role.weight
    return Directions(along_rows=cast(1), along_columns=cast(None if is_whole else 0))


def stateless_cast(settings: Fp8Settings) -> Cast:
    """The cast of a recipe whose scales come from the tensors themselves: all but delayed.

    Raises:
        NotImplementedError: The recipe's scales come from a history.
    """
    recipe = settings.recipe
    if recipe.keeps_history:
        others = [each.name for each in recipes_of(recipe.backend) if not each.keeps_history]
        raise NotImplementedError(
            f"model.fp8_recipe={recipe.name} needs a history; without one there are {', '.join(others)}"
        )
    if recipe.backend is Fp8Backend.torchao:
        return partial(_torchao_scaling, settings)
    return partial(_current_scaling if recipe.numerics.scales_tensors else _block_scaling, settings)
