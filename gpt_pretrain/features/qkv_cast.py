"""`model.qkv_cast_fusion`: the gradient of queries, keys and values is cast to FP8 where it is rotated back.

`kernels.qkv_rope` says how. Layers whose projection is not in FP8 keep the BF16 gradient.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, override

from gpt_pretrain.config.derived import is_whole, kv_channels, num_query_groups
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import Kernels, Lack, Obstacle, Platform, Recipe, Resolved, RunSpec
from gpt_pretrain.features.fused_cast import FusedCast
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.run.products import QKV

_WIDTHS = 64, 128, 256


class QkvCast(FusedCast):
    """Cast gradients of queries, keys and values where they are rotated; null: in models whole on each Hopper GPU."""

    key = "qkv_cast_fusion"
    after = QkvRope.key
    nothing_to_cast = "there is no cast to rotate with"

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        yield from super().own_obstacles(run, sizes_known=sizes_known)
        if QkvRope().wanted(model) is False:
            yield "model.fused_single_qkv_rope=false", "another kernel rotates the gradient then"
        yield from self.needs(model, "it does not know norms of queries and keys", qk_layernorm=False)
        why = "the bias's gradient is summed up in the cast that it replaces"
        yield from self.needs(model, why, qkv_bias=False)
        yield from self.needs(model, why, bias=False)
        yield from self.needs(model, "heads are rotated whole", rotary_percentage=1.0)
        yield from self.needs(model, "user buffers exchange what the projection casts", tp_comm_overlap=False)
        if not sizes_known:
            return
        if kv_channels(model) not in _WIDTHS:
            given = "hidden_size / num_attention_heads" if model.kv_channels is None else "kv_channels"
            yield f"model.{given}={kv_channels(model)}", f"it casts heads of {', '.join(map(str, _WIDTHS))} elements"
        ranks = model.tensor_model_parallel_size
        if num_query_groups(model) < ranks:
            yield f"model.num_query_groups={num_query_groups(model)}", f"{ranks} tensor parallel ranks share groups"
        if run.fp8 is not None and not any(each.kind == QKV and each.precision == "fp8" for each in run.linears):
            yield f"model.fp8_exclude={model.fp8_exclude}", "no projection of queries, keys and values is in FP8"

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        fits = kernels.transformer_engine and platform.is_hopper and kernels.features[QkvRope.key]
        # The other layouts have not run on GPUs with it.
        return fits and is_whole(run.model)

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        yield from super().lacks(spec)
        if spec.kernels.transformer_engine and not spec.kernels.features[QkvRope.key]:
            yield "model.fused_single_qkv_rope=true", "null leaves that out here"

    @override
    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        layer.submodules.self_attention.module = _attention_class()

    @override
    def cast_bytes(self, kind: str, recipe: Recipe, of_input: float, of_gradient: float) -> tuple[float, float]:
        # Codes are written in place of BF16; for a scale from the amax the gradients are read twice.
        return of_input, 2 * recipe.cost.searches_amax if kind == QKV else of_gradient


@cache
def _attention_class() -> type:
    """megatron-core's attention, which hands its projection to the kernel; it is built, stored and loaded alike."""
    from megatron.core.transformer.attention import SelfAttention

    from gpt_pretrain.kernels.activation_cast import multiply_in_fp8
    from gpt_pretrain.kernels.qkv_rope import CastBack

    class CastingAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no types
        @override
        def get_query_key_value_tensors(
            self, hidden_states: Any, *args: Any, split_qkv: bool = True, **kwargs: Any
        ) -> Any:
            if split_qkv or not multiply_in_fp8(self.linear_qkv):
                return super().get_query_key_value_tensors(hidden_states, *args, split_qkv=split_qkv, **kwargs)
            mixed, _ = self.linear_qkv(hidden_states.view(-1, hidden_states.size(-1)))
            groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
            batch = hidden_states.size(1)
            shape = mixed.size(0) // batch, batch, groups, mixed.size(1) // groups
            # What the second names, megatron-core hands to the kernel as it is.
            return mixed, CastBack(shape=shape, width=width, projection=self.linear_qkv)

    return CastingAttention
