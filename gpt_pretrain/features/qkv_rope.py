"""`model.fused_single_qkv_rope`: one kernel splits queries, keys and values and rotates them (`kernels.qkv_rope`)."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import PositionEmbedding
from gpt_pretrain.config.derived import keeps_plain_kernels
from gpt_pretrain.features.feature import FusedKernel, Kernels, Lack, Obstacle, Platform, Resolved, RunSpec

_YARN = "it has no factor for cosines and sines, as YaRN needs"


class QkvRope(FusedKernel):
    """Split queries, keys and values, and rotate, in one kernel; null: with rope on TE layers, without CUDA graphs."""

    key = "fused_single_qkv_rope"
    after = "apply_rope_fusion"
    core_field = "fused_single_qkv_rope"

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        yield from self.needs(model, "there is nothing to rotate", position_embedding_type=PositionEmbedding.rope)
        if model.apply_rope_fusion is False:
            yield "model.apply_rope_fusion=false", "that asks for an unfused rotation"
        yield from self.needs(model, "it rotates in every layer", no_rope_freq=None)
        yield from self.needs(model, _YARN, yarn_original_max_position_embeddings=None)
        why = "queries and keys are normalized between their projection and the rotation"
        yield from self.needs(model, why, qk_layernorm=False)

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        local = platform.cuda and not kernels.compile and not keeps_plain_kernels(run.config)
        return kernels.transformer_engine or local

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        if not spec.platform.cuda:
            yield "a GPU", "there is no CUDA device"

    @override
    def prepare(self) -> None:
        from gpt_pretrain.kernels.qkv_rope import split_and_rotate
        from gpt_pretrain.launch.patches import ROTATION, patch

        # `TransformerConfig.fused_single_qkv_rope` then means this kernel, in local layers as well.
        patch(ROTATION, apply_fused_qkv_rotary_pos_emb=split_and_rotate, HAVE_FUSED_QKV_ROPE=True)
