"""Cross-field rules of FP8: each trap of the stack below, found on the laptop and not hours into a run.

Each rule yields one message: the keys and values in conflict, the rule, and the way out. What the shapes of the matrix
products must be is in `rules.fp8_shapes`, what a machine must have in `spec.platform`. The sources are those of
megatron-core 0.19.2 and Transformer Engine (TE) 2.12.
"""

import fnmatch
from collections.abc import Iterator

from gpt_pretrain.config.choices import Fp8RecipeName, OptimizerName, Precision, RecomputeGranularity
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.config.typed import show
from gpt_pretrain.spec.fp8 import DELAYED_KEYS, Fp8Settings, emulation, fp8_settings
from gpt_pretrain.spec.products import ROUTER, linears

# Why the keys of delayed scaling mean nothing elsewhere.
_NO_HISTORY = {
    Fp8RecipeName.tensorwise: "the scale of a tensor comes from the tensor itself",
    Fp8RecipeName.blockwise: "the scale of a block comes from the block itself",
    Fp8RecipeName.mxfp8: "the scale of 32 values comes from those values",
}
# Values of E4M3 span 448 to 2^-6 without loss of precision, which is 2^14.8: beyond this margin even the largest
# value of a tensor would be among the subnormal ones.
_LARGEST_MARGIN = 14
# 64 times Transformer Engine's own. The whole history is read at every step and is part of every checkpoint.
_LONGEST_HISTORY = 65_536
# An fp32 number for each of input, weight and output, and of the gradients of output and input
# (TransformerEngineBaseModule.set_meta_tensor: num_gemms * 3 and num_gemms * 2).
_HISTORY_BYTES = 5 * 4
# The keys of FP8 that do not say so in their name.
_KEPT_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def _set_keys(model: ModelConfig) -> Iterator[str]:
    """The FP8 keys that say something, as `key=value`: not null, true where null is no value, not empty."""
    for path, key in schema_keys().items():
        section, _, name = path.rpartition(".")
        if section != "model" or not (name.startswith("fp8_") or name in _KEPT_LAYERS):
            continue
        value = getattr(model, name)
        if value is not None and (key.optional or value):
            shown = f"[{','.join(value)}]" if isinstance(value, list) else show(value)
            yield f"{path}={shown}"


def switched_off(config: Config) -> Iterator[str]:
    """Settings of FP8 in a run without it."""
    if config.model.fp8:
        return
    given = list(_set_keys(config.model))
    if given:
        are, them = ("has", "it") if len(given) == 1 else ("have", "them")
        yield (
            f"{', '.join(given)} {are} no effect with model.fp8=false; "
            f"use model.fp8=true, or leave {them} out (fp8=none)"
        )
    interval = config.logging.fp8_statistics_interval
    if interval is not None:
        yield (
            f"logging.fp8_statistics_interval={interval} has nothing to observe with model.fp8=false; "
            "use model.fp8=true, or null"
        )
    if config.checkpoint.reset_fp8_state:
        yield "checkpoint.reset_fp8_state=true has nothing to reset with model.fp8=false; use false"


def resuming(config: Config, settings: Fp8Settings) -> Iterator[str]:
    """Scales that start anew, of a recipe that keeps none (`checkpoint.fp8_state`)."""
    if config.checkpoint.reset_fp8_state and settings.recipe in _NO_HISTORY and not settings.dot_product_attention:
        yield (
            f"checkpoint.reset_fp8_state=true has nothing to reset with model.fp8_recipe={settings.recipe.name}: "
            f"{_NO_HISTORY[settings.recipe]}; use false"
        )


def statistics(config: Config) -> Iterator[str]:
    """Ranges of what is logged about FP8."""
    interval, threshold = config.logging.fp8_statistics_interval, config.logging.fp8_saturation_threshold
    if interval is not None and interval < 1:
        yield f"logging.fp8_statistics_interval={interval} is too small; use 1 or more, or null for no statistics"
    if not 0 < threshold <= 1:
        yield f"logging.fp8_saturation_threshold={threshold} is no share of a tensor; use above 0 up to 1"


def formats(model: ModelConfig) -> Iterator[str]:
    """NeMo's two switches: e4m3 counts where both are set, and one of them has to be."""
    if model.fp8_hybrid is False and not model.fp8_e4m3:
        yield (
            f"model.fp8_hybrid=false with model.fp8_e4m3={show(model.fp8_e4m3)} leaves no FP8 format; "
            "use fp8_hybrid=true (E4M3 forward, E5M2 for gradients), or fp8_e4m3=true (E4M3 in both)"
        )


def delayed_scaling(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """Keys that delayed scaling alone reads, and their ranges."""
    if settings.recipe is not Fp8RecipeName.delayed:
        for name in DELAYED_KEYS:
            value = getattr(model, name)
            if value is not None:
                yield (
                    f"model.{name}={show(value)} has no effect with model.fp8_recipe={settings.recipe.name}: "
                    f"{_NO_HISTORY[settings.recipe]}; use null, or fp8=delayed"
                )
        return
    if not 0 <= settings.margin <= _LARGEST_MARGIN:
        yield (
            f"model.fp8_margin={settings.margin} is not between 0 and {_LARGEST_MARGIN}: scales leave 2^margin of "
            "headroom, less than none saturates the largest values, and more leaves E4M3 no precision; use 0"
        )
    if settings.amax_history_len < 1:
        yield (
            f"model.fp8_amax_history_len={settings.amax_history_len} is too small; "
            "use 1 or more (1024 is Transformer Engine's own)"
        )
    if settings.amax_history_len > _LONGEST_HISTORY:
        yield (
            f"model.fp8_amax_history_len={settings.amax_history_len} is too long: each linear layer would keep "
            f"{_HISTORY_BYTES * settings.amax_history_len:,} bytes of amaxes (4 for each of 5 tensors and each pass); "
            f"use 1 to {_LONGEST_HISTORY} (1024 is Transformer Engine's own)"
        )
    if model.fp8_interval not in (None, 1):
        yield (
            f"model.fp8_interval={model.fp8_interval} has no effect: Transformer Engine ignores it since 1.8 and "
            "computes new scales at every step; use 1, or null"
        )


def weight_gradients(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """`fp8_wgrad=false`, which megatron-core still passes to a recipe that has no place for it."""
    if not settings.wgrad and not (settings.recipe is Fp8RecipeName.delayed and settings.emulate):
        yield (
            f"model.fp8_wgrad=false has no effect with model.fp8_recipe={settings.recipe.name} and "
            f"model.fp8_emulate={show(settings.emulate)}: it belongs to delayed alone, and Transformer Engine 2.12 "
            "drops it (override_linear_precision is gone); use null, or fp8=delayed with model.fp8_emulate=true"
        )


def attention(config: Config, settings: Fp8Settings) -> Iterator[str]:
    """FP8 in attention's own products, which TE's fused attention alone computes."""
    model = config.model
    if settings.multi_head_attention:
        # TE's own MultiheadAttention asks its projections for FP8 outputs by `fp8_output`; megatron-core's
        # attention never does, so that the recipe's fp8_mha changes nothing.
        yield (
            "model.fp8_multi_head_attention=true has no effect: megatron-core 0.19 hands BF16 tensors between the "
            "projections and attention, whatever the recipe says; use false"
        )
    if not settings.dot_product_attention:
        return
    if settings.recipe not in (Fp8RecipeName.delayed, Fp8RecipeName.tensorwise):
        # DotProductAttention.init_fp8_metadata and Float8BlockScaling.__post_init__ assert it.
        yield (
            f"model.fp8_dot_product_attention=true with model.fp8_recipe={settings.recipe.name}: Transformer Engine's "
            "FP8 attention takes scales per tensor only; use false, or fp8=delayed or tensorwise"
        )
    if model.activations_checkpoint_granularity is RecomputeGranularity.selective:
        # Attention._checkpointed_attention_forward recomputes outside of TE's autocast.
        yield (
            "model.activations_checkpoint_granularity=selective recomputes attention without FP8, and "
            "model.fp8_dot_product_attention=true; use granularity null or full, or fp8_dot_product_attention=false"
        )
    if config.trainer.deterministic:
        # get_attention_backend drops cuDNN's FP8 attention in training, and no other backend has one.
        yield (
            "model.fp8_dot_product_attention=true with trainer.deterministic=true: the only FP8 attention varies from "
            "run to run; use fp8_dot_product_attention=false, or deterministic=false"
        )
    if model.first_last_layers_bf16:
        yield (
            "model.fp8_dot_product_attention=true with model.first_last_layers_bf16=true: whose attention runs in FP8 "
            "cannot be proven there yet; use fp8_dot_product_attention=false, or fp8_exclude for the layers' products"
        )
    if model.context_parallel_size > 1:
        yield (
            "model.fp8_dot_product_attention=true with model.context_parallel_size="
            f"{model.context_parallel_size}: that it runs in FP8 cannot be proven there yet; use "
            "fp8_dot_product_attention=false, or context_parallel_size=1"
        )
    if settings.emulate:
        yield (
            "model.fp8_dot_product_attention=true with model.fp8_emulate=true: the linear layers are emulated, "
            "attention is not; use fp8_dot_product_attention=false"
        )


def parameters(config: Config, settings: Fp8Settings) -> Iterator[str]:
    """FP8 weights: the distributed optimizer alone writes them from their masters."""
    if not settings.params:
        return
    if config.model.use_distributed_optimizer is False:
        yield (
            "model.fp8_params=true with model.use_distributed_optimizer=false: only the distributed optimizer writes "
            "FP8 weights from their masters; use use_distributed_optimizer=null or true, or fp8_params=false"
        )
    name = config.model.optim.name
    if name is not OptimizerName.adam:
        yield (
            f"model.fp8_params=true needs the distributed optimizer, and model.optim.name={name.name} has no "
            "distributed form in megatron-core; use adam, or fp8_params=false"
        )
    if settings.recipe is Fp8RecipeName.mxfp8:
        # Its gather is staged in the gradients' buffer, which the training loop would have to fill before each gather
        # (MixedPrecisionOptimizer.prepare_model_params_for_param_sync): weights would be zeros without it.
        yield (
            "model.fp8_params=true with model.fp8_recipe=mxfp8: megatron-core gathers these through the gradients' "
            "buffer, in BF16, which this application does not do; use fp8_params=false, or fp8=tensorwise"
        )
    if settings.emulate:
        yield (
            "model.fp8_params=true with model.fp8_emulate=true: emulated layers keep high-precision weights and "
            "quantise the same values at each product; use fp8_params=false"
        )


def layers_in_bf16(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """First and last layers in BF16 (TransformerConfig.__post_init__)."""
    keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not model.first_last_layers_bf16:
        for key in keys:
            value = getattr(model, key)
            if value is not None:
                yield (
                    f"model.{key}={value} has no effect with model.first_last_layers_bf16=false; "
                    "use first_last_layers_bf16=true, or null"
                )
        return
    if settings.recipe is Fp8RecipeName.delayed:
        yield (
            "model.first_last_layers_bf16=true with model.fp8_recipe=delayed: amaxes are reduced once for all layers, "
            'and megatron-core refuses it; use fp8_exclude=["decoder.layers.0.*",…], or fp8=tensorwise'
        )
    per_stage = model.num_layers // model.pipeline_model_parallel_size
    for key in keys:
        value = getattr(settings, key)
        if not 0 <= value <= per_stage:
            yield (
                f"model.{key}={value} is not between 0 and the layers of a pipeline stage "
                f"(model.num_layers={model.num_layers} / model.pipeline_model_parallel_size="
                f"{model.pipeline_model_parallel_size}); use 0 to {per_stage}"
            )
    if not (settings.num_layers_at_start_in_bf16 or settings.num_layers_at_end_in_bf16):
        yield (
            "model.first_last_layers_bf16=true has no effect with 0 layers at the start and 0 at the end; "
            "use false, or 1 or more for either"
        )


def exclusions(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """Patterns that keep nothing out of FP8."""
    names = [linear.module for linear in linears(model) if linear.layer >= 0 and linear.kind != ROUTER]
    for pattern in settings.exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            yield (
                f"model.fp8_exclude: {pattern!r} matches no linear layer; they are named "
                f"{names[0]} … {names[-1]}, and * stands for anything"
            )


def nothing_left(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """Settings that keep every layer out of FP8."""
    if any(linear.precision == "fp8" for linear in linears(model)):
        return
    causes = ["model.fp8_exclude"] if settings.exclude else []
    causes += ["model.first_last_layers_bf16"] if model.first_last_layers_bf16 else []
    yield (
        f"model.fp8=true computes nothing in FP8: {' and '.join(causes)} {'keep' if causes[1:] else 'keeps'} out "
        f"every linear layer of all {model.num_layers} layers; leave some in, or use model.fp8=false"
    )


def layer_implementation(config: Config, settings: Fp8Settings) -> Iterator[str]:
    """Who computes in FP8: TE's layers, or emulated local ones. megatron-core's local layers ignore it silently."""
    model = config.model
    if not settings.emulate:
        if model.transformer_engine is False:
            yield (
                "model.fp8=true with model.transformer_engine=false: megatron-core's local layers know no FP8; "
                f"use transformer_engine=null or true, or {emulation(model)}"
            )
        if config.trainer.precision is Precision.fp32:
            yield (
                "model.fp8=true with trainer.precision=fp32: Transformer Engine's layers would multiply in TF32 what "
                f"is not FP8; use auto or bf16, or {emulation(model)}"
            )
        return
    if model.gradient_accumulation_fusion:
        yield (
            "model.fp8_emulate=true with model.gradient_accumulation_fusion=true: emulated layers compute weight "
            "gradients themselves; use gradient_accumulation_fusion=null or false"
        )
    if model.transformer_engine:
        yield (
            "model.fp8_emulate=true with model.transformer_engine=true: emulated layers are megatron-core's local "
            "ones; use transformer_engine=null or false, or fp8_emulate=false"
        )
    if model.context_parallel_size > 1:
        yield (
            f"model.fp8_emulate=true with model.context_parallel_size={model.context_parallel_size}: only Transformer "
            "Engine's attention splits sequences, and emulated layers go without it; use context_parallel_size=1"
        )


def fp8_problems(config: Config, *, sizes_known: bool) -> Iterator[str]:
    """All problems of the FP8 keys, but those of shapes, that no machine has to be asked about.

    Args:
        config: The configuration.
        sizes_known: Whether all counts are positive; the rules about layers by name divide by them.
    """
    model = config.model
    yield from switched_off(config)
    yield from statistics(config)
    settings = fp8_settings(model)
    if settings is None:
        return
    yield from formats(model)
    yield from delayed_scaling(model, settings)
    yield from weight_gradients(model, settings)
    yield from attention(config, settings)
    yield from parameters(config, settings)
    yield from resuming(config, settings)
    yield from layer_implementation(config, settings)
    if sizes_known:
        kept = list(layers_in_bf16(model, settings))
        yield from kept
        yield from exclusions(model, settings)
        if not kept:
            yield from nothing_left(model, settings)
