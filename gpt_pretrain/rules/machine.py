"""Explicit settings that this machine cannot meet, and what the user should know about it.

An FP8 recipe needs a GPU, a CUDA version and a Transformer Engine (TE) that support it, and environment variables that
do not change it. TE 2.12 asserts most of this when the first layer runs, and reads its variables silently.
"""

from collections.abc import Iterator
from dataclasses import replace

from gpt_pretrain.config.choices import CrossEntropyFusion, Fp8Backend, Precision
from gpt_pretrain.config.errors import ConfigError, counted, how_to_install, refusal, show
from gpt_pretrain.config.keys import value_of
from gpt_pretrain.config.recipes import Engine, Recipe
from gpt_pretrain.features.fp8_attention import is_attention_delayed
from gpt_pretrain.features.registry import all_features
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.run.fp8 import emulation, local_layers
from gpt_pretrain.run.platform import ATTENTION, RECIPE_VARIABLES, Platform, read_version
from gpt_pretrain.run.run_spec import RunSpec, why_local_layers

# The oldest version that this project was checked and tested against.
_OLDEST_TRANSFORMER_ENGINE = (2, 12)


def _needs(spec: RunSpec, key: str, needed: str, why: str, instead: str = "null or false") -> str:
    """The message about a key of `model.` whose value needs what this machine lacks."""
    value = value_of(spec.config, f"model.{key}")
    return f"model.{key}={show(value)} needs {needed}: {why}; use {instead}"


def _why_no_fp8(platform: Platform, backend: Fp8Backend) -> str | None:
    """What this machine lacks for any FP8 recipe of an engine; None if nothing."""
    of_torchao = backend is Fp8Backend.torchao
    library, why_not = "Transformer Engine", platform.why_no_transformer_engine
    if of_torchao:
        missing = f"{platform.torchao_problem or 'it is not installed'}; {how_to_install('torchao')}"
        library, why_not = "TorchAO", missing if platform.cuda else "there is no CUDA device"
    if platform.compute_capability is None:
        return f"a GPU with FP8 (Ada, Hopper or newer) and {library}, but {why_not}"
    if not platform.has_fp8:
        return f"a GPU with FP8 (compute capability 8.9 or newer), and this is {platform.gpu}"
    version = platform.torchao if of_torchao else platform.transformer_engine
    if version is None:
        return f"{library}: {why_not}"
    if not of_torchao and read_version(version).release < _OLDEST_TRANSFORMER_ENGINE:
        return f"Transformer Engine 2.12 or newer, and {version} is installed; {how_to_install('te')}"
    return None


def _why_no_scaling(platform: Platform, engine: Engine) -> str | None:
    """What a GPU with FP8 lacks for a recipe; None if nothing."""
    capability, cuda = platform.compute_capability, platform.torch_cuda
    assert capability is not None, "asked only of a GPU"
    first, beyond = engine.capability
    fits = first <= capability and (beyond is None or capability < beyond)
    if fits and (engine.cuda is None or (cuda is not None and read_version(cuda).release >= engine.cuda)):
        return None
    return f"{engine.hardware}, and this is {platform.gpu}" + (f", CUDA {cuda}" if engine.cuda is not None else "")


def recipe_variable_problems(platform: Platform, recipe: Recipe, *, attention: bool) -> Iterator[str]:
    """Environment variables that would silently change a recipe, on a machine with a GPU."""
    about = {recipe.preset, *([ATTENTION] if attention else [])}
    assert platform.compute_capability is not None, "asked only of a GPU"
    for name, value in platform.recipe_variables.items():
        neutral, where, effect = RECIPE_VARIABLES[name]
        # Delayed scaling does so anyway, and tensorwise has no other way on Hopper.
        is_delayed = name == "NVTE_DPA_FP8_RECIPE" and is_attention_delayed(platform)
        stands = is_delayed and (recipe.keeps_history or platform.is_hopper)
        if where in about and value != neutral and not stands:
            yield f"{name}={value} in the environment {effect}, which the configuration does not say; unset it"


def why_no_recipe(platform: Platform, recipe: Recipe) -> str | None:
    """What this machine lacks for a recipe, as a phrase that follows "needs"; None if nothing."""
    return _why_no_fp8(platform, recipe.backend) or _why_no_scaling(platform, recipe.engine)


def _fp8_problems(spec: RunSpec) -> Iterator[str]:
    """FP8 that this machine cannot compute or its environment would change."""
    settings, platform = spec.fp8, spec.platform
    if settings is None or settings.emulate:
        return
    emulate = f"{emulation(spec.model)} emulates it here, slowly"
    problem = _why_no_fp8(platform, settings.backend)
    if problem is not None:
        engine = " with model.fp8_backend=torchao" if settings.backend is Fp8Backend.torchao else ""
        yield f"model.fp8=true{engine} needs {problem}; {emulate}"
        return
    problem = _why_no_scaling(platform, settings.recipe.engine)
    if problem is not None:
        yield f"model.fp8_recipe={settings.recipe.name} needs {problem}; {emulate}"
        return
    yield from recipe_variable_problems(platform, settings.recipe, attention=settings.dot_product_attention)


def machine_notes(spec: RunSpec) -> list[str]:
    """What the user should know about this machine before the run starts."""
    notes = []
    model, platform = spec.model, spec.platform
    unasked = model.transformer_engine is None and not local_layers(model)
    if platform.cuda and platform.transformer_engine is None and unasked:
        why = platform.why_no_transformer_engine
        notes.append(f"This GPU runs megatron-core's local layers, without Transformer Engine: {why}")
    notes += _broken_libraries(spec)
    of_torchao = spec.fp8 is not None and spec.fp8.backend is Fp8Backend.torchao
    engine = platform.torchao if of_torchao else platform.transformer_engine
    if model.fp8_emulate and engine is not None and platform.has_fp8:
        notes.append(
            "FP8 is emulated, slower than BF16, on a GPU that has FP8 itself; leave model.fp8_emulate out to use the "
            "hardware"
        )
    return notes


def _broken_libraries(spec: RunSpec) -> Iterator[str]:
    """Libraries that are installed and broken, where null would otherwise turn their features on."""
    for feature in all_features():
        library, platform = feature.library, spec.platform
        if library is None or library.name not in platform.library_problems:
            continue
        mended = replace(platform, libraries={**platform.libraries, library.name: library.oldest})
        unasked = value_of(spec.config, f"model.{feature.key}") is None
        if unasked and feature.is_used(build_run_spec(spec.config, spec.launch, mended)):
            yield f"{feature.without_library}: {platform.library_problems[library.name]}"


def check_machine(spec: RunSpec) -> None:
    """Refuses explicit settings that this machine cannot meet.

    Raises:
        ConfigError: Each such setting, its reason and the way out.
    """
    if problems := machine_problems(spec):
        raise ConfigError(problems)


def machine_problems(spec: RunSpec) -> list[str]:
    """What `check_machine` refuses."""
    return [
        *_fp8_problems(spec),
        *_layer_problems(spec),
        *_kernel_problems(spec),
        *_auto_problems(spec),
        *_process_problems(spec),
    ]


def _layer_problems(spec: RunSpec) -> Iterator[str]:
    """Settings that need Transformer Engine's layers without having them, and what those layers cannot do."""
    model, platform, te = spec.model, spec.platform, spec.kernels.transformer_engine
    missing, layers, local = platform.transformer_engine is None, "Transformer Engine layers", why_local_layers(spec)
    if model.transformer_engine and missing:
        ways = "null (Transformer Engine where available) or false"
        yield _needs(spec, "transformer_engine", "Transformer Engine", platform.why_no_transformer_engine, ways)
    elif model.context_parallel_size > 1 and not te:
        yield _needs(spec, "context_parallel_size", "Transformer Engine's attention", local, "1")
    for key in ("apply_rope_fusion", "moe_grouped_gemm"):
        if getattr(model, key) and not te:
            yield _needs(spec, key, layers, local)
    if model.moe_grouped_kernel is not None and not model.fp8_emulate and spec.kernels.moe_grouped_kernel is None:
        why = "experts are computed one by one" if te else local
        yield _needs(spec, "moe_grouped_kernel", f"grouped products of {layers}", why, "null")
    if te and spec.config.trainer.precision is Precision.fp32:
        yield refusal(
            "trainer.precision=fp32", layers, "they multiply in TF32", "bf16", "model.transformer_engine=false"
        )


def _kernel_problems(spec: RunSpec) -> Iterator[str]:
    """Features and kernels that are not installed, cannot be built, or need a GPU."""
    model, platform, kernels = spec.model, spec.platform, spec.kernels
    for feature in all_features():
        if feature.is_asked(model):
            yield from feature.problems_here(spec)
    if model.masked_softmax_fusion and (kernels.transformer_engine or not platform.apex_softmax):
        why = "apex's softmax kernels are not installed"
        if kernels.transformer_engine:
            why = "Transformer Engine layers have their own attention"
        yield f"model.masked_softmax_fusion=true has no effect: {why}; use null or false"
    for key in ("bias_activation_fusion", "bias_dropout_add_fusion"):
        if getattr(model, key) and not platform.cuda:
            yield _needs(spec, key, "a GPU", "there is no CUDA device")
    if model.cross_entropy_fusion_impl is CrossEntropyFusion.native:
        if not platform.cuda:
            yield _needs(spec, "cross_entropy_fusion_impl", "a GPU", "there is no CUDA device", "null or linear")
        elif spec.config.trainer.precision is Precision.fp32:
            yield (
                "model.cross_entropy_fusion_impl=native rounds the gradient of the logits to BF16, and "
                "trainer.precision=fp32; use null or linear"
            )


def _auto_problems(spec: RunSpec) -> Iterator[str]:
    """What fp32 cannot do if precision=auto becomes fp32; the cross-field rules refuse an explicit fp32."""
    model = spec.model
    if spec.platform.cuda or spec.config.trainer.precision is not Precision.auto:
        return
    for asked, key, why in (
        (
            spec.stored_fp8 is not None and spec.te_fp8 is None,
            "fp8_params",
            "casts weights from masters, which weights in fp32 have none of",
        ),
        (model.optim.use_precision_aware_optimizer, "optim.use_precision_aware_optimizer", "needs weights in BF16"),
        (model.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm", "works in bf16 alone"),
    ):
        if asked:
            yield (
                f"model.{key}=true {why}, and trainer.precision=auto is fp32 without a CUDA device; use "
                f"trainer.precision=bf16, or model.{key}=false"
            )


def _process_problems(spec: RunSpec) -> Iterator[str]:
    """More processes than GPUs."""
    launch, platform = spec.launch, spec.platform
    own_gpu = launch.launcher == "srun" and platform.num_gpus == 1
    if platform.cuda and launch.local_rank >= platform.num_gpus and not own_gpu:
        yield (
            f"the launcher started {launch.local_world_size} processes on this node, which has "
            f"{counted(platform.num_gpus, 'GPU')}; start one per GPU"
        )
