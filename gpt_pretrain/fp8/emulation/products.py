"""The three matrix products of an emulated linear layer, on one rank's tensors.

    forward  y  = x·wᵀ + b     over codes of x and w
    dgrad    dx = dy·w         over codes of dy and w
    wgrad    dw = dyᵀ·x        over codes of dy and x; of the values themselves with `model.fp8_wgrad=false`

Products of codes are summed in fp32 and rounded once, to the run's precision. The bias is added before that rounding,
and its gradient comes from the values, as in Transformer Engine.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpt_pretrain.fp8.emulation.casts import Quantised
from gpt_pretrain.fp8.emulation.delayed import LayerScaling
from gpt_pretrain.fp8.emulation.recipes import Cast, Directions
from gpt_pretrain.fp8.gemms import OPERANDS, Operand, Phase, Product, ProductListener, Role
from gpt_pretrain.spec.fp8 import Fp8Settings


class LinearProducts:
    """What one layer's products share: how its tensors are cast, and the codes of its weight.

    The weight is cast in the first microbatch of a step and its codes serve the others (TE's `get_weight_workspace`,
    told by megatron-core's `set_is_first_microbatch`), so that with delayed scaling a step has one scale of it.
    """

    def __init__(self, settings: Fp8Settings, cast: Cast) -> None:
        self._cast = cast
        self._wgrad_fp8 = settings.wgrad
        self._weight: Directions | None = None

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_first_microbatch: bool,
        listener: Callable[[], ProductListener | None],
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: [..., in], whole over the ranks that split the sequence; in the weight's type, or fp32 where what comes
                before hands it on unrounded.
            weight: [out, in]; the output is of its type.
            bias: [out], added to the product.
            is_first_microbatch: The weight has changed.
            listener: Who is told of the products, at the time of each.
        """
        rows = x.reshape(-1, x.shape[-1])
        input_codes = self._cast(rows.detach(), Role.input)
        if is_first_microbatch or self._weight is None:
            self._weight = self._cast(weight.detach(), Role.weight)
        call = _Call(self._cast, self._wgrad_fp8, input_codes, self._weight, listener)
        y: torch.Tensor = _Linear.apply(rows, weight, bias, call)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)


class _Call:
    """One forward pass of a layer: its codes, until the backward pass has read them."""

    def __init__(
        self,
        cast: Cast,
        wgrad_fp8: bool,
        x: Directions,
        weight: Directions,
        listener: Callable[[], ProductListener | None],
    ) -> None:
        self.cast = cast
        self.wgrad_fp8 = wgrad_fp8
        self.x = x
        self.weight = weight
        self.ends_backward = isinstance(cast, LayerScaling) and cast.ends_backward
        self._listener = listener

    def tell(self, phase: Phase, *operands: Quantised | torch.Tensor) -> None:
        """Reports a product that is about to be computed."""
        listener = self._listener()
        if listener is not None:
            first, second = (_operand(role, data) for role, data in zip(OPERANDS[phase], operands, strict=True))
            listener(Product(phase=phase, operands=(first, second)))


def _operand(role: Role, data: Quantised | torch.Tensor) -> Operand:
    if isinstance(data, torch.Tensor):
        return Operand(role=role, format=str(data.dtype).removeprefix("torch."), codes=None, scale=None, amax=None)
    return Operand(role=role, format=data.format, codes=data.codes, scale=data.scale, amax=data.amax)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        ctx.call = call
        ctx.has_bias = bias is not None
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        # Codes take the place of the values, unless the weight's gradient is to come from these.
        ctx.save_for_backward(None if call.wgrad_fp8 else x)
        call.tell(Phase.forward, call.x.along_rows, call.weight.along_rows)
        y = call.x.along_rows.values() @ call.weight.along_rows.values().t()
        if bias is not None:
            y += bias.float()
        return y.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,), call = gradients, ctx.call
        (x,) = ctx.saved_tensors
        codes = call.cast(dy.detach(), Role.output_gradient)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            call.tell(Phase.dgrad, codes.along_rows, call.weight.along_columns)
            dx = (codes.along_rows.values() @ call.weight.along_columns.values()).to(dy.dtype).to(ctx.input_dtype)
        if ctx.needs_input_grad[1] and call.wgrad_fp8:
            call.tell(Phase.wgrad, codes.along_columns, call.x.along_columns)
            product = codes.along_columns.values().t() @ call.x.along_columns.values()
            dw = product.to(ctx.weight_dtype)
        elif ctx.needs_input_grad[1]:
            rounded = x.to(dy.dtype)
            call.tell(Phase.wgrad, dy, rounded)
            dw = dy.t() @ rounded
        if call.ends_backward:
            call.cast.end_backward()
        return dx, dw, dy.sum(dim=0) if ctx.has_bias else None, None
