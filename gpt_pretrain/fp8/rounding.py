"""What rounding to FP8 does to tensors and products, in other words than `fp8/emulation/`: arithmetic of the proof."""

from dataclasses import dataclass
from typing import Self

import torch

from gpt_pretrain.fp8.gemms import CODE_TYPES, Phase, spread_over_blocks
from gpt_pretrain.spec.recipes import FORMAT_MAX

# Scales are quotients in fp32: one rounding, of at most 2^-24, an inverse, and what fp64 adds here.
QUOTIENT_ERROR = 2.0**-22
# The dimension of each of a product's operands that it does not sum over.
OWN_DIMENSION = {Phase.forward: (0, 0), Phase.dgrad: (0, 1), Phase.wgrad: (1, 1)}


def part(size: int, most: int, turn: int) -> tuple[int, int]:
    """Where the part of a dimension begins and ends that has its turn; parts have `most` indices, the last fewer."""
    start = turn % -(-size // most) * most
    return start, min(size, start + most)


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows and columns of a matrix, which begin where its blocks do."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of_size(cls, shape: torch.Size, block: tuple[int, int] | None, most: int, turn: int) -> Self:
        """At most this many values, or one block's, of whole rows; of whole columns where blocks lie along these."""
        height, width = shape
        if block is not None and block[0] > block[1]:
            return cls((0, height), part(width, max(1, most // height), turn))
        # A multiple of any block's height.
        return cls(part(height, max(128, most // width // 128 * 128), turn), (0, width))

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """These values."""
        return matrix[slice(*self.rows), slice(*self.columns)]

    def scales(self, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
        """The scales of these values' blocks, [blocks of rows, blocks of columns]; the one scale where all share it."""
        if block is None:
            return scale
        (top, bottom), (left, right), (height, width) = self.rows, self.columns, block
        return scale[top // height : -(-bottom // height), left // width : -(-right // width)]

    def factors(self, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
        """The scale of each value, or the one scale."""
        if block is None:
            return scale
        shape = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return spread_over_blocks(self.scales(scale, block), block, shape)


def largest_of_blocks(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block but for NaN, fp32 [blocks of rows, blocks of columns]."""
    magnitudes = values.float().abs()
    magnitudes = torch.where(magnitudes.isnan(), 0.0, magnitudes)
    largest: torch.Tensor = torch.nn.functional.max_pool2d(magnitudes[None], block, block, ceil_mode=True)
    return largest[0]


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """fp32 [1], without a copy of the values."""
    largest: torch.Tensor = torch.linalg.vector_norm(values, ord=torch.inf)
    return largest.float().view(1)


def rounded_between(
    values: torch.Tensor, margin: torch.Tensor, factor: torch.Tensor, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest code, as fp32, of values that are known to a margin and to the error of a quotient."""
    values, largest, dtype = values.float(), FORMAT_MAX[format], CODE_TYPES[format]
    margin = margin + QUOTIENT_ERROR * values.abs()
    low, high = ((each * factor).clamp(-largest, largest) for each in (values - margin, values + margin))
    return low.to(dtype).float(), high.to(dtype).float()


def other_codes(
    codes: torch.Tensor, values: torch.Tensor, margin: torch.Tensor, factor: torch.Tensor, format: str
) -> torch.Tensor:
    """Which codes are not between those of `rounded_between`, bool of their shape."""
    low, high = rounded_between(values, margin, factor, format)
    found = codes.view(CODE_TYPES[format]).float()
    return ~((found >= low) & (found <= high))


def count_other_codes(
    codes: torch.Tensor, values: torch.Tensor, margin: torch.Tensor, factor: torch.Tensor, format: str
) -> torch.Tensor:
    """How many codes are not between those of `rounded_between`, int64 []; does not wait for the device."""
    return other_codes(codes, values, margin, factor, format).sum()


def multiply(phase: Phase, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """x·wᵀ, dy·w or dyᵀ·x."""
    if phase is Phase.forward:
        return first @ second.t()
    return first @ second if phase is Phase.dgrad else first.t() @ second


def rounding_error(phase: Phase, exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of what the operands' rounding errors do to their product, as if independent of one another; fp64 [].

    For c = Σ aₖ·bₖ the mean of ‖δc‖² is Σ ‖δaₖ‖²·‖bₖ‖² + ‖aₖ‖²·‖δbₖ‖² + ‖δaₖ‖²·‖δbₖ‖² over all rows and columns.
    """
    own = OWN_DIMENSION[phase]
    sizes = [values.double().square().sum(dim) for values, dim in zip(exact, own, strict=True)]
    errors = [
        (values.double() - codes.double()).square().sum(dim)
        for values, codes, dim in zip(exact, rounded, own, strict=True)
    ]
    return (errors[0] * sizes[1] + sizes[0] * errors[1] + errors[0] * errors[1]).sum().sqrt()
