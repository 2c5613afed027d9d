"""`model.qk_clip` and `model.log_max_attention_logit`: what they cannot be combined with, and how logits are read.

Transformer Engine's attention returns each head's largest logit (`return_max_logit`, which megatron-core asks for), and
megatron-core keeps the largest of a step in `current_max_attn_logits`. Local attention gets the same from a hook.
`megatron.qk_clip` reads them, and clips.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, override

from gpt_pretrain.config.choices import CudaGraphImpl, LayerName
from gpt_pretrain.features.feature import Feature, Obstacle, Resolved

if TYPE_CHECKING:
    import torch

_UNTESTED = "not tested"
# Queries whose scores are in memory at once.
_QUERIES_AT_ONCE = 512


class LargestLogits(Feature):
    """The largest attention logit of each step in the log."""

    key = "log_max_attention_logit"
    off = "model.log_max_attention_logit=false"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", "it reads the attention of the program's own layer"
        # get_attention_backend of Transformer Engine 2.12 leaves no backend.
        yield from self.needs(model, "FP8 attention returns no logits", fp8_dot_product_attention=False)
        yield from self.needs(model, "a graph of a whole layer has no place for it", compile=False)
        if model.cuda_graph_impl is CudaGraphImpl.local:
            yield "model.cuda_graph_impl=local", "a replay keeps no logits"
        yield from self.needs(model, _UNTESTED, context_parallel_size=1, overlap_moe_expert_parallel_comm=False)
        yield from self.needs(model, "it takes the largest logit of all before a token", window_size=None)
        if model.data.inter_document_masking:
            off = "model.data.inter_document_masking=false"
            yield "model.data.inter_document_masking=true", _UNTESTED, off

    @override
    def build_into_model(self, chunks: Sequence[Any]) -> None:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, DotProductAttention):
                    module.current_max_attn_logits = None
                    module.register_forward_pre_hook(_keep_largest)


class QkClip(LargestLogits):
    """Query and key projections that shrink where attention logits exceed a threshold."""

    key = "qk_clip"
    off = "model.qk_clip=false"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        yield from super().obstacles(run, sizes_known=sizes_known)
        model = run.model
        why = "a norm after the projections undoes what a clip does to them, and bounds the logits itself"
        yield from self.needs(model, why, qk_layernorm=False)
        if model.optim.use_precision_aware_optimizer:
            why = "it multiplies fp32 masters, and here they may be stored in pieces or rounded"
            off = "model.optim.use_precision_aware_optimizer=false"
            yield "model.optim.use_precision_aware_optimizer=true", why, off

    @override
    def build_into_model(self, chunks: Sequence[Any]) -> None:
        if not chunks[0].config.log_max_attention_logit:
            super().build_into_model(chunks)


def _keep_largest(attention: Any, inputs: tuple["torch.Tensor", ...]) -> None:
    """Before a training pass of local attention: takes the microbatch's largest logits into the step's."""
    if not attention.training:
        return
    found, kept = largest_logits(inputs[0], inputs[1], attention.softmax_scale), attention.current_max_attn_logits
    attention.current_max_attn_logits = found if kept is None else kept.maximum(found)


def largest_logits(query: "torch.Tensor", key: "torch.Tensor", scale: float) -> "torch.Tensor":
    """The largest causal attention logit of each head, fp32 [heads].

    Queries are [s, b, heads, width], keys [s, b, groups, width]; `scale` multiplies their products.
    """
    import torch

    heads, length = query.size(2), query.size(0)
    queries, keys = query.detach().permute(1, 2, 0, 3), key.detach().permute(1, 2, 3, 0)
    keys = keys.repeat_interleave(heads // key.size(2), dim=1)
    largest = torch.full((heads,), -torch.inf, device=query.device)
    for start in range(0, length, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, length)
        scores = (queries[:, :, start:end] @ keys[..., :end]).float() * scale
        later = torch.ones(end - start, end, dtype=torch.bool, device=query.device).triu(start + 1)
        largest = largest.maximum(scores.masked_fill(later, -torch.inf).amax((0, 2, 3)))
    return largest
