"""Causal attention on megatron-core's layout by the kernels of FlashAttention-4, the package flash-attn-4."""

import os
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def _one_sequence(each: torch.Tensor) -> torch.Tensor:
    """[s, b, heads, width] → [1, s, b · heads, width]: sequences become heads of one."""
    return each.reshape(1, each.size(0), -1, each.size(-1))


def _packed(each: torch.Tensor) -> torch.Tensor:
    """[s, 1, heads, width] → [s, heads, width]: documents one after the other."""
    return each.squeeze(1)


def _are_parts_of_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three alternate head by head in one tensor, as in a projection with as many groups as heads."""
    width = query.size(-1)
    return query.stride(2) == 3 * width and all(
        part.shape == query.shape
        and part.stride() == query.stride()
        and part.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
        and part.storage_offset() == query.storage_offset() + place * width
        for place, part in enumerate((query, key, value))
    )


class _CausalAttention(torch.autograd.Function):
    """The package's kernels; if the inputs are parts of one tensor, so are their gradients.

    Transformer Engine's split of the projection copies other gradients together, and the package's own autograd
    function makes a tensor for each.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        # Options of both kernels. Only packed documents have borders.
        ctx.options, ctx.as_taken = options, _packed if "cu_seqlens_q" in options else _one_sequence
        inputs = (ctx.as_taken(each) for each in (query, key, value))
        out, log_sum_exp, *_ = _flash_attn_fwd(*inputs, causal=True, return_lse=True, **options)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        # Like Transformer Engine's attention; `trainer.deterministic` sets both.
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
        into = dict(zip(("dq", "dk", "dv"), map(ctx.as_taken, gradients), strict=True))
        _flash_attn_bwd(
            *map(ctx.as_taken, inputs),
            out,
            gradient.reshape(out.shape),
            log_sum_exp,
            causal=True,
            deterministic=ctx.in_order,
            **into,
            **ctx.options,
        )
        return *gradients, None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention; `scale` multiplies the scores, None: 1/√width.

    Queries are [s, b, heads, width], keys and values [s, b, groups, width], in BF16 or FP16; the result is
    [s, b, heads · width].

    megatron-core interleaves a batch's sequences, FlashAttention wants one after the other. Here they become batch ·
    heads heads of one sequence: head i reads keys and values of head i // (heads / groups), those of its own sequence.
    Contiguous tensors, as `split_and_rotate` leaves them, are not copied, nor are the parts of one projection with as
    many groups as heads. Gradients that are sums (of queries, and of keys and values that several heads read) are
    summed in a fixed order if deterministic algorithms are on.
    """
    if not _are_parts_of_one(query, key, value):
        # Queries were rotated out of the projection; values that are a view would keep all of it alive.
        value = value.contiguous()
    options = {"softmax_scale": scale}
    return _CausalAttention.apply(query, key, value, options)  # type: ignore[no-any-return, no-untyped-call]


def attention_in_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    borders: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """`causal_attention` inside each document of one sequence, [s, 1, heads or groups, width].

    Documents reach from one of `borders`, int32 [documents + 1], to the next, over at most `longest` tokens.
    """
    if not _are_parts_of_one(query, key, value):
        value = value.contiguous()
    bounds = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
    options = {"softmax_scale": scale, **bounds}
    return _CausalAttention.apply(query, key, value, options)  # type: ignore[no-any-return, no-untyped-call]
