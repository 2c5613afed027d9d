"""`model.use_flash_attention`: FlashAttention-4 in place of cuDNN in Transformer Engine's attention.

For Llama 3's heads on an H200 it takes 94% of the time of cuDNN 9.19's forward and 89% backward
(benchmarks/flash_attention_h200.md). `kernels.flash_attention` calls the package flash-attn-4, which compiles at its
first call, for seconds per shape of heads (https://github.com/Dao-AILab/flash-attention).
"""

from collections.abc import Iterator
from typing import Any, override

from gpt_pretrain.config.choices import PositionEmbedding
from gpt_pretrain.config.derived import kv_channels, num_query_groups
from gpt_pretrain.config.errors import how_to_install
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import FusedKernel, Kernels, Lack, Library, Obstacle, Platform, Resolved, RunSpec
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.run.fp8 import local_layers
from gpt_pretrain.run.platform import BLACKWELL, HOPPER

_LIBRARY = Library(
    name="flash_attention",
    title="FlashAttention-4",
    distribution="flash-attn-4",
    extra="flash",
    oldest="4.0.0b36",
    # The module has no version, and flash_attn beside it belongs to another distribution.
    used=("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
    loaded_by_core=True,
)
# Head widths that it takes (`_validate_head_dims` in its interface.py).
_WIDTH_MULTIPLE, _WIDEST, _WIDEST_ON_BLACKWELL = 8, 256, 128
# Head widths at which it beat cuDNN on Hopper, with and without rotated queries and keys. Others were not measured.
_ROTATED_WIDTHS = (128,)
_STILL_WIDTHS = (64, 128)
_TAKES_THE_PLACE = "it takes the place of Transformer Engine's attention"


class FlashAttention(FusedKernel):
    """Use FlashAttention-4; null: on Hopper with flash-attn-4 installed, for heads of 128, or of 64 without rope."""

    key = "use_flash_attention"
    after = "masked_softmax_fusion"
    library = _LIBRARY
    without_library = "Attention is Transformer Engine's, not FlashAttention-4"
    changes_te_layers = True
    compiles_first = True
    # With heads of 128 and sequences of 8,192; otherwise 1.08 to 1.13.
    attention_speed = 1.10

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if not sizes_known:
            return
        if cause := local_layers(model):
            yield cause, _TAKES_THE_PLACE
        yield from self.needs(model, "its products are in BF16", fp8_dot_product_attention=False)
        why = "ranks exchange keys and values in Transformer Engine's attention"
        yield from self.needs(model, why, context_parallel_size=1)
        yield from self.needs(model, "it has no dropout", attention_dropout=0)
        yield from self.needs(model, "not tested with sliding windows", window_size=None)
        yield from self.needs(model, "it returns no logits", qk_clip=False, log_max_attention_logit=False)
        width = kv_channels(model)
        if width % _WIDTH_MULTIPLE or width > _WIDEST:
            yield f"heads of {width} channels", f"it takes multiples of {_WIDTH_MULTIPLE} up to {_WIDEST}"

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        return (
            kernels.transformer_engine
            and platform.is_hopper
            # Not measured with packed documents.
            and not run.model.data.inter_document_masking
            and _LIBRARY.name in platform.libraries
            and _is_measured_faster(run.model, rotates=kernels.features[QkvRope.key])
            # Not measured with recomputed attention.
            and run.model.activations_checkpoint_granularity is None
        )

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        width, platform, why = kv_channels(spec.model), spec.platform, ""
        capability, name = platform.compute_capability, _LIBRARY.name
        if capability is None:
            why = "there is no CUDA device"
        elif platform.transformer_engine is None:
            why = _TAKES_THE_PLACE
        elif not HOPPER <= capability < (11, 0):
            why = f"it needs compute capability 9.x or 10.x, and this is {platform.gpu}"
        elif capability >= BLACKWELL and _WIDEST_ON_BLACKWELL < width < _WIDEST:
            why = f"on {platform.gpu} it takes heads of up to {_WIDEST_ON_BLACKWELL} channels, not of {width}"
        elif name not in platform.libraries:
            missing = f"it is not installed; {how_to_install(_LIBRARY.extra)}"
            why = platform.library_problems.get(name, missing)
        if why:
            yield "FlashAttention-4, which cannot be used here", why

    @override
    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        layer.submodules.self_attention.submodules.core_attention = _attention_class()


def _is_measured_faster(model: ModelConfig, *, rotates: bool) -> bool:
    """Whether it was measured to be faster at this head width, in a layout that needs no copies."""
    if rotates:
        return kv_channels(model) in _ROTATED_WIDTHS
    # Only without rotation and grouped queries are q, k and v parts of one tensor, and their gradients too.
    parts_of_one = (
        model.position_embedding_type is not PositionEmbedding.rope
        and num_query_groups(model) == model.num_attention_heads
    )
    return parts_of_one and kv_channels(model) in _STILL_WIDTHS


def _attention_class() -> type:
    """The module in place of megatron-core's `TEDotProductAttention`: built, stored and loaded in the same way.

    With documents that do not see each other, `attention_mask` has their borders, and none is longer than `longest`
    (`megatron.documents`).
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from gpt_pretrain.kernels import flash_attention

    class Attention(TEDotProductAttention):  # type: ignore[misc]  # megatron-core has no types
        def __init__(self, *args: Any, longest: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._longest = longest

        @override
        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, attn_mask_type: Any, **others: Any
        ) -> Any:
            assert attn_mask_type is AttnMaskType.causal, "FlashAttention computes causal masks only here"
            given = {name for name, value in others.items() if value is not None} - {"num_splits"}
            assert not given, f"neither biases nor sequences of several lengths are computed here: {given}"
            scale = self.config.softmax_scale
            if attention_mask is None:
                return flash_attention.causal_attention(query, key, value, scale)
            bounds = {"borders": attention_mask, "longest": self._longest}
            return flash_attention.attention_in_documents(query, key, value, scale, **bounds)

    return Attention
