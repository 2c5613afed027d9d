"""How a linear layer's matrix products are described: the one language of proof, statistics and emulation.

`fp8/observer.py` watches Transformer Engine's products from outside; emulated layers report theirs themselves.

Delayed scaling also has state, its scales and amax histories: at the end of the file is what training asks of it before
a model's first step, and of the casts of each step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.spec.recipes import Fp8Settings

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


def role_format(settings: Fp8Settings, role: Role) -> str:
    """The format of a role's codes: "e4m3" or "e5m2"."""
    return settings.gradient_format if role is Role.output_gradient else settings.forward_format


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
    """What was rounded, of the shape of the codes; None where it is not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a linear layer."""

    phase: Phase
    operands: tuple[Operand, Operand]
    """In the order of `OPERANDS`."""
    output: torch.Tensor | None = None
    """The result, of the run's precision; None where the product has not been computed yet."""
    bias: torch.Tensor | None = None
    """What the result has in it beside the product, one value per column."""

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of the two operands."""
        return self.operands[0].format, self.operands[1].format


# Called with each product of a linear layer: right before Transformer Engine computes it, right after emulation has.
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


class StepCasts:
    """The FP8 casts of one step: whether they met an infinity, and what a skipped step takes back.

    A cast saturates. An infinity becomes the largest code, and whatever is computed from the codes is finite: loss and
    gradient norm do not show it. Its amax does. A NaN stays NaN in the codes and shows in the gradient norm.

    Emulated layers keep the largest amax of their casts. Those of Transformer Engine are known under delayed scaling
    alone, from the histories: as far back as `model.fp8_amax_history_len` passes.

    A skipped step's amaxes would stay in the histories for as many passes: an infinite one freezes the scale (TE 2.12,
    common/recipe/delayed_scaling.cu), and what was computed behind an infinity makes scales too small. So they are
    taken back. Infinities that a validation left there are none of the step's, and become zeros before it.

    Args:
        chunks: This rank's model chunks, before the step.
    """

    @torch.no_grad()
    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        modules: list[Any] = list(_modules(chunks))
        states = [state for module in modules for state in getattr(module, "fp8_meta", {}).values()]
        states = [state for state in states if getattr(state, "amax_history", None) is not None]
        self._histories: list[torch.Tensor] = [state.amax_history for state in states]
        self._scales: list[torch.Tensor] = [state.scale for state in states]
        self._before = _flat(self._histories).nan_to_num_(nan=0.0, posinf=0.0), _flat(self._scales)
        _write(self._before[0], self._histories)
        self._amaxes: list[torch.Tensor] = [each.largest_amax for each in modules if hasattr(each, "largest_amax")]
        _write(torch.zeros_like(_flat(self._amaxes)), self._amaxes)

    def met_infinity(self) -> torch.Tensor:
        """Whether a cast of this rank met an infinity, bool []; does not wait for the device."""
        return ~torch.isfinite(_flat([*self._amaxes, *self._histories])).all()

    @torch.no_grad()
    def settle(self, skipped: torch.Tensor) -> None:
        """Puts histories and scales back to where they were before the step, if it is skipped.

        Args:
            skipped: bool [], on the device, where the decision stays.
        """
        for tensors, before in zip((self._histories, self._scales), self._before, strict=True):
            _write(torch.where(skipped, before, _flat(tensors)), tensors)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all in one tensor: a kernel for all of them instead of one for each."""
    if not tensors:
        return torch.empty(0, device=torch.cuda.current_device())
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(values: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The reverse of `_flat`."""
    if tensors:
        parts = values.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def gradient_scales(chunks: Sequence[MegatronModule]) -> torch.Tensor:
    """The scales of the next casts of output gradients, fp32 [FP8 layers of this rank].

    A scale is 1 only where no pass has shown an amax: the largest code over an amax is not 1.
    """
    found = (delayed_scale(module, Role.output_gradient) for module in _modules(chunks))
    scales = [scale for scale in found if scale is not None]
    # A stacked copy stays when Transformer Engine writes the next scales in place.
    return torch.stack(scales) if scales else torch.empty(0, device=torch.cuda.current_device())


def _modules(chunks: Sequence[MegatronModule]) -> Iterator[torch.nn.Module]:
    return (module for chunk in chunks for module in chunk.modules())
