"""Embeddings whose gradients are added to their rows of the weight's main gradient (`weight.main_grad`).

The gradients of a microbatch's tokens in a row are summed in fp32 first, so that a BF16 main gradient is rounded once.
"""

from typing import Any

import torch


def look_up(rows: torch.Tensor, weight: Any, *, is_tied: bool, is_shared: bool) -> torch.Tensor:
    """Rows [b, s] of a weight to embeddings [b, s, h].

    Args:
        rows: Tokens, counted from the first row of the weight.
        weight: [rows, h].
        is_tied: Another layer shares the weight, and returns its gradient to autograd.
        is_shared: Other ranks have other rows; embeddings of those are zeros.
    """
    if is_shared:
        elsewhere = (rows < 0) | (rows >= weight.size(0))
        rows = rows.masked_fill(elsewhere, -1)
    embeddings: torch.Tensor = _Lookup.apply(rows, weight, is_tied, is_shared)  # type: ignore[no-untyped-call]
    return embeddings.masked_fill(elsewhere[..., None], 0.0) if is_shared else embeddings


class _Lookup(torch.autograd.Function):
    """Looks up rows of a weight (for -1 the first one, on several ranks); gradients go to its main gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Any, is_tied: bool, is_shared: bool) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.is_tied = weight, is_tied
        return torch.nn.functional.embedding(rows.clamp(min=0) if is_shared else rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        (given,), (rows,), weight = gradients, ctx.saved_tensors, ctx.weight
        tokens, token_gradients = rows.flatten(), given.flatten(0, 1)
        if token_gradients.is_cuda:
            from gpt_pretrain.kernels.layers_triton import add_rows

            add_rows(weight.main_grad, tokens, token_gradients.contiguous())
        else:
            # The gradients of other ranks' rows are zeros.
            met, places = tokens.clamp(min=0).unique(return_inverse=True)
            sums = weight.main_grad[met].float().index_add_(0, places, token_gradients.float())
            weight.main_grad[met] = sums.to(weight.main_grad.dtype)
        weight.grad_added_to_main_grad = True
        # Data parallelism waits for a gradient of each weight, but does not read this one.
        return None, None if ctx.is_tied else torch.empty_like(weight), None, None
