"""Attention inside documents (`model.data.inter_document_masking`): what layers use in place of megatron-core's.

A microbatch's samples are one sequence here, [b · s, 1, h], which the documents' borders divide. megatron-core hands
`attention_mask` through layers, recomputation and pipeline to attention, so the borders, int32 [documents + 1], travel
as that: a microbatch that is recomputed gets its own, whatever came after it. Where there are none, as in generation,
attention is causal over the whole sequence.

Transformer Engine's context parallelism wants documents of a multiple of 2 · CP tokens. Here the ranks exchange heads
for tokens instead (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509): each computes whole documents for a part
of the heads, by the same kernels as without context parallelism.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from itertools import pairwise
from typing import Any, override

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_pretrain.features.flash_attention import FlashAttention
from gpt_pretrain.launch.patches import UNFILLED_GRADIENTS, patch
from gpt_pretrain.run.run_spec import RunSpec


def attend_by_document(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    borders: torch.Tensor,
) -> torch.Tensor:
    """What `attend` makes of each document's queries, keys and values, [s, 1, heads · width] for the whole sequence.

    Documents of one length go together, as a batch of `attend`: samples of a single document are most of them. The host
    has to know the borders. Empty documents have no output.
    """
    by_length: dict[int, list[int]] = {}
    for begin, end in pairwise(borders.tolist()):
        if begin < end:
            by_length.setdefault(end - begin, []).append(begin)
    outputs: dict[int, torch.Tensor] = {}
    for length, begins in by_length.items():
        query, key, value = (torch.cat([each[at : at + length] for at in begins], dim=1) for each in inputs)
        outputs.update(zip(begins, attend(query, key, value).split(1, dim=1), strict=True))
    return torch.cat([outputs[begin] for begin in sorted(outputs)])


class LocalDocumentAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's attention, called for documents by themselves."""

    @override
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **others: Any
    ) -> torch.Tensor:
        """Queries [b · s, 1, heads, width], keys and values [b · s, 1, groups, width] to [b · s, 1, heads · width]."""
        attend = partial(super().forward, attention_mask=None, **others)
        if attention_mask is None:
            return attend(query, key, value)  # type: ignore[no-any-return]
        return attend_by_document(attend, (query, key, value), attention_mask)


def gather_sequence(tokens: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[s / CP, b, heads, width] to [s, b, heads / CP, width]: all tokens in their order, of a part of the heads.

    Rank r of the group has two slices of 2 · CP, number r and number r from the end (`context_parallel_slices`).
    """
    ranks = group.size()
    # Part j goes to rank j.
    parts = tokens.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
    received = all_to_all(group, parts.flatten(0, 1)).view(parts.shape)
    early, late = received.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def scatter_sequence(output: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[s, b, heads / CP · width] to [s / CP, b, heads · width]: back from `gather_sequence`."""
    ranks = group.size()
    early, late = output.unflatten(0, (2, ranks, -1)).unbind(0)
    parts = torch.stack([early, late.flip(0)], dim=1).flatten(1, 2)
    received: torch.Tensor = all_to_all(group, parts.flatten(0, 1)).view(parts.shape)
    return received.movedim(0, 2).flatten(2)


class _NothingFilled(TorchDispatchMode):
    """Leaves tensors as they are where they would be filled with a number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


def without_filling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but what it allocates is not filled with a number."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _NothingFilled():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return call


@cache
def _te_attention() -> type:
    """The module in place of megatron-core's `TEDotProductAttention`: built, stored and loaded in the same way."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention.backends import fused_attn_bwd

    patch(UNFILLED_GRADIENTS, fused_attn_bwd=without_filling(fused_attn_bwd))

    class DocumentAttention(TEDotProductAttention):  # type: ignore[misc]
        """Transformer Engine's attention on packed documents; no document has more tokens than `longest`."""

        def __init__(self, *args: Any, longest: int, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # One bound for all microbatches: the longest document of each would make the host wait, and cuDNN plan
            # anew.
            self._longest = longest
            self._exchanging = None
            if (ranks := self.config.context_parallel_size) > 1:
                self._exchanging = parallel_state.get_context_parallel_group()
                self.set_context_parallel_group(None, None, None, self.cp_comm_type)
                self.num_gqa_groups_per_partition //= ranks

        @override
        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, attn_mask_type: Any, **others: Any
        ) -> Any:
            given = {name for name, value in others.items() if value is not None} - {"num_splits"}
            assert not given, f"neither biases nor other packed sequences are computed here: {given}"
            inputs = [query, key, value]
            if self._exchanging is not None:
                inputs = [gather_sequence(each, self._exchanging) for each in inputs]
            if attention_mask is None:
                output = super().forward(*inputs, None, attn_mask_type)
            else:
                output = super().forward(
                    *(each.squeeze(1) for each in inputs),
                    None,
                    attn_mask_type,
                    packed_seq_params=PackedSeqParams(
                        qkv_format="thd",
                        cu_seqlens_q=attention_mask,
                        cu_seqlens_kv=attention_mask,
                        max_seqlen_q=self._longest,
                        max_seqlen_kv=self._longest,
                        # Unless told, Transformer Engine compares borders on the GPU and waits for the answer.
                        pad_between_seqs=False,
                    ),
                )
                output = output.view(output.size(0), 1, -1)
            return output if self._exchanging is None else scatter_sequence(output, self._exchanging)

    return DocumentAttention


def document_attention(spec: RunSpec, attention: Any) -> Any:
    """What builds attention inside documents, in place of what would build a layer's attention."""
    kernels = spec.kernels
    # `layers.TorchAttention` and FlashAttention's module compute documents themselves.
    if not (kernels.features[FlashAttention.key] if kernels.transformer_engine else kernels.torch_attention):
        if not kernels.transformer_engine:
            return LocalDocumentAttention
        attention = _te_attention()
    return partial(attention, longest=spec.model.encoder_seq_length)
