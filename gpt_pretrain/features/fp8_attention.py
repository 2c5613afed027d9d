"""`model.fp8_dot_product_attention`: attention's own products in FP8, by cuDNN in Transformer Engine's attention."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import RecomputeGranularity
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import refusal
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.features.feature import Feature, Lack, Obstacle, Platform, Resolved, RunSpec
from gpt_pretrain.run.platform import BLACKWELL, CONSUMER_BLACKWELL, HOPPER

_UNCOVERED = "the first-step proof does not cover this combination"


class Fp8Attention(Feature):
    """Attention in FP8."""

    key = "fp8_dot_product_attention"
    off = "model.fp8_dot_product_attention=false"
    # Assumed: only the forward pass gains on Hopper.
    attention_speed = 1.2

    @override
    def is_used(self, spec: RunSpec) -> bool:
        return spec.fp8 is not None and spec.fp8.dot_product_attention

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model, settings, trainer = run.model, run.fp8, run.config.trainer
        # Without FP8 the key has no effect, and an engine without the recipe has its own rule.
        if settings is None or settings.recipe.backend is not settings.backend:
            return
        if (why := settings.recipe.why_not(Use.fp8_dot_product_attention)) is not None:
            # DotProductAttention.init_fp8_metadata and Float8BlockScaling.__post_init__ assert it.
            why += ", and FP8 attention is Transformer Engine's, with scales per tensor"
            yield f"model.fp8_recipe={settings.recipe.name}", why, f"fp8={recipes_for(Use.fp8_dot_product_attention)}"
        if model.activations_checkpoint_granularity is RecomputeGranularity.selective:
            # Attention._checkpointed_attention_forward recomputes outside of TE's autocast.
            selective = "model.activations_checkpoint_granularity=selective"
            yield selective, "it recomputes attention without FP8", "model.activations_checkpoint_granularity=null"
        if trainer.deterministic:
            # get_attention_backend drops cuDNN's FP8 attention in training, and no other backend has one.
            why = "the only FP8 attention varies from run to run"
            yield "trainer.deterministic=true", why, "trainer.deterministic=false"
        if model.first_last_layers_bf16:
            yield "model.first_last_layers_bf16=true", _UNCOVERED, "fp8_exclude in place of first_last_layers_bf16"
        if (cp := model.context_parallel_size) > 1:
            yield f"model.context_parallel_size={cp}", _UNCOVERED, "model.context_parallel_size=1"
        if settings.emulate:
            yield "model.fp8_emulate=true", "only linear layers are emulated"

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        """What cuDNN accepts (TE's get_attention_backend and nvte_get_fused_attn_backend)."""
        capability, width = spec.platform.compute_capability, kv_channels(spec.model)
        assert capability is not None, "asked only of a GPU"
        kv_channels_are = f"model.kv_channels={width}"
        if not HOPPER <= capability < CONSUMER_BLACKWELL:
            yield "compute capability 9.x or 10.x", f"this is {spec.platform.gpu}"
        elif capability < BLACKWELL and width != 128:
            yield "heads of 128 channels to train on Hopper", kv_channels_are
        elif width > 128 or width % 16:
            yield "heads of a multiple of 16 up to 128 channels", kv_channels_are

    @override
    def problems_here(self, spec: RunSpec) -> Iterator[str]:
        settings, platform = spec.te_fp8, spec.platform
        # Without FP8 `rules.machine` says what is missing.
        if settings is None or not platform.has_fp8 or platform.compute_capability is None:
            return
        yield from super().problems_here(spec)
        is_delayed = settings.recipe.keeps_history or is_attention_delayed(platform)
        if platform.compute_capability < BLACKWELL and not is_delayed:
            why = "on Hopper, cuDNN's FP8 attention takes delayed scales only"
            export = "export NVTE_DPA_FP8_RECIPE=DelayedScaling for attention alone"
            recipe = f"model.fp8_recipe={settings.recipe.name}"
            yield refusal(self.setting(spec.model), recipe, why, self.off, "fp8=delayed", export)


def is_attention_delayed(platform: Platform) -> bool:
    """Whether the environment gives attention delayed scales."""
    return platform.recipe_variables.get("NVTE_DPA_FP8_RECIPE") == "DelayedScaling"
