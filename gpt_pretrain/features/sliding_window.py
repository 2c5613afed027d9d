"""`model.window_size`: attention to a window of tokens, in all layers or in those of `model.window_attn_skip_freq`.

megatron-core's layers have it: Transformer Engine's attention skips what a window hides, megatron-core's own masks it.
"""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import LayerName
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import show
from gpt_pretrain.config.mixtures import own_lengths
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import Feature, Lack, Obstacle, Resolved, RunSpec

_UNTESTED = "not tested with windows"
# Attention kernels take windows as 32-bit integers, and PyTorch's masks as 64-bit ones.
_LONGEST = 2**31 - 1


def takes_window(model: ModelConfig) -> bool:
    """Whether PyTorch's fused attention computes the model's window, if it has one (`layers.attention_in_window`)."""
    return model.window_size is None or kv_channels(model) % 8 == 0


class SlidingWindow(Feature):
    """Sliding windows."""

    key = "window_size"
    asked = None
    off = "model.window_size=null"

    @override
    def problems(self, run: Resolved, *, sizes_known: bool) -> Iterator[str]:
        yield from _shape_problems(run.model)
        yield from super().problems(run, sizes_known=sizes_known)

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        why = "Transformer Engine's ring of context parallel ranks passes all keys on"
        yield from self.needs(model, why, context_parallel_size=1)
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", f"layers of extensions are {_UNTESTED}"
        if model.fp8_dot_product_attention:
            # get_attention_backend (Transformer Engine 2.12) leaves no backend.
            off = "model.fp8_dot_product_attention=false"
            yield "model.fp8_dot_product_attention=true", "cuDNN's FP8 attention has no windows", off
        if model.masked_softmax_fusion:
            # FusedScaleMaskSoftmax.is_kernel_available does not ask for windows.
            why = "apex's softmax would see the whole sequence"
            yield "model.masked_softmax_fusion=true", why, "model.masked_softmax_fusion=null"
        if model.data.inter_document_masking:
            off = "model.data.inter_document_masking=false"
            yield "model.data.inter_document_masking=true", f"packed documents are {_UNTESTED}", off
        if lengths := own_lengths(model.data):
            way = "stages without seq_length"
            yield (
                f"model.data.stages with seq_length={lengths[0]}",
                f"sequences of several lengths are {_UNTESTED}",
                way,
            )

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        if spec.kernels.transformer_engine and spec.model.attention_dropout > 0:
            why = "cuDNN's attention drops nothing in windows"
            yield "model.attention_dropout=0 in Transformer Engine's layers", why, "model.attention_dropout=0"


def _shape_problems(model: ModelConfig) -> Iterator[str]:
    """What megatron-core's window and its layers have to look like."""
    window, layers = model.window_size, model.window_attn_skip_freq
    if window is not None and (len(window) != 2 or not 1 <= window[0] <= _LONGEST or window[1] != 0):
        way = f"[4095,0] for the token itself and 4,095 before it (1 to {_LONGEST}), or null"
        yield f"model.window_size={show(window)} is not the tokens before one and the 0 after it; use {way}"
    if layers is not None and (len(layers) != model.num_layers or not {*layers} <= {0, 1} or 1 not in layers):
        way = "1 for each layer that has the window and 0 for the others, or null: all have it"
        asked = f"model.window_attn_skip_freq={show(layers)}"
        yield f"{asked} says it for {len(layers)} of model.num_layers={model.num_layers}; use {way}"
