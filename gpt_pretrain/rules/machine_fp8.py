"""FP8 on this machine: what a recipe needs of GPU, CUDA and Transformer Engine (TE), and what would change it unsaid.

TE 2.12 asserts most of this when the first layer runs. Its environment variables it reads silently.
"""

from collections.abc import Iterator

from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import how_to_install
from gpt_pretrain.spec.fp8 import Fp8Settings, emulation
from gpt_pretrain.spec.platform import (
    ATTENTION,
    BLACKWELL,
    CONSUMER_BLACKWELL,
    HOPPER,
    RECIPE_VARIABLES,
    Platform,
    leading_version,
)
from gpt_pretrain.spec.recipes import Recipe
from gpt_pretrain.spec.run_spec import RunSpec

# The first version whose recipes and quantizers this project was read against and tested with.
_OLDEST_TRANSFORMER_ENGINE = (2, 12)


def _why_no_fp8(platform: Platform) -> str | None:
    """What this machine lacks for any FP8."""
    if platform.compute_capability is None:
        return f"a GPU with FP8 (Ada, Hopper or newer) and Transformer Engine, but {platform.why_no_transformer_engine}"
    if not platform.has_fp8:
        return f"a GPU with FP8 (compute capability 8.9 or newer), and this is {platform.gpu}"
    if platform.transformer_engine is None:
        return f"Transformer Engine: {platform.why_no_transformer_engine}"
    if leading_version(platform.transformer_engine) < _OLDEST_TRANSFORMER_ENGINE:
        return (
            f"Transformer Engine 2.12 or newer, and {platform.transformer_engine} is installed; {how_to_install('te')}"
        )
    return None


def _why_no_scaling(platform: Platform, recipe: Recipe) -> str | None:
    """What a GPU with FP8 lacks for a recipe."""
    capability, cuda = platform.compute_capability, platform.torch_cuda
    assert capability is not None, "asked only of a GPU"
    first, beyond = recipe.capability
    fits = first <= capability and (beyond is None or capability < beyond)
    if fits and (recipe.cuda is None or (cuda is not None and leading_version(cuda) >= recipe.cuda)):
        return None
    return f"{recipe.hardware}, and this is {platform.gpu}" + (f", CUDA {cuda}" if recipe.cuda is not None else "")


def _attention(spec: RunSpec, settings: Fp8Settings) -> Iterator[str]:
    """What cuDNN's FP8 attention takes (TE's get_attention_backend and nvte_get_fused_attn_backend)."""
    platform, width = spec.platform, kv_channels(spec.model)
    capability = platform.compute_capability
    assert capability is not None, "asked only of a GPU"
    key = "model.fp8_dot_product_attention=true"
    if not HOPPER <= capability < CONSUMER_BLACKWELL:
        yield f"{key} needs compute capability 9.x or 10.x, and this is {platform.gpu}; use false"
    elif capability < BLACKWELL and width != 128:
        yield f"{key} needs heads of 128 channels to train on Hopper, and model.kv_channels={width}; use false"
    elif width > 128 or width % 16:
        yield f"{key} needs heads of a multiple of 16 up to 128 channels, and model.kv_channels={width}; use false"
    if capability < BLACKWELL and not settings.recipe.keeps_history and not _is_attention_delayed(platform):
        yield (
            f"{key} with model.fp8_recipe={settings.recipe.name}: cuDNN's FP8 attention takes delayed scales only on "
            "Hopper; use false, or fp8=delayed, or set NVTE_DPA_FP8_RECIPE=DelayedScaling in the environment for "
            "attention alone"
        )


def _is_attention_delayed(platform: Platform) -> bool:
    return platform.recipe_variables.get("NVTE_DPA_FP8_RECIPE") == "DelayedScaling"


def recipe_variable_problems(platform: Platform, recipe: Recipe, *, attention: bool) -> Iterator[str]:
    """Variables that would change a recipe behind the configuration's back; asked only of a machine with a GPU.

    Args:
        platform: The machine and its environment.
        recipe: The recipe of the linear layers.
        attention: Whether attention's products run in FP8, too.
    """
    about = {recipe.name, *([ATTENTION] if attention else [])}
    assert platform.compute_capability is not None, "asked only of a GPU"
    for name, value in platform.recipe_variables.items():
        neutral, where, effect = RECIPE_VARIABLES[name]
        # What delayed scaling does anyway, and the one way that tensorwise has on Hopper.
        is_delayed = name == "NVTE_DPA_FP8_RECIPE" and _is_attention_delayed(platform)
        stands = is_delayed and (recipe.keeps_history or platform.is_hopper)
        if where in about and value != neutral and not stands:
            yield f"{name}={value} in the environment {effect}, which the configuration does not say; unset it"


def why_no_recipe(platform: Platform, recipe: Recipe) -> str | None:
    """What this machine lacks for a recipe, as a phrase that follows "needs"; None where it has all."""
    return _why_no_fp8(platform) or _why_no_scaling(platform, recipe)


def fp8_machine_problems(spec: RunSpec) -> Iterator[str]:
    """FP8 that this machine cannot compute, or that its environment would change."""
    settings, platform = spec.te_fp8, spec.platform
    if settings is None:
        return
    emulate = f"{emulation(spec.model)} computes the same values here, exactly but slowly"
    problem = _why_no_fp8(platform)
    if problem is not None:
        yield f"model.fp8=true needs {problem}; {emulate}"
        return
    problem = _why_no_scaling(platform, settings.recipe)
    if problem is not None:
        yield f"model.fp8_recipe={settings.recipe.name} needs {problem}; {emulate}"
        return
    if settings.dot_product_attention:
        yield from _attention(spec, settings)
    yield from recipe_variable_problems(platform, settings.recipe, attention=settings.dot_product_attention)
