"""Attention by PyTorch's fused kernels, for layers without Transformer Engine on a GPU.

megatron-core's own attention writes the scores of all pairs of tokens to memory, [b, heads, s, s] in two precisions.
`torch.nn.functional.scaled_dot_product_attention` keeps a number for each token and head instead (FlashAttention, Dao
2023, arXiv 2307.08691).
"""

from typing import Any, override

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention import SDPBackend, sdpa_kernel

# In this order: cuDNN's are the fastest on Hopper. The last one takes what the others refuse, in O(s) memory too.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention: each token attends to itself and those before it.

    Args:
        query: [s, b, heads, width].
        key: [s, b, groups, width].
        value: [s, b, groups, width].
        scale: Factor of the scores.

    Returns:
        [s, b, heads · width].
    """
    q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=k.size(1) != q.size(1)
        )
    return out.permute(2, 0, 1, 3).flatten(2)


class TorchAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's attention with other products: it is built, stored and loaded in the same way."""

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """See `causal_attention`; the arguments are those of megatron-core's `DotProductAttention`."""
        assert (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal, "only causal masks are computed here"
        assert attention_bias is None, "biases are not added"
        assert packed_seq_params is None, "sequences have one length"
        return causal_attention(query, key, value, self.softmax_scale)
