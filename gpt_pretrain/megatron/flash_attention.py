"""Attention by FlashAttention-4 in place of cuDNN's: `model.use_flash_attention`.

Of Llama 3's heads on an H200 its kernels take 0.94 of the time of cuDNN 9.19's forward and 0.89 backward
(benchmarks/flash_attention_h200_2026-11-22.md). It comes as the package flash-attn-4, is written in CuTe's Python and
compiled at its first call, some seconds a shape of heads (https://github.com/Dao-AILab/flash-attention).
"""

import os
from typing import override

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Each token attends to those up to itself.

    megatron-core has sequences of a batch side by side, FlashAttention one after the other. To it they are heads of one
    sequence here, batch · heads of them: head i reads keys and values of head i // (heads / groups), so that each reads
    those of its own sequence, and what is contiguous, as `qkv_rope` leaves it, is not copied. Gradients of queries, and
    of keys and values that several heads read, are added up in a fixed order where deterministic algorithms are asked
    for, and else as they are ready.

    Args:
        query: [s, b, heads, width], BF16 or FP16.
        key: [s, b, groups, width].
        value: [s, b, groups, width].
        scale: Of the scores; None: 1/√width.

    Returns:
        [s, b, heads · width].
    """
    from flash_attn.cute import flash_attn_func

    length, batch, heads, width = query.shape
    if value.untyped_storage().data_ptr() != query.untyped_storage().data_ptr():
        # Queries were rotated out of the projection, and a view of it would keep all of it for values alone.
        value = value.contiguous()
    query, key, value = (each.reshape(1, length, -1, width) for each in (query, key, value))
    # Transformer Engine's attention asks both, too; `trainer.deterministic` sets both.
    in_order = torch.are_deterministic_algorithms_enabled() or os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    out, _ = flash_attn_func(query, key, value, softmax_scale=scale, causal=True, deterministic=in_order)
    return out.view(length, batch, heads * width)  # type: ignore[no-any-return]


class FlashAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention in all but its products: built, stored and loaded as that is."""

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
        assert attn_mask_type is AttnMaskType.causal, "no other mask is computed here"
        assert attention_bias is None, "biases are not added"
        assert packed_seq_params is None, "sequences have one length"
        return causal_attention(query, key, value, self.config.softmax_scale)
