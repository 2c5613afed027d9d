"""`model.fused_single_qkv_rope`: one kernel splits queries, keys and values and rotates them (`kernels.qkv_rope`).

With `model.qk_layernorm` the kernel applies the RMSNorm of queries and keys, too.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, override

from gpt_pretrain.config.choices import Normalization, PositionEmbedding
from gpt_pretrain.config.derived import keeps_plain_kernels
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import FusedKernel, Kernels, Lack, Obstacle, Platform, Resolved, RunSpec

_YARN = "it has no factor for cosines and sines, as YaRN needs"


class QkvRope(FusedKernel):
    """Split queries, keys and values, normalize and rotate in one kernel; null: with rope, without CUDA graphs."""

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
        if model.qk_layernorm and model.normalization is Normalization.layernorm:
            yield "model.qk_layernorm=true with model.normalization=layernorm", "it normalizes by RMSNorm only"

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

    @override
    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        from megatron.core.transformer.identity_op import IdentityOp

        attention = layer.submodules.self_attention
        if attention.submodules.q_layernorm not in {None, IdentityOp}:
            attention.module = _attention_class()


@cache
def _attention_class() -> type:
    """megatron-core's attention whose kernel applies the norms; it is built, stored and loaded in the same way."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp

    from gpt_pretrain.kernels.qkv_rope import HeadNorms

    def as_identity(norm: Any) -> Any:
        """The norm, with its parameters and its entries in checkpoints, as an object that is an `IdentityOp`, too."""
        kind: Any = type(type(norm).__name__, (type(norm), IdentityOp), {})
        # A constructor would make other parameters.
        same = kind.__new__(kind)
        vars(same).update(vars(norm))
        return same

    class NormingAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no types
        q_layernorm: Any
        k_layernorm: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # megatron-core leaves the projection in one piece only where both are identities.
            self.q_layernorm = as_identity(self.q_layernorm)
            self.k_layernorm = as_identity(self.k_layernorm)

        @override
        def get_query_key_value_tensors(self, *args: Any, split_qkv: bool = True, **kwargs: Any) -> Any:
            parts = super().get_query_key_value_tensors(*args, split_qkv=split_qkv, **kwargs)
            if split_qkv:
                return parts
            # What the second names, megatron-core hands to the kernel as it is.
            return parts[0], HeadNorms(
                width=self.hidden_size_per_attention_head,
                query_weight=self.q_layernorm.weight,
                key_weight=self.k_layernorm.weight,
                epsilon=self.config.layernorm_epsilon,
            )

    return NormingAttention
