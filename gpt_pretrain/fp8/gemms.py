"""How a linear layer's matrix products are described: the one language of proof, statistics and emulation.

`fp8/observer.py` watches Transformer Engine's products from outside; local layers report theirs themselves. At the end
of the file is the arithmetic on FP8 codes that proof and statistics share, in other words than `fp8/casts.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.recipes import FORMAT_MAX

# The type of the codes of each format.
CODE_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# By how much a rounding to BF16, which has eight bits, moves a number at most, over its magnitude.
BF16_ROUNDING = 2.0**-8
# Scales are quotients in fp32: one rounding, of at most 2^-24, an inverse, and what fp64 adds here.
QUOTIENT_ERROR = 2.0**-22


class Phase(Enum):
    """Which of a linear layer's three products."""

    forward = "forward"
    """y = x·wᵀ"""
    dgrad = "dgrad"
    """dx = dy·w"""
    wgrad = "wgrad"
    """dw = dyᵀ·x"""


class Role(Enum):
    """Which of a linear layer's three tensors."""

    input = "input"
    weight = "weight"
    output_gradient = "output_gradient"


def role_format(settings: Fp8Settings, role: Role) -> str:
    """The format of a role's codes: "e4m3" or "e5m2"."""
    return settings.gradient_format if role is Role.output_gradient else settings.forward_format


def role_name(role: Role) -> str:
    """A role in words."""
    return role.value.replace("_", " ")


# The two operands of each product.
OPERANDS = {
    Phase.forward: (Role.input, Role.weight),
    Phase.dgrad: (Role.output_gradient, Role.weight),
    Phase.wgrad: (Role.output_gradient, Role.input),
}
# The product before which a tensor is cast; until the next microbatch its amax belongs to that cast.
CAST_IN = {Role.input: Phase.forward, Role.weight: Phase.forward, Role.output_gradient: Phase.dgrad}


def multiply(phase: Phase, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """x·wᵀ, dy·w or dyᵀ·x, of operands in the order of `OPERANDS`."""
    if phase is Phase.forward:
        return torch.mm(first, second.t())
    return torch.mm(first if phase is Phase.dgrad else first.t(), second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One operand, as the product reads it; nothing here waits for the device."""

    role: Role
    format: str
    """"e4m3" or "e5m2"; "bfloat16" or "float32" where it is not quantised."""
    codes: torch.Tensor | None
    """The values as float8_e4m3fn or float8_e5m2, any shape; None where the operand is not quantised."""
    scale: torch.Tensor | None
    """fp32: the factor of the values before they were rounded, one for the tensor [1] or one per block."""
    amax: torch.Tensor | None
    """fp32 [1]: the largest magnitude before the rounding; None where it is unknown."""
    values: torch.Tensor | None = None
    """What was rounded, of the shape of the codes, or is multiplied as it is; None where it is not kept."""
    blur: float = 0.0
    """By how much the values may differ from what was rounded, over the largest of them."""
    is_gathered: bool = False
    """The codes are those of several ranks, and amax is that of this rank's part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a linear layer."""

    phase: Phase
    operands: tuple[Operand, Operand]
    """In the order of `OPERANDS`."""
    output: torch.Tensor | None = None
    """The result, a matrix of the run's precision; None where nobody asked for it."""
    added: torch.Tensor | None = None
    """What the result has in it beside the product: one value per column (a bias), or one for each value."""
    part: int = 0
    """Of a call that computes several products, one for each expert with rows: which of them."""
    result_error: float = BF16_ROUNDING
    """How far the result may be from the exact one, over its 2-norm. It is rounded once, to BF16 at worst."""
    sum_error: float = 0.0
    """The same, over the 2-norm of the sums of the terms' magnitudes."""

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of the two operands."""
        return self.operands[0].format, self.operands[1].format


# Called with each product of a linear layer.
ProductListener = Callable[[Product], None]


def spread_over_blocks(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each value of a matrix of this shape, from the scales [blocks of rows, blocks of columns].

    `block` is a block's rows and columns; blocks at the lower and right edge may be smaller. Scales beyond the matrix,
    which only pad their array, are left out.
    """
    (height, width), (rows, columns) = block, shape
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def count_codes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """Counts codes regardless of their sign; does not wait for the device.

    A kernel does so in one pass. torch's own operations take ten, and made an observed step twice as long. `codes` are
    contiguous, of any shape; `largest` is the code of their format's largest finite magnitude.

    Returns:
        int64 [3]: how many codes are zero, how many are `largest`, and the code of the largest magnitude, which exceeds
        `largest` for NaN and infinity.
    """
    magnitudes_and_signs = codes.detach().view(torch.uint8)
    if codes.is_cuda:
        from gpt_pretrain.kernels.fp8_codes_triton import count_bytes

        return count_bytes(magnitudes_and_signs, largest)
    magnitudes = magnitudes_and_signs & 0x7F
    zero, full = (magnitudes == 0).sum(), (magnitudes == largest).sum()
    return torch.stack([zero, full, magnitudes.max().long()])


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
