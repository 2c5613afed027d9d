"""An MLP's activation computed together with its cast to FP8, for Transformer Engine's linear layers.

One kernel computes the activation and casts it, another does so for its gradient. megatron-core writes the activation
in BF16, and Transformer Engine reads it again to write it as FP8 and as transposed FP8; backward, the gradient of the
first projection's output, the widest tensor of a layer, goes the same way. The kernels (`activation_triton`) use the
projections' own quantizers, so scales, amaxes and codes are those of the casts that they replace.

Import this file inside functions: Triton is not installed everywhere.
"""

from typing import Any

import torch

from gpt_pretrain.kernels.activation_triton import launch_activation, launch_gradient
from gpt_pretrain.kernels.fp8_codes_triton import CastInto


def pass_through(mlp: Any, activation: str, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """megatron-core's `MLP.forward`: [s, b, h] to [s, b, h], and the second projection's bias, still to be added.

    Both projections must compute in FP8 (`multiply_in_fp8`); `activation` is one of `launch_activation`'s.
    """
    first, second = mlp.linear_fc1, mlp.linear_fc2
    # Two-dimensional: Transformer Engine drops the transpose of a tensor that it reshapes.
    inputs, bias = first(hidden_states.view(-1, hidden_states.size(-1)))
    # Before its own first pass the second projection has no quantizers.
    second.init_fp8_metadata()
    with_backward = torch.is_grad_enabled()
    activated = _ActivationCast.apply(inputs, bias, mlp, activation, with_backward)  # type: ignore[no-untyped-call]
    output, output_bias = second(activated)
    if with_backward:
        # Backward reads the transpose only.
        activated.update_usage(rowwise_usage=False, columnwise_usage=True)
    return output.view(*hidden_states.shape[:-1], -1), output_bias


def multiply_in_fp8(*layers: Any) -> bool:
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
    def forward(  # noqa: PLR0917  # autograd passes everything by position
        ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, mlp: Any, activation: str, with_backward: bool
    ) -> Any:
        from transformer_engine_torch import FP8BwdTensors, FP8FwdTensors

        rows, columns = inputs.shape
        width = columns // 2 if activation == "swiglu" else columns
        quantizer = mlp.linear_fc2.quantizers["scaling_fwd"][FP8FwdTensors.GEMM1_INPUT]
        activated, into = allocate(quantizer, (rows, width), inputs, columnwise=with_backward)
        launch_activation(activation, inputs, bias, into)
        ctx.save_for_backward(inputs, bias)
        ctx.activation = activation
        ctx.quantizer = mlp.linear_fc1.quantizers["scaling_bwd"][FP8BwdTensors.GRAD_OUTPUT1]
        return activated

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, bias = ctx.saved_tensors
        of_inputs, into = allocate(ctx.quantizer, inputs.shape, inputs)
        of_bias = launch_gradient(ctx.activation, gradients, inputs, bias, into)
        return of_inputs, None if of_bias is None else of_bias.to(bias.dtype), None, None, None
