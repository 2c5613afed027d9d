"""Weight gradients added to the main gradient by the product that computes them, without apex.

Otherwise each microbatch's gradient is written in BF16, read again and added to the fp32 main gradient: a pass of 12
bytes per weight, and a rounding. Transformer Engine's layers do without where `gradient_accumulation_fusion` is set.
megatron-core's own column- and row-parallel layers, the LM head among them, ask apex's module
`fused_weight_gradient_mlp_cuda` for two functions; torch's `addmm`, whose result may be wider than its factors, is the
same product of cuBLAS.
"""

import torch
from megatron.core.tensor_parallel import layers


def accumulate_weight_gradient(
    layer_input: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += output_gradientᵀ · layer_input, in the type of the main gradient.

    Args:
        layer_input: [tokens, in].
        output_gradient: [tokens, out], of the input's type.
        main_grad: [out, in], of that type or fp32.
    """
    transposed = output_gradient.t()
    if main_grad.dtype is layer_input.dtype:
        main_grad.addmm_(transposed, layer_input)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, transposed, layer_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # torch multiplies into a wider type on a GPU alone.
        main_grad.addmm_(transposed.to(main_grad.dtype), layer_input.to(main_grad.dtype))


class _WeightGradients:
    """Stands for apex's module: its two functions, by the type of the main gradient."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


def install_weight_gradients() -> None:
    """Gives megatron-core's layers the two functions, unless apex brought its own. A second call does nothing."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _WeightGradients
        layers._grad_accum_fusion_available = True
