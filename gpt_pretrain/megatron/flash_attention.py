"""Attention by FlashAttention-4 in place of cuDNN's: `model.use_flash_attention`.

For Llama 3's heads on an H200 its kernels take 94% of the time of cuDNN 9.19's forward and 89% backward
(benchmarks/flash_attention_h200.md). It comes as the package flash-attn-4, is written in CuTe's Python and
compiled at its first call, which takes some seconds per shape of heads (https://github.com/Dao-AILab/flash-attention).
"""

import os
from typing import Any, override

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch.autograd.function import once_differentiable


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

    megatron-core lays the sequences of a batch side by side, FlashAttention one after the other. Here they become
    batch · heads heads of one sequence: head i reads keys and values of head i // (heads / groups), so that each head
    reads those of its own sequence. Nothing is copied that is contiguous, as `split_and_rotate` leaves it, nor are the
    parts of one projection with as many groups as heads, whose gradients are parts of one tensor, too. Gradients of
    queries, and of keys and values that several heads read, are summed in a fixed order where deterministic algorithms
    are on, and otherwise in the order in which they are ready.

    Args:
        query: [s, b, heads, width], BF16 or FP16.
        key: [s, b, groups, width].
        value: [s, b, groups, width].
        scale: Factor of the scores; None: 1/√width.

    Returns:
        [s, b, heads · width].
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
