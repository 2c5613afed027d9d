"""How a linear layer's matrix products are described: the one language of proof, statistics and emulation.

`fp8/observer.py` watches Transformer Engine's products from outside; local layers report theirs themselves.

Delayed scaling also has state, its scales and amax histories: at the end of the file is what training asks of it before
a model's first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.spec.recipes import Fp8Settings

# The type of the codes of each format.
CODE_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# By how much a rounding to BF16, which has eight bits, moves a number at most, over its magnitude.
BF16_ROUNDING = 2.0**-8


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

# Where delayed scaling keeps a tensor's history: which of the module's states, and which column.
_HISTORY_OF = {
    Role.input: ("scaling_fwd", 0),
    Role.weight: ("scaling_fwd", 1),
    Role.output_gradient: ("scaling_bwd", 0),
}


def amax_history(module: torch.nn.Module, role: Role) -> torch.Tensor | None:
    """A tensor's amax history, fp32 [fp8_amax_history_len], of Transformer Engine's or emulated linear layers.

    None for modules without FP8 and for recipes without a history.
    """
    state, column = _state_of(module, role)
    history = getattr(state, "amax_history", None)
    return None if history is None else history[:, column]


def delayed_scale(module: torch.nn.Module, role: Role) -> torch.Tensor | None:
    """The scale of a tensor's next cast, fp32 [], where `amax_history` is not None; 1 until a pass has set one."""
    state, column = _state_of(module, role)
    return None if getattr(state, "amax_history", None) is None else state.scale[column]


def _state_of(module: torch.nn.Module, role: Role) -> tuple[Any, int]:
    name, column = _HISTORY_OF[role]
    return getattr(module, "fp8_meta", {}).get(name), column


def gradient_scales(chunks: Sequence[MegatronModule]) -> torch.Tensor:
    """The scales of the next casts of output gradients, fp32 [FP8 layers of this rank].

    A scale is 1 only where no pass has shown an amax: the largest code over an amax is not 1.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    found = (delayed_scale(module, Role.output_gradient) for module in modules)
    scales = [scale for scale in found if scale is not None]
    # A stacked copy stays when Transformer Engine writes the next scales in place.
    return torch.stack(scales) if scales else torch.empty(0, device=torch.cuda.current_device())
