"""What a live linear layer says of itself: the recipe object that it used last, and how its weight is stored."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor

from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.recipes import RECIPES

NOT_IN_FP8: Mapping[str, str] = {"recipe": "none"}


def planned_recipe(settings: Fp8Settings) -> Mapping[str, str]:
    """What `live_recipe` says of a layer that does as the settings say."""
    recipe = settings.recipe
    said = {"recipe": recipe.te_class, "format": "HYBRID" if settings.hybrid else "E4M3"}
    if recipe.keeps_history:
        said |= {
            "margin": str(settings.margin),
            "amax history": str(settings.amax_history_len),
            "amax of the history": settings.amax_compute_algo.value,
            "amax reduced over ranks": "True",
        }
    if recipe.scales_flag is not None:
        said["scales"] = recipe.scales
    return said | {"FP8 attention": str(settings.dot_product_attention)}


def live_recipe(module: torch.nn.Module) -> Mapping[str, str]:
    """The recipe of the last forward pass: of an emulated layer, of a Transformer Engine layer, or none."""
    settings = getattr(module, "fp8_settings", None)
    if isinstance(settings, Fp8Settings):
        return planned_recipe(settings)
    if not getattr(module, "fp8", False):
        return NOT_IN_FP8
    meta: Any = module.fp8_meta
    recipe = meta["recipe"]
    name = next(cls.__name__ for cls in type(recipe).__mro__ if cls.__module__.startswith("transformer_engine."))
    said = {"recipe": name, "format": recipe.fp8_format.name}
    known = next((each for each in RECIPES.values() if each.te_class == name), None)
    if known is not None and known.keeps_history:
        # The history that is there, not the one that the recipe asks for.
        said |= {
            "margin": str(recipe.margin),
            "amax history": str(meta["scaling_fwd"].amax_history.shape[0]),
            "amax of the history": str(recipe.amax_compute_algo),
            "amax reduced over ranks": str(recipe.reduce_amax),
        }
    if known is not None and known.scales_flag is not None:
        flag, if_true, if_false = known.scales_flag
        said["scales"] = if_true if getattr(recipe, flag) else if_false
    return said | {"FP8 attention": str(recipe.fp8_dpa)}


def weight_storage(module: torch.nn.Module) -> str:
    """How a linear layer stores its weights: "fp8", or their type. One of experts has several: weight0, weight1, …."""
    stored = {
        "fp8" if is_float8tensor(parameter) else str(parameter.dtype).removeprefix("torch.")
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    return " and ".join(sorted(stored))


def parameter_bytes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
    """Bytes of all these parameters, and of those stored in FP8; scales are left out."""
    total = in_fp8 = 0
    for parameter in parameters:
        if is_float8tensor(parameter):
            total += parameter.numel()
            in_fp8 += parameter.numel()
        else:
            total += parameter.numel() * parameter.element_size()
    return total, in_fp8
