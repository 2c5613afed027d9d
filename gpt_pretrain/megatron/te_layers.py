"""Transformer Engine's layers with other kernels: they are built, stored and loaded in the same way.

**`CastingMLP`** (`model.activation_cast_fusion`): one kernel computes the activation and casts it to FP8, another does
so for its gradient. megatron-core writes the activation in BF16, and Transformer Engine reads it again to write it as
FP8 and as transposed FP8; backward, the gradient of the first projection's output, the widest tensor of a layer, goes
the same way. The kernels (`kernels.activation_triton`) use the projections' own quantizers, so scales, amaxes and codes
are those of the casts that they replace.

**`OneKernelExperts`** (`model.moe_grouped_kernel=triton`): each product of a layer's experts is one kernel
(`kernels.grouped_products_triton`), always in BF16.

Import this file only where one of them is asked for: Triton is not installed everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP

from gpt_pretrain.kernels.activation_triton import CastInto, launch_activation, launch_gradient
from gpt_pretrain.kernels.grouped_products_triton import GroupedWeights, RowPlaces, multiply_by_experts


class CastingMLP(MLP):  # type: ignore[misc]
    """megatron-core's MLP whose activation is fused with the casts around it if both projections run in FP8."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] to [s, b, h], and the second projection's bias, still to be added."""
        first, second = self.linear_fc1, self.linear_fc2
        if not _multiply_in_fp8(first, second):
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        check_arguments({"per_token_scale": per_token_scale, **kwargs})
        # Two-dimensional: Transformer Engine drops the transpose of a tensor that it reshapes.
        inputs, bias = first(hidden_states.view(-1, hidden_states.size(-1)))
        # Before its own first pass the second projection has no quantizers.
        second.init_fp8_metadata()
        with_backward = torch.is_grad_enabled()
        activated = _ActivationCast.apply(inputs, bias, self, with_backward)  # type: ignore[no-untyped-call]
        output, output_bias = second(activated)
        if with_backward:
            # Backward reads the transpose only.
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output.view(*hidden_states.shape[:-1], -1), output_bias


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Asserts that all are None: the fused activation has no scales of tokens and no mask of experts."""
    given = [name for name, value in arguments.items() if value is not None]
    assert not given, f"the fused activation does not know {given}"


def _multiply_in_fp8(*layers: Any) -> bool:
    """Whether all are Transformer Engine's layers and compute in FP8; `model.fp8_exclude` may prevent that."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    enabled = FP8GlobalStateManager.is_fp8_enabled()
    return all(
        isinstance(layer, TransformerEngineBaseModule) and layer.will_execute_quantized(enabled) for layer in layers
    )


def allocate(
    quantizer: Any, shape: tuple[int, ...], like: torch.Tensor, *, columnwise: bool = True
) -> tuple[Any, CastInto]:
    """An unwritten Transformer Engine tensor [rows, columns] of this quantizer, and where to write it.

    It has the device and the nominal type of `like`. `columnwise` adds the transpose, which weight gradients read.

    Raises:
        TypeError: The quantizer has more than one scale per tensor.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine_torch import DType

    current = isinstance(quantizer, Float8CurrentScalingQuantizer)
    if not current and not isinstance(quantizer, Float8Quantizer):
        raise TypeError(f"the fused cast writes tensors with one scale, and {type(quantizer).__name__} has others")
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    tensor = quantizer.make_empty(shape, dtype=like.dtype, device=like.device)
    dtype = torch.float8_e4m3fn if quantizer.dtype == DType.kFloat8E4M3 else torch.float8_e5m2
    if current:
        assert not quantizer.with_amax_reduction, "this tensor is whole, not a rank's part"
        assert not quantizer.force_pow_2_scales, "the recipe allows any scales"
        quantizer.amax.zero_()
    return tensor, CastInto(
        codes=tensor._data.view(dtype),
        transposed=tensor._transpose.view(dtype) if columnwise else None,
        scale=quantizer.scale,
        inverse_scale=tensor._scale_inv,
        amax=quantizer.amax,
        scale_from_amax=current,
        amax_epsilon=quantizer.amax_epsilon if current else 0.0,
    )


class _ActivationCast(torch.autograd.Function):
    """The activation of [rows, columns] as an FP8 tensor; its input's gradient is one too."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, mlp: CastingMLP, with_backward: bool) -> Any:
        from transformer_engine_torch import FP8BwdTensors, FP8FwdTensors

        rows, columns = inputs.shape
        width = columns // 2 if mlp.config.gated_linear_unit else columns
        quantizer = mlp.linear_fc2.quantizers["scaling_fwd"][FP8FwdTensors.GEMM1_INPUT]
        activated, into = allocate(quantizer, (rows, width), inputs, columnwise=with_backward)
        launch_activation(inputs, bias, into)
        ctx.save_for_backward(inputs, bias)
        ctx.quantizer = mlp.linear_fc1.quantizers["scaling_bwd"][FP8BwdTensors.GRAD_OUTPUT1]
        return activated

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, bias = ctx.saved_tensors
        of_inputs, into = allocate(ctx.quantizer, inputs.shape, inputs)
        of_bias = launch_gradient(gradients, inputs, bias, into)
        return of_inputs, None if of_bias is None else of_bias.to(bias.dtype), None, None


class OneKernelExperts(TEGroupedMLP):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's experts with one kernel for each product; rows are not padded for FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_one_kernel(self)
        if self.config.fp8:
            self.quantization_padding = _NoPadding()
            self.quantization_unpadding = _NothingToRemove()


def use_one_kernel(experts: Any) -> None:
    """Replaces the forward and backward passes of both linear layers that Transformer Engine built."""
    rows = RowPlaces()
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert not linear.use_bias, "experts have no biases"
        linear.kept = GroupedWeights(rows)
        linear.forward = partial(_multiply_by_experts, linear._parameters, linear.kept)


def _multiply_by_experts(
    weights: Mapping[str, torch.Tensor], kept: GroupedWeights, x: torch.Tensor, m_splits: Sequence[int]
) -> tuple[torch.Tensor, None]:
    """[rows, in] sorted by expert to [rows, out], and no bias; weights are in the experts' order."""
    # Asking a module for each by name takes the host longer than the launch.
    return multiply_by_experts(x, m_splits, tuple(weights.values()), kept), None


class _NoPadding(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return rows, counts


class _NothingToRemove(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows


def with_one_kernel(mlp: Any) -> Any:
    """A layer's spec of experts (`get_moe_module_spec_for_backend`) with `OneKernelExperts`."""
    parts = mlp.keywords["submodules"]
    experts = partial(OneKernelExperts, submodules=parts.experts.keywords["submodules"])
    return partial(mlp.func, submodules=replace(parts, experts=experts))


def announce_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Tells data parallelism with overlapped exchanges when these experts' gradients are complete.

    It listens to autograd, which does not see their weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, OneKernelExperts):
                for linear in (module.linear_fc1, module.linear_fc2):
                    linear.kept.gradients_added = partial(_register, chunk)


def _register(chunk: Any, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)
