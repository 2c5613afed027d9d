"""Emulated FP8 in megatron-core's local layers: what `model.fp8_emulate` builds the model from.

The column- and row-parallel layers keep megatron-core's weights, communication and checkpoint keys. Only their three
products are ours:

    forward  y  = x·wᵀ + b     over codes of x and w
    dgrad    dx = dy·w         over codes of dy and w
    wgrad    dw = dyᵀ·x        over codes of dy and x; of the values themselves with `model.fp8_wgrad=false`

Products of codes are summed in fp32 and rounded once, to the run's precision. The bias is added before that rounding,
and its gradient comes from the values, as in Transformer Engine (TE); TorchAO adds it to the rounded product.

Where ranks split the sequence, the input is gathered before it is cast; megatron-core gathers the gradient of a
row-parallel output likewise. TE casts first and gathers codes, with an amax that it has reduced over these ranks, or
with blocks that end where the parts do: the same codes for fewer bytes.

Attention, embeddings and the LM head stay as they are. With delayed scaling TE computes the norm before a
column-parallel layer and its cast in one kernel, which takes amax and codes from values that were never rounded to BF16
(TE 2.12, pytorch/csrc/extensions/normalization.cpp); such a norm passes on fp32 here. The other recipes cast what was
rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.fp8.emulation.casts import Cast, Directions, Quantised, stateless_cast
from gpt_pretrain.fp8.emulation.delayed import DelayedScaling, LayerScaling, Scaling
from gpt_pretrain.fp8.gemms import OPERANDS, Operand, Phase, Product, ProductListener, Role
from gpt_pretrain.megatron.layers import LocalLayers, TorchNorm
from gpt_pretrain.spec.recipes import Fp8Settings
from gpt_pretrain.spec.run_spec import RunSpec


class LinearProducts:
    """What the products of one layer share: how its tensors are cast, and the codes of its weight.

    The weight is cast in the first microbatch of a step, and its codes serve the others, so that with delayed scaling a
    step has one scale for it (TE's `get_weight_workspace`, driven by megatron-core's `set_is_first_microbatch`).
    """

    def __init__(self, settings: Fp8Settings, cast: Cast) -> None:
        self.largest_amax = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
        """fp32 [1]: raised to the amax of each cast, until somebody sets it back."""
        self._rule = cast
        self._settings = settings
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
            x: [..., in], gathered where ranks split the sequence; in the weight's type, or fp32 where the module before
                it does not round.
            weight: [out, in]; the output is of its type.
            bias: [out], added to the product.
            is_first_microbatch: The weight has changed.
            listener: Returns who is told about the products; called at the time of each.
        """
        rows = x.reshape(-1, x.shape[-1])
        rule = self._rule
        input_codes = self._cast(rows.detach(), Role.input)
        if is_first_microbatch or self._weight is None:
            self._weight = self._cast(weight.detach(), Role.weight)
        call = _Call(
            cast=self._cast,
            wgrad_fp8=self._settings.wgrad,
            adds_bias_rounded=self._settings.recipe.adds_bias_rounded,
            x=input_codes,
            weight=self._weight,
            # The codes are all that the backward pass needs; those who check them need the values.
            x_values=None if listener() is None else rows.detach(),
            weight_values=weight.detach(),
            end_backward=rule.end_backward if isinstance(rule, LayerScaling) and rule.ends_backward else None,
            listener=listener,
        )
        y: torch.Tensor = _Linear.apply(rows, weight, bias, call)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)

    def _cast(self, x: torch.Tensor, role: Role) -> Directions:
        directions = self._rule(x, role)
        torch.maximum(self.largest_amax, directions.along_rows.amax, out=self.largest_amax)
        return directions


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One forward pass of a layer; keeps its codes until the backward pass has read them."""

    cast: Cast
    wgrad_fp8: bool
    adds_bias_rounded: bool
    x: Directions
    weight: Directions
    x_values: torch.Tensor | None
    """[tokens, in]; None where nobody is told about the products."""
    weight_values: torch.Tensor
    """[out, in]"""
    end_backward: Callable[[], None] | None
    listener: Callable[[], ProductListener | None]

    def tell(
        self,
        phase: Phase,
        output: torch.Tensor,
        *operands: Quantised | torch.Tensor,
        dy: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Reports a product that has been computed."""
        listener = self.listener()
        if listener is not None:
            values = {Role.input: self.x_values, Role.weight: self.weight_values, Role.output_gradient: dy}
            first, second = (
                _operand(role, data, values[role]) for role, data in zip(OPERANDS[phase], operands, strict=True)
            )
            # Each of two roundings is to BF16 at worst.
            error = 4e-3 if bias is not None and self.adds_bias_rounded else 2e-3
            listener(Product(phase=phase, operands=(first, second), output=output, added=bias, result_error=error))


def _operand(role: Role, data: Quantised | torch.Tensor, values: torch.Tensor | None) -> Operand:
    if isinstance(data, torch.Tensor):
        format = str(data.dtype).removeprefix("torch.")
        return Operand(role=role, format=format, codes=None, scale=None, amax=None, values=data)
    return Operand(role=role, format=data.format, codes=data.codes, scale=data.scale, amax=data.amax, values=values)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        ctx.call = call
        ctx.has_bias = bias is not None
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        # The codes replace the values, unless the weight's gradient comes from the values.
        ctx.save_for_backward(None if call.wgrad_fp8 else x)
        y = call.x.along_rows.values() @ call.weight.along_rows.values().t()
        if bias is not None and not call.adds_bias_rounded:
            y += bias.float()
        y = y.to(weight.dtype)
        if bias is not None and call.adds_bias_rounded:
            y += bias
        call.tell(Phase.forward, y, call.x.along_rows, call.weight.along_rows, bias=bias)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,), call = gradients, ctx.call
        (x,) = ctx.saved_tensors
        codes = call.cast(dy.detach(), Role.output_gradient)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (codes.along_rows.values() @ call.weight.along_columns.values()).to(dy.dtype)
            call.tell(Phase.dgrad, dx, codes.along_rows, call.weight.along_columns, dy=dy)
            dx = dx.to(ctx.input_dtype)
        if ctx.needs_input_grad[1] and call.wgrad_fp8:
            product = codes.along_columns.values().t() @ call.x.along_columns.values()
            dw = product.to(ctx.weight_dtype)
            call.tell(Phase.wgrad, dw, codes.along_columns, call.x.along_columns, dy=dy)
        elif ctx.needs_input_grad[1]:
            rounded = x.to(dy.dtype)
            dw = dy.t() @ rounded
            call.tell(Phase.wgrad, dw, dy, rounded)
        if call.end_backward is not None:
            call.end_backward()
        return dx, dw, dy.sum(dim=0) if ctx.has_bias else None, None


class _EmulatedLinear(torch.nn.Module):
    """What emulated column- and row-parallel layers have in common, before megatron-core's class in the bases."""

    def __init__(self, *args: Any, settings: Fp8Settings, cast: Cast, name: str, **kwargs: Any) -> None:
        super().__init__(*args, name=name, **kwargs)
        self.product_listener: ProductListener | None = None
        self.is_first_microbatch = True
        """Set by megatron-core's schedules: the weight has changed."""
        self._scaling = cast if isinstance(cast, LayerScaling) else None
        self._products = LinearProducts(settings, cast)

    @property
    def largest_amax(self) -> torch.Tensor:
        """fp32 [1]: the largest amax of the casts since it was set back (`fp8.infinities.StepCasts`)."""
        return self._products.largest_amax

    @property
    def fp8_meta(self) -> dict[str, Scaling]:
        """The state of delayed scaling under the names of Transformer Engine's layers; empty for other recipes."""
        scaling = self._scaling
        return {} if scaling is None else {"scaling_fwd": scaling.forward, "scaling_bwd": scaling.backward}

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """x·wᵀ + b in the weight's type; the other arguments belong to fusions that the rules refuse."""
        if sequence_parallel:
            # Its backward sums the gradients over the ranks and scatters them.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return self._products(input, weight, bias, is_first_microbatch=is_first, listener=lambda: self.product_listener)

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Scales and amax histories; None for recipes without."""
        return None if self._scaling is None else self._scaling.state()

    def set_extra_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Restores them; a checkpoint without them leaves the initial ones."""
        if self._scaling is not None and state is not None:
            self._scaling.load(state)


class _LayerNorm(torch.nn.LayerNorm):
    """torch's norm, or one whose result stays in fp32."""

    is_rounded = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        if self.is_rounded:
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias.float()
        return torch.nn.functional.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


class _RMSNorm(torch.nn.RMSNorm):
    """torch's norm, or one whose result stays in fp32."""

    is_rounded = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        if self.is_rounded:
            return super().forward(input)
        weight = self.weight.float()
        return torch.nn.functional.rms_norm(input.float(), self.normalized_shape, weight, self.eps)


class _Norm(TorchNorm):
    """The norms of emulated layers."""

    layer_norm = _LayerNorm
    rms_norm = _RMSNorm


class EmulatedColumnParallelLinear(_EmulatedLinear, ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are split over the tensor parallel ranks."""


class EmulatedRowParallelLinear(_EmulatedLinear, RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are split over the tensor parallel ranks."""


class EmulatedLayers(LocalLayers):
    """megatron-core's local layers, with emulated products in the linear layers that the plan puts in FP8.

    Args:
        settings: The FP8 of the run.
        modules: Names, in the whole model, of the layers in FP8; the others are megatron-core's own.
    """

    def __init__(self, settings: Fp8Settings, modules: frozenset[str]) -> None:
        super().__init__(apex_layer_norm=False)
        self._settings = settings
        self._modules = modules
        self._scaling: DelayedScaling | None = None
        if settings.recipe.keeps_history:
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            self._scaling = DelayedScaling(settings, group)

    def column_parallel_linear(self) -> Any:
        """What builds column-parallel layers."""
        return partial(self._build, ColumnParallelLinear, EmulatedColumnParallelLinear)

    def row_parallel_linear(self) -> Any:
        """What builds row-parallel layers."""
        return partial(self._build, RowParallelLinear, EmulatedRowParallelLinear)

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm's class."""
        return _Norm

    def attach(self, chunk: MegatronModule) -> None:
        """Follows the passes of a model chunk built from these layers."""
        if self._scaling is None:
            return
        self._scaling.attach(chunk.decoder)
        for layer in chunk.decoder.layers:
            for norm, linear in (
                (layer.input_layernorm, layer.self_attention.linear_qkv),
                (layer.pre_mlp_layernorm, layer.mlp.linear_fc1),
            ):
                norm.is_rounded = not isinstance(linear, EmulatedColumnParallelLinear)

    def _build(
        self, plain: type[torch.nn.Module], emulated: type[_EmulatedLinear], *args: Any, name: str, **kwargs: Any
    ) -> torch.nn.Module:
        if name not in self._modules:
            return plain(*args, name=name, **kwargs)
        cast = stateless_cast(self._settings) if self._scaling is None else self._scaling.new_layer()
        return emulated(*args, settings=self._settings, cast=cast, name=name, **kwargs)


def emulated_layers(spec: RunSpec) -> EmulatedLayers | None:
    """The layers of a run with `model.fp8_emulate`; None for other runs.

    Process groups must be open (`megatron.parallel.process_groups`).
    """
    if spec.fp8 is None or not spec.fp8.emulate:
        return None
    return EmulatedLayers(spec.fp8, frozenset(linear.module for linear in spec.linears if linear.precision == "fp8"))
