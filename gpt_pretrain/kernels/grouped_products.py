"""The linear layers of many small experts as one operator, for rows that are sorted by expert.

Transformer Engine's grouped layer calls cuBLAS once for each expert and product, about 65 µs of the host's time each,
where the GPU needs 5 for an expert of Qwen3-30B-A3B. Here each of the three products of a layer is one kernel
(`grouped_products_triton`). Weights stay separate parameters, and their gradients are added to their main gradients in
fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpt_pretrain.kernels.grouped_products_triton import (
    Addresses,
    accumulate_weight_gradients,
    multiply,
    multiply_gradients,
    place_rows,
)


class GroupedWeights:
    """Where the weights of one layer and their main gradients are; kept from one pass to the next."""

    def __init__(self) -> None:
        self.weights = Addresses()
        self.main_grads = Addresses()


def multiply_by_experts(
    inputs: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor], places: GroupedWeights
) -> torch.Tensor:
    """Each row times the transposed weight of its expert, [rows, out] in BF16.

    The gradient of a weight is added to its attribute `main_grad` ([out, in] in fp32, contiguous). Autograd gets an
    unwritten tensor in its place where the weight has the attribute `grad_added_to_main_grad`, as data parallelism
    expects of a fused accumulation, and nothing otherwise.

    Args:
        inputs: [rows, in] in BF16, sorted by expert.
        counts: Rows of each expert.
        weights: [out, in] in BF16, contiguous, one of each expert.
        places: Of this layer.
    """
    product: torch.Tensor = _GroupedProducts.apply(inputs, counts, places, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedProducts(torch.autograd.Function):
    # Weights are inputs one by one, because data parallelism waits for the gradient of each.
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, counts: Sequence[int], places: GroupedWeights, *weights: torch.Tensor
    ) -> torch.Tensor:
        inputs = inputs.contiguous()
        rows = place_rows(counts, inputs.device)
        ctx.save_for_backward(inputs)
        # Saved tensors would come back without their attributes.
        ctx.weights, ctx.places, ctx.rows = weights, places, rows
        return multiply(inputs, places.weights.of(weights), rows, len(weights[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,), weights, places, rows = ctx.saved_tensors, ctx.weights, ctx.places, ctx.rows
        gradient = gradient.contiguous()
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = multiply_gradients(gradient, places.weights.of(weights), rows, inputs.shape[1])
        given: list[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[3]:
            main_grads = places.main_grads.of([weight.main_grad for weight in weights])
            accumulate_weight_gradients(gradient, inputs, main_grads, rows)
            given = _stand_ins(weights)
        return input_gradient, None, None, *given


def _stand_ins(weights: Sequence[Any]) -> list[torch.Tensor | None]:
    """What autograd gets for gradients that are in main gradients already."""
    if not hasattr(weights[0], "grad_added_to_main_grad"):
        return [None] * len(weights)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    # One memory for all; of a tensor that is given twice, autograd would make copies.
    unwritten = torch.empty_like(weights[0], requires_grad=False)
    return [unwritten.detach() for _ in weights]
