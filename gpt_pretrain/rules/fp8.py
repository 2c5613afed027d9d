"""Cross-field rules of FP8: the traps of the stack below, found on a laptop instead of hours into a run.

`rules.shapes` checks the shapes of matrix products, `rules.machine` the machine. The sources are megatron-core 0.19.2
and Transformer Engine (TE) 2.12.
"""

import fnmatch
from collections.abc import Iterator

from gpt_pretrain.config.choices import AUTO, Fp8Backend, LayerName, Precision
from gpt_pretrain.config.errors import one_of, refusal, refusals, show, written
from gpt_pretrain.config.keys import did_you_mean
from gpt_pretrain.config.recipes import Use, recipes_for, recipes_of
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.run.fp8 import Fp8Settings, Obstacle, emulation, local_layers
from gpt_pretrain.run.optimizers import names_with, optimizer_of
from gpt_pretrain.run.products import Resolved, shapes_of

# 64 times Transformer Engine's default. Every step reads the whole history, and every checkpoint holds it.
_LONGEST_HISTORY = 65_536
# An fp32 number for each of input, weight and output, and of the gradients of output and input
# (TransformerEngineBaseModule.set_meta_tensor: num_gemms * 3 and num_gemms * 2).
_HISTORY_BYTES = 5 * 4


def formats(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """NeMo's two switches: one must be set, and e4m3 wins over hybrid."""
    if settings.recipe.has_own_formats:
        return
    if model.fp8_hybrid is False and not model.fp8_e4m3:
        yield (
            f"model.fp8_hybrid=false with model.fp8_e4m3={show(model.fp8_e4m3)} leaves no FP8 format; "
            "use model.fp8_hybrid=true (E4M3 forward, E5M2 for gradients), or model.fp8_e4m3=true (E4M3 in both)"
        )


def engine(settings: Fp8Settings) -> Iterator[str]:
    """Recipes that an engine does not have."""
    recipe, backend = settings.recipe, settings.backend
    if recipe.backend is not backend:
        own = recipes_of(backend)
        yield refusal(
            f"model.fp8_recipe={recipe.name}",
            f"model.fp8_backend={backend.name}",
            f"this backend has {', '.join(each.name for each in own)}",
            f"fp8={own[0].preset} with model.fp8_recipe={own[0].name}",
            f"fp8={recipe.varies or recipe.preset} with model.fp8_backend={recipe.backend.name}",
        )


def torchao(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """Settings that contradict a recipe of TorchAO."""
    recipe = settings.recipe
    if settings.backend is not Fp8Backend.torchao:
        return
    for key, fits in (("fp8_hybrid", settings.hybrid), ("fp8_e4m3", not settings.hybrid)):
        value = getattr(model, key)
        if value is not None and value is not fits:
            why = f"its recipe {recipe.name} has gradients in {'E5M2' if settings.hybrid else 'E4M3'}"
            yield refusal(f"model.{key}={show(value)}", "model.fp8_backend=torchao", why, "null", show(fits))
    if model.fp8_wgrad and not recipe.has_wgrad:
        others = one_of([each.name for each in recipes_of(settings.backend) if each.has_wgrad])
        why = "this recipe computes weight gradients outside FP8"
        ways = "null or false", f"model.fp8_recipe={others}"
        yield refusal("model.fp8_wgrad=true", f"model.fp8_recipe={recipe.name}", why, *ways)


def amax_history(settings: Fp8Settings) -> Iterator[str]:
    """The longest history of delayed scaling."""
    if settings.recipe.keeps_history and settings.amax_history_len > _LONGEST_HISTORY:
        yield (
            f"model.fp8_amax_history_len={settings.amax_history_len} is too long: each linear layer would keep "
            f"{_HISTORY_BYTES * settings.amax_history_len:,} bytes of amaxes (4 for each of 5 tensors and each pass); "
            f"use 1 to {_LONGEST_HISTORY} (1024 is Transformer Engine's own)"
        )


def _parameter_obstacles(config: Config, settings: Fp8Settings) -> Iterator[Obstacle]:
    """What keeps weights out of FP8: only the distributed optimizer writes them from their masters."""
    only = "only the distributed optimizer writes FP8 weights from their masters"
    if config.model.use_distributed_optimizer is False:
        yield "model.use_distributed_optimizer=false", only, "model.use_distributed_optimizer=null or true"
    name = config.model.optim.name
    if not optimizer_of(name).has_distributed_form:
        ways = f"model.optim.name={names_with('has_distributed_form')}"
        yield f"model.optim.name={name.name}", f"{only}, and megatron-core has no distributed form of this one", ways
    if (why := settings.recipe.why_not(Use.fp8_params)) is not None:
        ways = f"fp8={recipes_for(Use.fp8_params, backend=settings.backend)}"
        yield f"model.fp8_recipe={settings.recipe.name}", why, ways
    if settings.recipe.keeps_history and (decay := config.model.optim.ema_decay) is not None:
        why = "a validation casts averaged weights into their histories; that these come back is not tested"
        yield f"model.optim.ema_decay={decay:g} and model.fp8_recipe=delayed", why, "model.optim.ema_decay=null"
    if settings.emulate and settings.backend is Fp8Backend.transformer_engine:
        why = "emulated layers keep high-precision weights and quantize the same values at each product"
        yield "model.fp8_emulate=true", why
    if settings.backend is Fp8Backend.torchao and config.trainer.precision is Precision.fp32:
        why = "FP8 weights are cast from masters, and weights in fp32 have none"
        yield "trainer.precision=fp32", why, "trainer.precision=bf16"


def layers_in_bf16(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """First and last layers in BF16 (TransformerConfig.__post_init__)."""
    keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not model.first_last_layers_bf16:
        return
    if (why := settings.recipe.why_not(Use.first_last_layers_bf16)) is not None:
        yield (
            f"model.first_last_layers_bf16=true with model.fp8_recipe={settings.recipe.name}: {why}; use "
            f'model.fp8_exclude=["decoder.layers.0.*",…], or fp8={recipes_for(Use.first_last_layers_bf16)}'
        )
    per_stage = model.num_layers // model.pipeline_model_parallel_size
    for key, other in zip(keys, reversed(keys), strict=True):
        value = getattr(settings, key)
        if not 0 <= value <= per_stage:
            # One layer at least is left for FP8.
            most = max(0, min(per_stage, model.num_layers - getattr(settings, other) - 1))
            yield (
                f"model.{key}={value} is not between 0 and the layers of a pipeline stage "
                f"(model.num_layers={model.num_layers} / model.pipeline_model_parallel_size="
                f"{model.pipeline_model_parallel_size}); use 0 to {most}"
            )
    if not (settings.num_layers_at_start_in_bf16 or settings.num_layers_at_end_in_bf16):
        yield (
            "model.first_last_layers_bf16=true has no effect with 0 layers at the start and 0 at the end; "
            "leave all three out, or keep 1 or more on either side"
        )


def exclusions(run: Resolved, settings: Fp8Settings) -> Iterator[str]:
    """Exclusion patterns that match nothing. Names of an extension's layers are known later (`fp8.own_layers`)."""
    names = [linear.module for linear in run.linears if linear.can_be_fp8]
    for pattern in settings.exclude:
        if pattern == AUTO or run.model.layer is not LayerName.gpt or fnmatch.filter(names, pattern):
            continue
        # torchtitan's word for it.
        meant = did_you_mean(AUTO if pattern == "auto_filter_small_kn" else None)
        yield (
            f"model.fp8_exclude: {pattern!r} matches no linear layer; they are named {names[0]} … {names[-1]}, and * "
            f"stands for anything{meant}"
        )


def small_layers(run: Resolved, settings: Fp8Settings) -> Iterator[str]:
    """`auto` with a recipe for which nobody has measured the gain by size."""
    if not settings.exclude_small or settings.recipe.small:
        return
    patterns = [pattern for pattern in settings.exclude if pattern != AUTO]
    yield (
        f"model.fp8_exclude={written(run.model.fp8_exclude)} with model.fp8_recipe={settings.recipe.name}: {AUTO} "
        "leaves out what TorchAO measured to be too small to gain, and nobody has measured it for "
        f"{settings.recipe.preset}; use model.fp8_exclude={show(patterns)}"
    )


def nothing_left(run: Resolved, settings: Fp8Settings) -> Iterator[str]:
    """Settings that keep every layer out of FP8."""
    model = run.model
    if any(linear.precision == "fp8" for linear in run.linears):
        return
    causes = [f"model.fp8_exclude={written(model.fp8_exclude)}"] if settings.exclude else []
    causes += ["model.first_last_layers_bf16"] if model.first_last_layers_bf16 else []
    causes += [f"model.moe_grouped_kernel={show(model.moe_grouped_kernel)}"] if settings.experts_left_out else []
    small = shapes_of(linear for linear in run.kept_out if linear.is_small)
    yield (
        f"model.fp8=true computes nothing in FP8: {' and '.join(causes)} {'keep' if causes[1:] else 'keeps'} "
        f"every linear layer of all {model.num_layers} layers out of FP8"
        f"{f' (too small to gain: {", ".join(small)})' if small else ''}; "
        f"{'use model.fp8_exclude=[]' if small else 'leave some in'}, or use "
        f"{'model.moe_grouped_kernel=transformer_engine or ' * settings.experts_left_out}fp8=none without these keys"
    )


def layer_implementation(config: Config, settings: Fp8Settings) -> Iterator[str]:
    """Who computes in FP8: TE's layers, or local ones. megatron-core's own ignore FP8 silently."""
    model, is_fp32 = config.model, config.trainer.precision is Precision.fp32
    local, emulate = local_layers(model), emulation(model)
    fp32, no_fp32 = "trainer.precision=fp32", "trainer.precision=auto or bf16"
    if not local:
        if model.transformer_engine is False:
            why, on = "megatron-core's local layers have no FP8", "model.transformer_engine=null or true"
            yield refusal("model.fp8=true", "model.transformer_engine=false", why, on, emulate)
        if is_fp32:
            why = "Transformer Engine's layers would compute everything outside FP8 in TF32"
            yield refusal("model.fp8=true", fp32, why, no_fp32, emulate)
        return
    if not settings.emulate and is_fp32:
        why = "FP8 products of rows have results in BF16"
        yield refusal("model.fp8_backend=torchao", fp32, why, no_fp32, emulate)
    if model.transformer_engine:
        ways = ["model.transformer_engine=null or false"]
        ways += ["model.fp8_emulate=false"] * (settings.backend is Fp8Backend.transformer_engine)
        yield refusal(local, "model.transformer_engine=true", "megatron-core's local layers compute it", *ways)
    if model.context_parallel_size > 1:
        why = "only Transformer Engine's attention splits sequences, and local layers do not use it"
        cp = f"model.context_parallel_size={model.context_parallel_size}"
        yield refusal(local, cp, why, "model.context_parallel_size=1")


def fp8_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """All problems of the FP8 keys that need no machine, except the shapes of products.

    Rules about layers by name divide by counts, so they need `sizes_known`: all counts are positive.
    """
    config, model, settings = run.config, run.model, run.fp8
    if settings is None:
        return
    problems = list(engine(settings))
    yield from problems
    if problems:
        return
    yield from formats(model, settings)
    yield from torchao(model, settings)
    yield from amax_history(settings)
    if settings.params:
        yield from refusals("model.fp8_params=true", _parameter_obstacles(config, settings), "model.fp8_params=false")
    yield from layer_implementation(config, settings)
    if sizes_known:
        kept = list(layers_in_bf16(model, settings))
        yield from kept
        yield from exclusions(run, settings)
        unknown = list(small_layers(run, settings))
        yield from unknown
        if not kept and not unknown:
            yield from nothing_left(run, settings)
