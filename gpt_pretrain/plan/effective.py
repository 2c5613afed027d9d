"""Requested → effective: for each FP8, parallelism and precision key, the fields of megatron-core it sets, and to what.

The values come from the translations that training uses (`gpt_pretrain.megatron.translate`); only which key reaches
which field is stated here, and `tests/test_plan_effective.py` holds that against translations that differ in one key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from megatron.core.quantization.quant_config import RecipeConfig

from gpt_pretrain.config.choices import Fp8RecipeName, MainParamsDtype, Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import Config, ModelConfig, OptimConfig
from gpt_pretrain.config.typed import show
from gpt_pretrain.megatron.translate import expert_fields, translate_ddp, translate_optimizer, translate_transformer
from gpt_pretrain.spec.fp8 import DELAYED_KEYS, Fp8Settings, fp8_settings
from gpt_pretrain.spec.kernels import Kernels
from gpt_pretrain.spec.platform import Platform

# megatron-core's config classes: how the table calls them, in the order of `Translation`.
TRANSFORMER, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"

# Key → fields of megatron-core's configs that it sets, or helps to set.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "trainer.precision": (
        f"{TRANSFORMER}.bf16",
        f"{TRANSFORMER}.params_dtype",
        f"{TRANSFORMER}.pipeline_dtype",
        f"{OPTIMIZER}.bf16",
        f"{OPTIMIZER}.params_dtype",
    ),
    "model.transformer_engine": (f"{TRANSFORMER}.transformer_impl",),
    "model.fp8": (f"{TRANSFORMER}.fp8",),
    "model.fp8_recipe": (f"{TRANSFORMER}.fp8_recipe", f"{OPTIMIZER}.fp8_recipe"),
    "model.fp8_hybrid": (f"{TRANSFORMER}.fp8",),
    "model.fp8_e4m3": (f"{TRANSFORMER}.fp8",),
    "model.fp8_margin": (f"{TRANSFORMER}.fp8_margin",),
    "model.fp8_interval": (f"{TRANSFORMER}.fp8_interval",),
    "model.fp8_amax_history_len": (f"{TRANSFORMER}.fp8_amax_history_len",),
    "model.fp8_amax_compute_algo": (f"{TRANSFORMER}.fp8_amax_compute_algo",),
    "model.fp8_wgrad": (f"{TRANSFORMER}.fp8_wgrad",),
    "model.fp8_params": (f"{TRANSFORMER}.fp8_param", f"{DDP}.fp8_param_gather"),
    "model.fp8_dot_product_attention": (f"{TRANSFORMER}.fp8_dot_product_attention",),
    "model.fp8_multi_head_attention": (f"{TRANSFORMER}.fp8_multi_head_attention",),
    "model.first_last_layers_bf16": (f"{TRANSFORMER}.first_last_layers_bf16",),
    "model.num_layers_at_start_in_bf16": (f"{TRANSFORMER}.num_layers_at_start_in_bf16",),
    "model.num_layers_at_end_in_bf16": (f"{TRANSFORMER}.num_layers_at_end_in_bf16",),
    "model.fp8_exclude": (f"{TRANSFORMER}.quant_recipe",),
    "model.fp8_emulate": (f"{TRANSFORMER}.transformer_impl",),
    "model.tensor_model_parallel_size": (f"{TRANSFORMER}.tensor_model_parallel_size",),
    "model.pipeline_model_parallel_size": (
        f"{TRANSFORMER}.pipeline_model_parallel_size",
        f"{TRANSFORMER}.deallocate_pipeline_outputs",
    ),
    "model.virtual_pipeline_model_parallel_size": (
        f"{TRANSFORMER}.virtual_pipeline_model_parallel_size",
        f"{TRANSFORMER}.overlap_p2p_comm",
        f"{TRANSFORMER}.batch_p2p_comm",
        f"{DDP}.align_param_gather",
    ),
    "model.context_parallel_size": (f"{TRANSFORMER}.context_parallel_size",),
    "model.expert_model_parallel_size": (f"{TRANSFORMER}.expert_model_parallel_size",),
    "model.expert_tensor_parallel_size": (f"{TRANSFORMER}.expert_tensor_parallel_size",),
    "model.sequence_parallel": (f"{TRANSFORMER}.sequence_parallel",),
    "model.use_distributed_optimizer": (f"{DDP}.use_distributed_optimizer", f"{OPTIMIZER}.use_distributed_optimizer"),
    "model.overlap_grad_reduce": (f"{DDP}.overlap_grad_reduce", f"{DDP}.bucket_size"),
    "model.overlap_param_gather": (f"{DDP}.overlap_param_gather", f"{OPTIMIZER}.overlap_param_gather"),
    "model.ddp_bucket_size": (f"{DDP}.bucket_size",),
    "model.tp_comm_overlap": (
        f"{TRANSFORMER}.tp_comm_overlap",
        f"{TRANSFORMER}.tp_comm_bulk_dgrad",
        f"{TRANSFORMER}.tp_comm_bulk_wgrad",
    ),
    "model.grad_reduce_in_fp32": (f"{DDP}.grad_reduce_in_fp32",),
    "model.optim.use_precision_aware_optimizer": (f"{OPTIMIZER}.use_precision_aware_optimizer",),
    "model.optim.main_params_dtype": (f"{OPTIMIZER}.main_params_dtype",),
    "model.optim.store_param_remainders": (f"{OPTIMIZER}.store_param_remainders",),
    "model.optim.exp_avg_dtype": (f"{OPTIMIZER}.exp_avg_dtype",),
    "model.optim.exp_avg_sq_dtype": (f"{OPTIMIZER}.exp_avg_sq_dtype",),
    "model.activations_checkpoint_granularity": (f"{TRANSFORMER}.recompute_granularity",),
    "model.activations_checkpoint_method": (f"{TRANSFORMER}.recompute_method",),
    "model.activations_checkpoint_num_layers": (f"{TRANSFORMER}.recompute_num_layers",),
}
FP8_KEYS = tuple(key for key in FIELDS if key.startswith("model.fp8_") or key.endswith("_bf16"))
_OVERLAPS = ("model.overlap_grad_reduce", "model.overlap_param_gather", "model.ddp_bucket_size")
_OF_EXPERTS = ("model.expert_model_parallel_size", "model.expert_tensor_parallel_size")
_PRECISION_AWARE, _REMAINDERS = "model.optim.use_precision_aware_optimizer", "model.optim.store_param_remainders"
_KEPT_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
# What emulated layers read instead of megatron-core's field, from `spec.fp8.Fp8Settings`.
_EMULATED = {
    "model.fp8_recipe": "recipe",
    "model.fp8_hybrid": "gradient_format",
    "model.fp8_e4m3": "gradient_format",
    "model.fp8_margin": "margin",
    "model.fp8_amax_history_len": "amax_history_len",
    "model.fp8_amax_compute_algo": "amax_compute_algo",
    "model.fp8_wgrad": "wgrad",
    "model.num_layers_at_start_in_bf16": "num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16": "num_layers_at_end_in_bf16",
    "model.fp8_exclude": "exclude",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key and what becomes of it."""

    key: str
    requested: str
    """As it would be written in YAML."""
    effective: Mapping[str, str]
    """Field of megatron-core's configs, or of the emulated layers, and its value; empty where nothing reads it."""
    inert: str
    """Why the key changes nothing in this run; empty where it counts."""
    note: str
    """What null came to, and what else is worth knowing."""


def translated_fields(config: Config, platform: Platform, kernels: Kernels, num_shards: int) -> dict[str, Any]:
    """Every field of megatron-core's three configs under "Class.field", as training would set it."""
    # megatron-core refuses this one fusion where Transformer Engine does not import, and no key of the table sets it.
    importable = replace(kernels, apply_rope_fusion=False)
    # Nor does it let experts and FP8 come together there: the fields of experts are what the translation makes them.
    without_experts = replace(config, model=replace(config.model, num_moe_experts=None))
    transformer = translate_transformer(without_experts, platform, importable)
    for name, value in expert_fields(config.model, kernels).items():
        setattr(transformer, name, value)
    configs = (
        transformer,
        translate_ddp(config, platform, num_shards),
        translate_optimizer(config, platform),
    )
    return {f"{type(each).__name__}.{name}": value for each in configs for name, value in vars(each).items()}


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, RecipeConfig):
        return "[" + ",".join(matcher.pattern for matcher in value.matchers) + "] in high precision"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_shown(item) for item in value) + "]"
    return value.name if isinstance(value, Enum) else value if isinstance(value, str) else show(value)


def _requested(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _why_inert(model: ModelConfig, settings: Fp8Settings | None, key: str, num_shards: int) -> str:
    """Why a key changes nothing; a rule refuses a run where the user set an FP8 key nevertheless."""
    if key in _OVERLAPS and num_shards == 1:
        return "one data-parallel rank has nothing to exchange"
    if key in _OF_EXPERTS and model.num_moe_experts is None:
        return "model.num_moe_experts=null"
    if key.startswith("model.optim."):
        return _why_inert_of_states(model.optim, key)
    if key not in FP8_KEYS:
        return ""
    if settings is None:
        return "model.fp8=false"
    name = key.removeprefix("model.")
    outside_delayed = settings.recipe is not Fp8RecipeName.delayed
    reasons = {
        **dict.fromkeys(DELAYED_KEYS, f"model.fp8_recipe={settings.recipe.name} has no history" * outside_delayed),
        **({} if outside_delayed else {"fp8_interval": "Transformer Engine computes new scales at every step"}),
        "fp8_hybrid": "overruled by model.fp8_e4m3=true" if model.fp8_e4m3 and model.fp8_hybrid else "",
        "fp8_wgrad": "" if settings.emulate else "Transformer Engine 2.12 has no weight gradient outside of FP8",
        "fp8_multi_head_attention": "megatron-core 0.19 hands BF16 tensors to attention and back",
    }
    if not model.first_last_layers_bf16:
        reasons |= dict.fromkeys(_KEPT_LAYERS, "model.first_last_layers_bf16=false")
    return reasons.get(name, "")


def _why_inert_of_states(optim: OptimConfig, key: str) -> str:
    if key != _PRECISION_AWARE and not optim.use_precision_aware_optimizer:
        return f"{_PRECISION_AWARE}=false"
    fp16 = optim.main_params_dtype is MainParamsDtype.fp16
    return "fp16 masters are stored whole" if fp16 and key == _REMAINDERS else ""


def _resolved_null(config: Config, key: str, settings: Fp8Settings | None, kernels: Kernels) -> str:
    """What a null, or a word that leaves the choice open, came to."""
    model = config.model
    if key == "trainer.precision" and config.trainer.precision is Precision.auto:
        return "auto is bf16 on a GPU"
    if _requested(config, key) is not None:
        return ""
    needed = "model.fp8_params=true needs it" if model.fp8_params else "nothing needs it"
    notes = {
        "model.transformer_engine": "on a GPU" if kernels.transformer_engine else "emulated FP8 needs local layers",
        "model.use_distributed_optimizer": f"null is {show(uses_distributed_optimizer(model))}: {needed}",
    }
    if settings is not None:
        formats = f"{settings.recipe.name} uses {'hybrid' if settings.hybrid else 'e4m3'}"
        notes |= dict.fromkeys(("model.fp8_hybrid", "model.fp8_e4m3"), formats)
        notes |= {f"model.{name}": "null is the default" for name in ("fp8_recipe", *DELAYED_KEYS)}
    return notes.get(key, "")


def _emulated(key: str, settings: Fp8Settings) -> dict[str, str]:
    field = _EMULATED.get(key)
    return {} if field is None else {f"emulated layers: {field}": _shown(getattr(settings, field))}


def effective_settings(config: Config, platform: Platform, kernels: Kernels, num_shards: int) -> Iterator[Setting]:
    """Each FP8, parallelism and precision key of a checked configuration, in the order of the table above.

    Args:
        config: The configuration.
        platform: The planned machine.
        kernels: Which implementations it runs on there.
        num_shards: Ranks that reduce gradients with each other, DP · CP.
    """
    settings = fp8_settings(config.model)
    fields = translated_fields(config, platform, kernels, num_shards)
    for key, names in FIELDS.items():
        inert = _why_inert(config.model, settings, key, num_shards)
        effective = {name: _shown(fields[name]) for name in names}
        if settings is not None and settings.emulate and key in (*FP8_KEYS, "model.fp8"):
            # megatron-core is told of no FP8 then.
            effective = _emulated(key, settings) or effective
        elif key in FP8_KEYS and settings is None:
            effective = {}
        yield Setting(
            key=key,
            requested=_shown(_requested(config, key)),
            effective=effective,
            inert=inert,
            note="" if inert else _resolved_null(config, key, settings, kernels),
        )
