"""Transformer Engine's layers with other kernels in their place: built, stored and loaded in the same way.

**`CastingMLP`** (`model.activation_cast_fusion`): the activation is computed and cast to FP8 in one kernel, and so is
its gradient. megatron-core writes the activation in BF16, and Transformer Engine reads it again to write it as FP8 and
as transposed FP8. On the way back the gradient of the first projection's output, the widest tensor of a layer, goes the
same way. The kernels (`kernels.activation_triton`) use the scales and amaxes of the casts that they replace: the
quantizers are the projections' own, and so are the codes.

**`OneKernelExperts`** (`model.moe_grouped_kernel=triton`): each product of a layer's experts is one kernel
(`kernels.grouped_products_triton`), in BF16 whatever the precision of other layers.

**`FlashAttention`** (`model.use_flash_attention`): FlashAttention-4 computes attention in place of cuDNN. For Llama 3's
heads on an H200 its kernels take 94% of the time of cuDNN 9.19's forward and 89% backward
(benchmarks/flash_attention_h200.md). It comes as the package flash-attn-4, is written in CuTe's Python and compiled at
its first call, which takes some seconds per shape of heads (https://github.com/Dao-AILab/flash-attention).

Import this file only where one of them is asked for: Triton is not installed everywhere.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, override

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch.autograd.function import once_differentiable

from gpt_pretrain.kernels.activation_triton import CastInto, launch_activation, launch_gradient
from gpt_pretrain.kernels.grouped_products_triton import GroupedWeights, RowPlaces, multiply_by_experts


class CastingMLP(MLP):  # type: ignore[misc]
    """megatron-core's MLP with its activation fused with the casts around it, where both projections run in FP8."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] to [s, b, h], and the bias of the second projection, which is yet to be added."""
        first, second = self.linear_fc1, self.linear_fc2
        if not _multiply_in_fp8(first, second):
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        check_arguments({"per_token_scale": per_token_scale, **kwargs})
        # Two-dimensional, because Transformer Engine drops the transpose of a tensor that it reshapes.
        inputs, bias = first(hidden_states.view(-1, hidden_states.size(-1)))
        # Before its own first pass the second projection has no quantizers.
        second.init_fp8_metadata()
        with_backward = torch.is_grad_enabled()
        activated = _ActivationCast.apply(inputs, bias, self, with_backward)  # type: ignore[no-untyped-call]
        output, output_bias = second(activated)
        if with_backward:
            # The backward pass reads the transpose only.
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output.view(*hidden_states.shape[:-1], -1), output_bias


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Asserts that all are None: the fused activation has no scales of tokens and no mask of experts."""
    given = [name for name, value in arguments.items() if value is not None]
    assert not given, f"the fused activation does not know {given}"


def _multiply_in_fp8(*layers: Any) -> bool:
    """Whether all of these are Transformer Engine's layers and compute in FP8, which `model.fp8_exclude` can prevent.

    After the first step the proof (`gpt_pretrain.fp8`) reports layers that should be Transformer Engine's and are not.
    """
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

    `like` has the device, and the type that the codes stand for. `columnwise` adds the transpose, which weight
    gradients read.

    Raises:
        TypeError: The quantizer is neither of delayed scaling (Float8Quantizer) nor of tensorwise
            (Float8CurrentScalingQuantizer).
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
        assert not quantizer.with_amax_reduction, "this tensor is whole, not one rank's part"
        assert not quantizer.force_pow_2_scales, "the recipe asks for any scales"
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
    """The activation of [rows, columns] as an FP8 tensor; the gradient of its input is an FP8 tensor, too."""

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
    """megatron-core's experts, whose linear layers leave their products to one kernel each.

    Rows are not padded for FP8 where the rest of the model runs in it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_one_kernel(self)
        if self.config.fp8:
            self.quantization_padding = _NoPadding()
            self.quantization_unpadding = _NothingToRemove()


def use_one_kernel(experts: Any) -> None:
    """Replaces the forward passes of both linear layers, which Transformer Engine has built, and the gradients'."""
    rows = RowPlaces()
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert not linear.use_bias, "experts have no biases"
        linear.kept = GroupedWeights(rows)
        linear.forward = partial(_multiply_by_experts, linear._parameters, linear.kept)


def _multiply_by_experts(
    weights: Mapping[str, torch.Tensor], kept: GroupedWeights, x: torch.Tensor, m_splits: Sequence[int]
) -> tuple[torch.Tensor, None]:
    """[rows, in] sorted by expert to [rows, out], and no bias; weights are in the order of the experts."""
    # To ask a module for each by its name takes the host longer than the launch.
    return multiply_by_experts(x, m_splits, tuple(weights.values()), kept), None


class _NoPadding(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return rows, counts


class _NothingToRemove(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows


def with_one_kernel(mlp: Any) -> Any:
    """The spec of a layer's experts (`get_moe_module_spec_for_backend`) with these in their place."""
    parts = mlp.keywords["submodules"]
    experts = partial(OneKernelExperts, submodules=parts.experts.keywords["submodules"])
    return partial(mlp.func, submodules=replace(parts, experts=experts))


def announce_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Tells data parallelism that exchanges gradients behind the backward pass when those of these experts are there.

    It listens to autograd, which does not see these weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, OneKernelExperts):
                for linear in (module.linear_fc1, module.linear_fc2):
                    linear.kept.gradients_added = partial(_register, chunk)


def _register(chunk: Any, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)


def _one_sequence(each: torch.Tensor) -> torch.Tensor:
    """[s, b, heads, width] → [1, s, b · heads, width]: sequences side by side as heads of one."""
    return each.reshape(1, each.size(0), -1, each.size(-1))


def _are_parts_of_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three lie side by side head by head, as a projection with as many groups as heads leaves them."""
    width = query.size(-1)
    return query.stride(2) == 3 * width and all(
        part.shape == query.shape
        and part.stride() == query.stride()
        and part.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
        and part.storage_offset() == query.storage_offset() + place * width
        for place, part in enumerate((query, key, value))
    )


class _CausalAttention(torch.autograd.Function):
    """The package's kernels; where the inputs were parts of one tensor, so are their gradients.

    Transformer Engine's split of the projection takes such gradients as they are and copies others together. The
    package's own autograd function makes a tensor for each.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        inputs = (_one_sequence(each) for each in (query, key, value))
        out, log_sum_exp, *_ = _flash_attn_fwd(*inputs, softmax_scale=scale, causal=True, return_lse=True)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.scale = scale
        # Transformer Engine's attention asks both, too, and `trainer.deterministic` sets both.
        ctx.in_order = (
            torch.are_deterministic_algorithms_enabled() or os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        )
        return out.view(*query.shape[:2], -1)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        *inputs, out, log_sum_exp = ctx.saved_tensors
        if _are_parts_of_one(*inputs):
            *outer, width = inputs[0].shape
            gradients = inputs[0].new_empty(*outer, 3 * width).split(width, dim=-1)
        else:
            gradients = tuple(each.new_empty(each.shape) for each in inputs)
        into = dict(zip(("dq", "dk", "dv"), map(_one_sequence, gradients), strict=True))
        _flash_attn_bwd(
            *map(_one_sequence, inputs),
            out,
            gradient.reshape(out.shape),
            log_sum_exp,
            softmax_scale=ctx.scale,
            causal=True,
            deterministic=ctx.in_order,
            **into,
        )
        return *gradients, None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention: each token attends to itself and those before it.

    Queries are [s, b, heads, width], keys and values [s, b, groups, width], in BF16 or FP16; the result is
    [s, b, heads · width]. `scale` multiplies the scores; None: 1/√width.

    megatron-core lays the sequences of a batch side by side, FlashAttention one after the other. Here they become
    batch · heads heads of one sequence: head i reads keys and values of head i // (heads / groups), so that each head
    reads those of its own sequence. Nothing is copied that is contiguous, as `split_and_rotate` leaves it, nor are the
    parts of one projection with as many groups as heads, whose gradients are parts of one tensor, too. Gradients of
    queries, and of keys and values that several heads read, are summed in a fixed order where deterministic algorithms
    are on, and otherwise in the order in which they are ready.
    """
    if not _are_parts_of_one(query, key, value):
        # Queries were rotated out of the projection; a view of it would keep all of it alive for the values.
        value = value.contiguous()
    return _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-any-return, no-untyped-call]


class FlashAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention with other products: it is built, stored and loaded in the same way."""

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """See `causal_attention`; the arguments are those of megatron-core's `TEDotProductAttention`."""
        assert attn_mask_type is AttnMaskType.causal, "FlashAttention computes causal masks only here"
        assert attention_bias is None, "biases are not added"
        assert packed_seq_params is None, "sequences have one length"
        return causal_attention(query, key, value, self.config.softmax_scale)
