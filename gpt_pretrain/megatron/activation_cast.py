"""An MLP on Transformer Engine's layers whose activation is computed and cast to FP8 in one kernel, its gradient too.

megatron-core writes the activation in BF16, and Transformer Engine reads it again to write it as FP8 and as transposed
FP8; on the way back the gradient of the first projection's output, the widest tensor of a layer, goes the same way. All
of it is bound by memory. Here Triton kernels (`activation_triton`) do each of the two at once, with the scales and
amaxes of the casts that they stand for: the quantizers are the projections' own, and the codes are what they would be.
"""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from gpt_pretrain.kernels.cast_into import CastInto


class CastingMLP(MLP):  # type: ignore[misc]
    """megatron-core's MLP, its activation fused with the casts around it wherever both projections multiply in FP8."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] to [s, b, h], and the bias of the second projection, which is not added yet."""
        first, second = self.linear_fc1, self.linear_fc2
        if not _multiply_in_fp8(first, second):
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        # megatron-core's layer names a mask for experts, which is None where there are none.
        given = [name for name, value in kwargs.items() if value is not None]
        assert per_token_scale is None, "the fused activation has no scale of a token"
        assert not given, f"the fused activation knows nothing of {given}"
        # In two dimensions: Transformer Engine drops the transpose of a tensor that it reshapes.
        inputs, bias = first(hidden_states.view(-1, hidden_states.size(-1)))
        # Before its own first pass the second projection has no quantizers.
        second.init_fp8_metadata()
        with_backward = torch.is_grad_enabled()
        activated = _ActivationCast.apply(inputs, bias, self, with_backward)  # type: ignore[no-untyped-call]
        output, output_bias = second(activated)
        if with_backward:
            # The backward pass reads the transpose alone.
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output.view(*hidden_states.shape[:-1], -1), output_bias


def _multiply_in_fp8(*layers: Any) -> bool:
    """Whether all of these layers are Transformer Engine's and compute in FP8: not where `model.fp8_exclude` names one.

    Layers that should be its and are not are the proof's to tell of (`gpt_pretrain.fp8`), after the first step.
    """
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    enabled = FP8GlobalStateManager.is_fp8_enabled()
    return all(
        isinstance(layer, TransformerEngineBaseModule) and layer.will_execute_quantized(enabled) for layer in layers
    )


def _input_quantizer(layer: Any) -> Any:
    from transformer_engine_torch import FP8FwdTensors

    return layer.quantizers["scaling_fwd"][FP8FwdTensors.GEMM1_INPUT]


def _gradient_quantizer(layer: Any) -> Any:
    from transformer_engine_torch import FP8BwdTensors

    return layer.quantizers["scaling_bwd"][FP8BwdTensors.GRAD_OUTPUT1]


def allocate(
    quantizer: Any, shape: tuple[int, ...], like: torch.Tensor, *, columnwise: bool = True
) -> tuple[Any, CastInto]:
    """A Transformer Engine tensor of this quantizer, not yet written, and where to write it.

    Args:
        quantizer: Of delayed scaling (Float8Quantizer) or of tensorwise (Float8CurrentScalingQuantizer).
        shape: Of the tensor, [rows, columns].
        like: Has its device, and the type that it stands for.
        columnwise: Also as the transpose, which weight gradients read.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    tensor = quantizer.make_empty(shape, dtype=like.dtype, device=like.device)
    dtype = torch.float8_e4m3fn if quantizer.dtype == DType.kFloat8E4M3 else torch.float8_e5m2
    current = isinstance(quantizer, Float8CurrentScalingQuantizer)
    if current:
        assert not quantizer.with_amax_reduction, "this tensor is no rank's part of a larger one"
        assert not quantizer.force_pow_2_scales, "refused where the recipe is chosen"
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
    """The activation of [rows, columns] as an FP8 tensor; the gradient of its input is one, too."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, mlp: CastingMLP, with_backward: bool) -> Any:
        from gpt_pretrain.kernels.activation_triton import launch_activation

        rows, columns = inputs.shape
        width = columns // 2 if mlp.config.gated_linear_unit else columns
        quantizer = _input_quantizer(mlp.linear_fc2)
        activated, into = allocate(quantizer, (rows, width), inputs, columnwise=with_backward)
        launch_activation(inputs, bias, into)
        ctx.save_for_backward(inputs, bias)
        ctx.quantizer = _gradient_quantizer(mlp.linear_fc1)
        return activated

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from gpt_pretrain.kernels.activation_triton import launch_gradient

        inputs, bias = ctx.saved_tensors
        of_inputs, into = allocate(ctx.quantizer, inputs.shape, inputs)
        of_bias = launch_gradient(gradients, inputs, bias, into)
        return of_inputs, None if of_bias is None else of_bias.to(bias.dtype), None, None
