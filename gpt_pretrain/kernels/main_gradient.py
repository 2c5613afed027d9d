"""Gradients added to an fp32 main gradient by the operation that computes them.

Otherwise each microbatch's gradient is written in BF16, read again and added to the main gradient: 12 bytes moved per
weight, and one more rounding. Of an embedding's gradient most rows are zeros, too.
"""

import torch


def accumulate_weight_gradient(
    layer_input: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += output_gradientᵀ · layer_input, in the type of the main gradient.

    torch's `addmm`, whose result may be wider than its factors, is the product of cuBLAS that apex's
    `fused_weight_gradient_mlp_cuda` computes.

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
        # torch multiplies into a wider type on a GPU only.
        main_grad.addmm_(transposed.to(main_grad.dtype), layer_input.to(main_grad.dtype))


def accumulate_rows(main_grad: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor) -> None:
    """Adds the gradient of each token to its row of an embedding's main gradient.

    Args:
        main_grad: [vocab, h] in fp32, contiguous.
        rows: The row of each token, int64 [tokens]; -1 where another rank has it.
        gradients: [tokens, h]; zeros where another rank has the row.
    """
    if gradients.is_cuda:
        from gpt_pretrain.kernels.embedding_triton import add_rows

        add_rows(main_grad, rows, gradients.contiguous())
    else:
        main_grad.index_add_(0, rows.clamp(min=0), gradients.float())
