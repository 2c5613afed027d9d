"""How a linear layer's matrix products are described: the one language of proof, statistics and emulation.

`fp8/observer.py` watches Transformer Engine's products from outside; emulated layers report theirs themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

# The type of the codes of each format.
CODE_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def spread_over_blocks(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each value of a matrix [rows, columns], from the scales of its blocks.

    Args:
        scales: [blocks of rows, blocks of columns]; entries beyond, which only pad the array, are left out.
        block: Rows and columns of a block.
        shape: Rows and columns of the matrix; blocks at its lower and right edge may be smaller.
    """
    (height, width), (rows, columns) = block, shape
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


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


# The two operands of each product.
OPERANDS = {
    Phase.forward: (Role.input, Role.weight),
    Phase.dgrad: (Role.output_gradient, Role.weight),
    Phase.wgrad: (Role.output_gradient, Role.input),
}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a linear layer."""

    phase: Phase
    operands: tuple[Operand, Operand]
    """In the order of `OPERANDS`."""

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of the two operands."""
        return self.operands[0].format, self.operands[1].format


# Called with each product of a linear layer, right before it is computed.
ProductListener = Callable[[Product], None]
