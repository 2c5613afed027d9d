"""The description of a linear layer's matrix products that proof, statistics and emulation share.

At the end of the file is the arithmetic on FP8 codes of proof and statistics, independent of that in `fp8/casts.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.run.fp8 import Fp8Settings

CODE_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The largest relative error of rounding to BF16, which has eight bits.
BF16_ROUNDING = 2.0**-8
# The relative error of a scale: a quotient in fp32, rounded by at most 2^-24, its inverse, and what fp64 adds here.
QUOTIENT_ERROR = 2.0**-22


# Products that an FP8 instruction of Hopper's tensor cores adds to a sum.
TERMS = 32


class Sums(Enum):
    """How the terms of a product are added up, which decides what a sum may lose of its terms' magnitudes.

    Tensor cores align the `TERMS` products of an FP8 instruction, and the sum so far, to the largest of these numbers
    and cut each off after 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2): they lose at most (`TERMS` + 1) · 2^-13 of
    it. Split sums move to fp32 after 128 terms. An H100 lost up to 2^-2.5 of 131,072 terms of one sign, and up to 2^-8
    when it split them; of terms of random signs, which cancel, 2^-15 and 2^-16 (benchmarks/fp8_h100.md, "Sums").
    """

    fp32 = "fp32"
    """In any order, with fp32 rounding each time: Higham, Accuracy and Stability of Numerical Algorithms, 4.2."""
    split = "split"
    unsplit = "unsplit"

    def most_lost(self, num_terms: int) -> float:
        """The largest error of a sum, relative to the sum of its terms' magnitudes."""
        if self is Sums.fp32:
            # And each term is a product of two rounded quotients.
            return (num_terms + 4) * 2.0**-24
        per_instruction = (TERMS + 1) * 2.0**-13
        num_instructions = 4 if self is Sums.split else -(-num_terms // TERMS)
        return min(1.0, num_instructions * per_instruction)


class Phase(Enum):
    """A linear layer's products: y = x·wᵀ, dx = dy·w and dw = dyᵀ·x."""

    forward = "forward"
    dgrad = "dgrad"
    wgrad = "wgrad"


class Role(Enum):
    """A linear layer's tensors x, w and dy."""

    input = "input"
    weight = "weight"
    output_gradient = "output_gradient"


def role_format(settings: Fp8Settings, role: Role) -> str:
    """The format of a role's codes: "e4m3" or "e5m2"."""
    return settings.gradient_format if role is Role.output_gradient else settings.forward_format


def role_name(role: Role) -> str:
    """A role in words."""
    return role.value.replace("_", " ")


OPERANDS = {
    Phase.forward: (Role.input, Role.weight),
    Phase.dgrad: (Role.output_gradient, Role.weight),
    Phase.wgrad: (Role.output_gradient, Role.input),
}
# The product before which a tensor is cast.
CAST_IN = {Role.input: Phase.forward, Role.weight: Phase.forward, Role.output_gradient: Phase.dgrad}


def multiply(phase: Phase, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """x·wᵀ, dy·w or dyᵀ·x, of operands in the order of `OPERANDS`."""
    if phase is Phase.forward:
        return torch.mm(first, second.t())
    return torch.mm(first if phase is Phase.dgrad else first.t(), second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One operand, as the product reads it."""

    role: Role
    format: str
    """"e4m3" or "e5m2"; "bfloat16" or "float32" if it is not quantized."""
    values: torch.Tensor | None = None
    """What was rounded, of the shape of the codes, or is multiplied as it is; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Operand(Operand):
    """A quantized operand."""

    codes: torch.Tensor
    """float8_e4m3fn or float8_e5m2, any shape."""
    scale: torch.Tensor
    """fp32: the factor of the values before they were rounded, one for the tensor [1] or one per block."""
    amax: torch.Tensor | None
    """fp32 [1]: the largest magnitude before the rounding; None if unknown."""
    blur: torch.Tensor | None = None
    """How far the values may be from what was rounded, relative to the largest of them, []; None: they are the same."""
    is_gathered: bool = False
    """The codes come from several ranks, amax from this one."""

    def margin(self, largest: torch.Tensor) -> torch.Tensor:
        """How far the values may be from what was rounded, given the `largest` magnitude of them."""
        return torch.zeros_like(largest) if self.blur is None else self.blur * largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a linear layer."""

    phase: Phase
    operands: tuple[Operand, Operand]
    """In the order of `OPERANDS`."""
    output: torch.Tensor | None = None
    """The result, a matrix of the run's precision; None if nobody asked for it."""
    added: torch.Tensor | None = None
    """What the result contains beside the product: a bias [columns], or a matrix."""
    part: int = 0
    """The index of the product in a call that computes one for each expert with rows."""
    sums: Sums = Sums.fp32
    """How its terms were added up."""
    result_error: float = BF16_ROUNDING
    """What rounding the sums may change, relative to the result's 2-norm."""

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of the two operands."""
        return self.operands[0].format, self.operands[1].format


ProductListener = Callable[[Product], None]


def spread_over_blocks(scales: torch.Tensor, block: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    """The scale of each value of a matrix of this shape, from the scales [blocks of rows, blocks of columns].

    Blocks at the lower and right edge may be smaller. Scales beyond the matrix, which pad their array, are left out.
    """
    (height, width), (rows, columns) = block, shape
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def count_codes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """Counts codes regardless of their sign.

    `codes` are contiguous, of any shape; `largest` is the code of their format's largest finite magnitude. On a GPU one
    kernel counts in one pass: torch's own operations take ten, which made an observed step twice as long.

    Returns:
        int64 [3]: how many codes are zero, how many are `largest`, and the code of the largest magnitude, which exceeds
        `largest` for NaN and infinity.
    """
    signed = codes.detach().view(torch.uint8)
    if codes.is_cuda:
        from gpt_pretrain.kernels.fp8_codes_triton import count_bytes

        return count_bytes(signed, largest)
    magnitudes = signed & 0x7F
    zero, full = (magnitudes == 0).sum(), (magnitudes == largest).sum()
    return torch.stack([zero, full, magnitudes.max().long()])


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """fp32 [1], without a copy of the values."""
    largest: torch.Tensor = torch.linalg.vector_norm(values, ord=torch.inf)
    return largest.float().view(1)


def rounded_between(
    values: torch.Tensor, margin: torch.Tensor, factor: torch.Tensor, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest code, as fp32, of values known up to a margin and the error of a quotient."""
    values, largest, dtype = values.float(), FORMAT_MAX[format], CODE_TYPES[format]
    margin = margin + QUOTIENT_ERROR * values.abs()
    low, high = ((each * factor).clamp(-largest, largest) for each in (values - margin, values + margin))
    return low.to(dtype).float(), high.to(dtype).float()


def other_codes(
    codes: torch.Tensor, values: torch.Tensor, margin: torch.Tensor, factor: torch.Tensor, format: str
) -> torch.Tensor:
    """Which codes lie outside the bounds of `rounded_between`, bool of their shape."""
    low, high = rounded_between(values, margin, factor, format)
    found = codes.view(CODE_TYPES[format]).float()
    return ~((found >= low) & (found <= high))
