"""The three products of a linear layer in FP8: one autograd function for all engines that cast and multiply.

    forward  y  = x·wᵀ + b     over codes of x and w
    dgrad    dx = dy·w         over codes of dy and w
    wgrad    dw = dyᵀ·x        over codes of dy and x; over the values themselves if settings keep it out of FP8

Emulated products are summed in fp32 and rounded once, to the run's precision. The bias is added before that rounding as
in Transformer Engine (TE), or after it as in TorchAO. Its gradient comes from the values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpt_pretrain.fp8.casts import Cast, Directions, Quantized
from gpt_pretrain.fp8.delayed import LayerScaling
from gpt_pretrain.fp8.gemms import (
    BF16_ROUNDING,
    OPERANDS,
    Fp8Operand,
    Operand,
    Phase,
    Product,
    ProductListener,
    Role,
    Sums,
    multiply,
    role_format,
)
from gpt_pretrain.megatron.stored_weights import StoredWeight
from gpt_pretrain.run.fp8 import Fp8Settings

# An engine's product of operands in the order of `gemms.OPERANDS`, in the given type, plus a bias [columns] or None.
type Multiply = Callable[[Phase, Quantized, Quantized, torch.dtype, torch.Tensor | None], torch.Tensor]


class LinearProducts:
    """What the products of one layer share: the cast of its tensors, and the codes of its weight.

    A weight that is not stored in FP8 is cast once a step, in the first microbatch (TE's `get_weight_workspace`, driven
    by megatron-core's `set_is_first_microbatch`).
    """

    def __init__(self, settings: Fp8Settings, cast: Cast, multiply: Multiply | None = None) -> None:
        self.largest_amax = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
        """fp32 [1]: raised to the amax of each cast, until somebody resets it."""
        self.settings = settings
        self.multiply = multiply or self._multiply_values
        self._rule = cast
        self._weight: Directions | None = None

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_first_microbatch: bool,
        accumulates: bool = False,
        listeners: Sequence[ProductListener] = (),
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: [..., in], the whole sequence; in the weight's type, or fp32 if the module before does not round.
            weight: [out, in]; the output is of its type.
            bias: [out].
            is_first_microbatch: The weight has changed.
            accumulates: The backward pass adds the weight's gradient to `weight.main_grad`.
            listeners: Told about the products; they may change until the backward pass.
        """
        rows = x.reshape(-1, x.shape[-1])
        rule = self._rule
        input_codes = self.cast(rows.detach(), Role.input)
        if is_first_microbatch or self._weight is None:
            self._weight = self._weight_codes(weight)
        call = _Call(
            products=self,
            weight=self._weight,
            # The backward pass needs only the codes; listeners check them against the values.
            x_values=rows.detach() if listeners else None,
            weight_values=None if isinstance(weight, StoredWeight) else weight.detach(),
            accumulates_in=weight if accumulates else None,
            end_backward=rule.end_backward if isinstance(rule, LayerScaling) and rule.ends_backward else None,
            listeners=listeners,
        )
        y: torch.Tensor = _Linear.apply(rows, weight, bias, (call, input_codes))  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)

    def cast(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix by the layer's rule and notes its amax."""
        return self._noted(self._rule(x, role))

    def _multiply_values(
        self, phase: Phase, first: Quantized, second: Quantized, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of what the codes stand for, in fp32."""
        y = multiply(phase, first.values(), second.values())
        if bias is None:
            return y.to(dtype)
        return y.to(dtype) + bias if self.settings.recipe.numerics.adds_bias_rounded else (y + bias.float()).to(dtype)

    def _weight_codes(self, weight: torch.Tensor) -> Directions:
        if not isinstance(weight, StoredWeight):
            return self.cast(weight.detach(), Role.weight)
        along_rows = Quantized(
            format=role_format(self.settings, Role.weight),
            codes=weight.codes.view(torch.float8_e4m3fn),
            scale=weight.scale,
            amax=weight.largest,
            block=None,
        )
        along_columns = along_rows
        if weight.is_cuda:
            # Hopper's products sum along contiguous memory.
            along_columns = replace(along_rows, codes=along_rows.codes.t().contiguous().t())
        return self._noted(Directions(along_rows, along_columns))

    def _noted(self, directions: Directions) -> Directions:
        torch.maximum(self.largest_amax, directions.along_rows.amax, out=self.largest_amax)
        return directions


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One forward pass of a layer and its backward pass."""

    products: LinearProducts
    weight: Directions
    x_values: torch.Tensor | None
    """[tokens, in]; None without listeners."""
    weight_values: torch.Tensor | None
    """[out, in]; None if the weight is stored in FP8."""
    accumulates_in: Any
    """The weight, if its `main_grad` takes its gradient; None if autograd does."""
    end_backward: Callable[[], None] | None
    listeners: Sequence[ProductListener]

    def tell(
        self,
        phase: Phase,
        output: torch.Tensor,
        *operands: Quantized | torch.Tensor,
        dy: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Reports a product that has been computed."""
        settings = self.products.settings
        values = {Role.input: self.x_values, Role.weight: self.weight_values, Role.output_gradient: dy}
        for listener in self.listeners:
            first, second = (
                _operand(role, data, values[role]) for role, data in zip(OPERANDS[phase], operands, strict=True)
            )
            # TorchAO splits some recipes' sums, in some phases.
            sums = Sums.fp32 if settings.emulate else Sums.unsplit
            # The product was rounded before the bias was added, too.
            error = BF16_ROUNDING * (1 + (bias is not None and settings.recipe.numerics.adds_bias_rounded))
            listener(
                Product(phase=phase, operands=(first, second), output=output, added=bias, sums=sums, result_error=error)
            )


def _operand(role: Role, data: Quantized | torch.Tensor, values: torch.Tensor | None) -> Operand:
    if isinstance(data, torch.Tensor):
        format = str(data.dtype).removeprefix("torch.")
        return Operand(role=role, format=format, values=data)
    return Fp8Operand(role=role, format=data.format, codes=data.codes, scale=data.scale, amax=data.amax, values=values)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call_and_codes: tuple[_Call, Directions],
    ) -> torch.Tensor:
        call, codes = call_and_codes
        ctx.call, ctx.codes = call, codes.along_columns
        ctx.has_bias = bias is not None
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        # Codes replace the values, unless the weight's gradient comes from the values.
        ctx.save_for_backward(None if call.products.settings.wgrad else x)
        y = call.products.multiply(Phase.forward, codes.along_rows, call.weight.along_rows, weight.dtype, bias)
        call.tell(Phase.forward, y, codes.along_rows, call.weight.along_rows, bias=bias)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,), call = gradients, ctx.call
        (x,) = ctx.saved_tensors
        codes = call.products.cast(dy.detach(), Role.output_gradient)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = call.products.multiply(Phase.dgrad, codes.along_rows, call.weight.along_columns, dy.dtype, None)
            call.tell(Phase.dgrad, dx, codes.along_rows, call.weight.along_columns, dy=dy)
            dx = dx.to(ctx.input_dtype)
        if ctx.needs_input_grad[1] and call.products.settings.wgrad:
            dw = call.products.multiply(Phase.wgrad, codes.along_columns, ctx.codes, ctx.weight_dtype, None)
            call.tell(Phase.wgrad, dw, codes.along_columns, ctx.codes, dy=dy)
        elif ctx.needs_input_grad[1]:
            rounded = x.to(dy.dtype)
            dw = dy.t() @ rounded
            call.tell(Phase.wgrad, dw, dy, rounded)
        if dw is not None and (accumulates_in := call.accumulates_in) is not None:
            if getattr(accumulates_in, "overwrite_main_grad", False):
                accumulates_in.main_grad.copy_(dw)
            else:
                accumulates_in.main_grad.add_(dw)
            # Data parallelism waits for some gradient of each weight, and does not read this one.
            accumulates_in.grad_added_to_main_grad = True
        if call.end_backward is not None:
            call.end_backward()
        return dx, dw, dy.sum(dim=0) if ctx.has_bias else None, None
