"""The recipes as a linear layer meets them: a tensor and its role go in, what the matrix products read comes out.

A tensor takes part in two products, which sum over different dimensions of it:

    input x [tokens, in]              over in (forward, x·wᵀ) and over tokens (wgrad, dyᵀ·x)
    weight w [out, in]                over in (forward) and over out (dgrad, dy·w)
    gradient of the output dy [tokens, out]    over out (dgrad) and over tokens (wgrad)

One scale for the tensor serves both. Blocks of values with one scale each must lie along the dimension that is summed
over, so such a tensor is cast twice, both times from the values themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gpt_pretrain.config.choices import Fp8RecipeName
from gpt_pretrain.fp8.emulation.casts import (
    Quantised,
    ScaleRule,
    cast_blocks,
    cast_tensor,
    e8m0_scale,
    power_of_two_scale,
    scale_from_amax,
    tensor_amax,
)
from gpt_pretrain.fp8.gemms import Role
from gpt_pretrain.spec.fp8 import Fp8Settings

# Values of one scale under Float8BlockScaling and MXFP8BlockScaling.
_BLOCK, _MICRO_BLOCK = 128, 32


@dataclass(frozen=True, slots=True)
class Directions:
    """A matrix [rows, columns] in FP8, as the products need it."""

    along_rows: Quantised
    """For the product that sums over its columns: blocks lie within rows."""
    along_columns: Quantised
    """For the product that sums over its rows: blocks lie within columns."""


class Cast(Protocol):
    """How a layer's tensors become FP8."""

    def __call__(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix [rows, columns], whole over the tensor parallel ranks where these split its rows."""


def role_format(settings: Fp8Settings, role: Role) -> str:
    """Format of a role's codes: "e4m3" or "e5m2"."""
    return settings.gradient_format if role is Role.output_gradient else settings.forward_format


class CurrentScaling:
    """One scale per tensor, from the tensor itself (TE: Float8CurrentScaling).

    Split over the sequence, TE reduces the amax over the tensor parallel ranks: here the tensor comes whole. Weights,
    inputs of row-parallel layers and gradients of column-parallel ones are scaled by each rank's own part, there as
    here.
    """

    def __init__(self, settings: Fp8Settings) -> None:
        self._settings = settings

    def __call__(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix."""
        format, amax = role_format(self._settings, role), tensor_amax(x)
        quantised = cast_tensor(x, format, scale_from_amax(amax, format), amax)
        return Directions(quantised, quantised)


class BlockScaling:
    """One scale, a power of two, per 1×128 values of inputs and gradients, per 128×128 of weights.

    TE: Float8BlockScaling with its defaults, on Hopper. Where ranks split the sequence TE casts the parts, of multiples
    of 128 tokens, and gathers codes; that gives the blocks of the whole.
    """

    def __init__(self, settings: Fp8Settings) -> None:
        self._settings = settings

    def __call__(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix."""
        format = role_format(self._settings, role)
        if role is Role.weight:
            quantised = cast_blocks(x, format, (_BLOCK, _BLOCK), power_of_two_scale)
            return Directions(quantised, quantised)
        return _cast_both_ways(x, format, _BLOCK, power_of_two_scale)


class MicroScaling:
    """One scale, an exponent in eight bits, per 32 values (TE: MXFP8BlockScaling)."""

    def __init__(self, settings: Fp8Settings) -> None:
        self._settings = settings

    def __call__(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix."""
        return _cast_both_ways(x, role_format(self._settings, role), _MICRO_BLOCK, e8m0_scale)


def _cast_both_ways(x: torch.Tensor, format: str, length: int, rule: ScaleRule) -> Directions:
    return Directions(
        along_rows=cast_blocks(x, format, (1, length), rule),
        along_columns=cast_blocks(x, format, (length, 1), rule),
    )


def stateless_cast(settings: Fp8Settings) -> Cast:
    """The cast of a recipe whose scales come from the tensors alone: all but delayed."""
    casts: dict[Fp8RecipeName, Callable[[Fp8Settings], Cast]] = {
        Fp8RecipeName.tensorwise: CurrentScaling,
        Fp8RecipeName.blockwise: BlockScaling,
        Fp8RecipeName.mxfp8: MicroScaling,
    }
    return casts[Fp8RecipeName[settings.recipe.name]](settings)
