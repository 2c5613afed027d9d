"""FP8 on this machine: what a recipe needs of GPU, CUDA and Transformer Engine (TE), and what would change it unsaid.

TE 2.12 asserts most of this when the first layer runs. Its environment variables it reads silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt_pretrain.config.choices import Fp8RecipeName
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.install import how_to_install
from gpt_pretrain.config.schema import Config
from gpt_pretrain.spec.fp8 import Fp8Settings, emulation, fp8_settings

if TYPE_CHECKING:
    from gpt_pretrain.spec.platform import Platform

# The first version whose recipes and quantizers this project was read against and tested with.
_OLDEST_TRANSFORMER_ENGINE = (2, 12)
# transformer_engine.pytorch.quantization.check_fp8_support: Ada and newer.
_FP8_CAPABILITY = (8, 9)
_HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL = (9, 0), (10, 0), (12, 0)
_ATTENTION = "attention"
# Environment variables that change what a recipe of TE 2.12 computes: the value that changes nothing, which products
# they are about, and what else they do. NVTE_UNFUSED_FP8_UPDATE is none of them: it computes the same scales in Python.
RECIPE_VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("0", "tensorwise", "rounds scales to powers of two"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("0", "blockwise", "makes scales other numbers than powers of two"),
    "NVTE_DPA_FP8_RECIPE": ("", _ATTENTION, "gives attention another recipe"),
    "NVTE_DPA_FP8DS_AMAX_ALGO": ("most_recent", _ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": ("1", _ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": ("1", _ATTENTION, "lets ranks quantise attention with different scales"),
    "NVTE_FP8_DPA_BWD": ("1", _ATTENTION, "takes attention's backward pass out of FP8"),
    "NVTE_DPA_FP8CS_O_in_F16": ("1", _ATTENTION, "keeps attention's output in FP8 for the backward pass"),
    "NVTE_UnfusedDPA_Emulate_FP8": ("0", _ATTENTION, "lets attention fall back to an emulation"),
}


def recipe_variables() -> dict[str, str]:
    """Those of `RECIPE_VARIABLES` that the environment sets, with their values."""
    return {name: os.environ[name] for name in RECIPE_VARIABLES if name in os.environ}


def has_fp8(platform: Platform) -> bool:
    """Whether the GPU multiplies in FP8."""
    return platform.compute_capability is not None and platform.compute_capability >= _FP8_CAPABILITY


def is_hopper(platform: Platform) -> bool:
    """Whether the GPU is a Hopper: its FP8 products read rows of both operands, so tensors are kept transposed, too."""
    return platform.compute_capability is not None and _HOPPER <= platform.compute_capability < _BLACKWELL


def leading_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.12.0+abc" gives (2, 12, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))


def describe_gpu(platform: Platform) -> str:
    """Its name and compute capability, for messages."""
    assert platform.compute_capability is not None, "asked only of a GPU"
    major, minor = platform.compute_capability
    return f"{platform.device_name}, compute capability {major}.{minor}"


def _why_no_fp8(platform: Platform, no_te: str) -> str | None:
    """What this machine lacks for any FP8."""
    if platform.compute_capability is None:
        return f"a GPU with FP8 (Ada, Hopper or newer) and Transformer Engine, but {no_te}"
    if not has_fp8(platform):
        return f"a GPU with FP8 (compute capability 8.9 or newer), and this is {describe_gpu(platform)}"
    if platform.transformer_engine is None:
        return f"Transformer Engine: {no_te}"
    if leading_version(platform.transformer_engine) < _OLDEST_TRANSFORMER_ENGINE:
        return (
            f"Transformer Engine 2.12 or newer, and {platform.transformer_engine} is installed; {how_to_install('te')}"
        )
    return None


def _why_no_scaling(platform: Platform, recipe: Fp8RecipeName) -> str | None:
    """What a GPU with FP8 lacks for a recipe (transformer_engine.pytorch.quantization.check_recipe_support)."""
    capability, cuda = platform.compute_capability, platform.torch_cuda
    assert capability is not None, "asked only of a GPU"
    if recipe is Fp8RecipeName.blockwise and (capability < _HOPPER or cuda is None or leading_version(cuda) < (12, 9)):
        return f"compute capability 9.0 and CUDA 12.9 or newer, and this is {describe_gpu(platform)}, CUDA {cuda}"
    if recipe is Fp8RecipeName.mxfp8 and not _BLACKWELL <= capability < _CONSUMER_BLACKWELL:
        return f"compute capability 10.x (Blackwell of the data centre), and this is {describe_gpu(platform)}"
    return None


def _attention(config: Config, settings: Fp8Settings, platform: Platform) -> Iterator[str]:
    """What cuDNN's FP8 attention takes (TE's get_attention_backend and nvte_get_fused_attn_backend)."""
    capability, width = platform.compute_capability, kv_channels(config.model)
    assert capability is not None, "asked only of a GPU"
    key = "model.fp8_dot_product_attention=true"
    if not _HOPPER <= capability < _CONSUMER_BLACKWELL:
        yield f"{key} needs compute capability 9.x or 10.x, and this is {describe_gpu(platform)}; use false"
    elif capability < _BLACKWELL and width != 128:
        yield f"{key} needs heads of 128 channels to train on Hopper, and model.kv_channels={width}; use false"
    elif width > 128 or width % 16:
        yield f"{key} needs heads of a multiple of 16 up to 128 channels, and model.kv_channels={width}; use false"
    if capability < _BLACKWELL and settings.recipe is Fp8RecipeName.tensorwise and not _is_attention_delayed(platform):
        yield (
            f"{key} with model.fp8_recipe=tensorwise: cuDNN's FP8 attention takes delayed scales only on Hopper; use "
            "false, or fp8=delayed, or set NVTE_DPA_FP8_RECIPE=DelayedScaling in the environment for attention alone"
        )


def _is_attention_delayed(platform: Platform) -> bool:
    return platform.recipe_variables.get("NVTE_DPA_FP8_RECIPE") == "DelayedScaling"


def recipe_variable_problems(platform: Platform, recipe: Fp8RecipeName, *, attention: bool) -> Iterator[str]:
    """Variables that would change a recipe behind the configuration's back; asked only of a machine with a GPU.

    Args:
        platform: The machine and its environment.
        recipe: The recipe of the linear layers.
        attention: Whether attention's products run in FP8, too.
    """
    about = {recipe.name, *([_ATTENTION] if attention else [])}
    assert platform.compute_capability is not None, "asked only of a GPU"
    is_hopper = platform.compute_capability < _BLACKWELL
    for name, value in platform.recipe_variables.items():
        neutral, where, effect = RECIPE_VARIABLES[name]
        # What delayed scaling does anyway, and the one way that tensorwise has on Hopper.
        is_delayed = name == "NVTE_DPA_FP8_RECIPE" and _is_attention_delayed(platform)
        stands = is_delayed and (recipe is Fp8RecipeName.delayed or is_hopper)
        if where in about and value != neutral and not stands:
            yield f"{name}={value} in the environment {effect}, which the configuration does not say; unset it"


def why_no_recipe(platform: Platform, recipe: Fp8RecipeName, no_te: str) -> str | None:
    """What this machine lacks for a recipe, as a phrase that follows "needs"; None where it has all.

    Args:
        platform: The machine.
        recipe: The recipe.
        no_te: Why Transformer Engine cannot be used, where it cannot.
    """
    return _why_no_fp8(platform, no_te) or _why_no_scaling(platform, recipe)


def fp8_platform_problems(config: Config, platform: Platform, no_te: str) -> Iterator[str]:
    """FP8 that this machine cannot compute, or that its environment would change.

    Args:
        config: The run's configuration.
        platform: This machine.
        no_te: Why Transformer Engine cannot be used, where it cannot.
    """
    settings = fp8_settings(config.model)
    if settings is None or settings.emulate:
        return
    emulate = f"{emulation(config.model)} computes the same values here, exactly but slowly"
    problem = _why_no_fp8(platform, no_te)
    if problem is not None:
        yield f"model.fp8=true needs {problem}; {emulate}"
        return
    problem = _why_no_scaling(platform, settings.recipe)
    if problem is not None:
        yield f"model.fp8_recipe={settings.recipe.name} needs {problem}; {emulate}"
        return
    if settings.dot_product_attention:
        yield from _attention(config, settings, platform)
    yield from recipe_variable_problems(platform, settings.recipe, attention=settings.dot_product_attention)
