"""Requested → effective: each FP8, parallelism and precision key, and the fields of megatron-core that it sets.

Fields and values are those that training hands to megatron-core (`spec.core_fields`), and why a key changes nothing is
what the rules say (`rules.no_effect`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.errors import show
from gpt_pretrain.rules.no_effect import value_of, why_no_effect
from gpt_pretrain.spec.core_fields import (
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
)
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.recipes import DELAYED_KEYS
from gpt_pretrain.spec.run_spec import RunSpec

# The keys that the plan shows, beside trainer.precision.
_OF_MODEL = (
    "transformer_engine fp8 fp8_backend fp8_recipe fp8_hybrid fp8_e4m3 fp8_margin fp8_interval fp8_amax_history_len "
    "fp8_amax_compute_algo fp8_wgrad fp8_params fp8_dot_product_attention fp8_multi_head_attention "
    "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_exclude fp8_emulate "
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
    "use_distributed_optimizer overlap_grad_reduce overlap_param_gather ddp_bucket_size tp_comm_overlap "
    "overlap_moe_expert_parallel_comm grad_reduce_in_fp32 optim.use_precision_aware_optimizer "
    "optim.main_params_dtype optim.store_param_remainders "
    "optim.exp_avg_dtype optim.exp_avg_sq_dtype activations_checkpoint_granularity activations_checkpoint_method "
    "activations_checkpoint_num_layers"
)
KEYS = ("trainer.precision", *(f"model.{name}" for name in _OF_MODEL.split()))
# The fields of `Fp8Settings` that local layers read in place of megatron-core's.
_IN_LOCAL_LAYERS = {
    "model.fp8_backend": "backend",
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
    """Field of megatron-core's configs, or of the local layers, and its value; empty where nothing reads it."""
    inert: str
    """Why the key changes nothing in this run; empty where it counts."""
    note: str
    """What null came to."""


def fields_by_class(spec: RunSpec) -> dict[str, list[Field]]:
    """Every field that training sets, by the name of megatron-core's class that has it."""
    return {
        "TransformerConfig": transformer_fields(spec),
        "DistributedDataParallelConfig": ddp_fields(spec),
        "OptimizerConfig": [*optimizer_fields(spec), *optimizer_state_fields(spec)],
    }


def is_fp8_key(key: str) -> bool:
    """Whether a key says something about FP8 once `model.fp8` is on."""
    return key.startswith("model.fp8_") or key.endswith("_bf16")


def _shown(value: Any) -> str:
    if isinstance(value, HighPrecision):
        return f"[{','.join(value.patterns)}] in high precision"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_shown, value)) + "]"
    if isinstance(value, Enum):
        return str(value.value)
    return value if isinstance(value, str) else show(value)


def _resolved_null(spec: RunSpec, key: str) -> str:
    """The value that a null, or `auto`, came to, with the reason."""
    config, model, fp8 = spec.config, spec.model, spec.fp8
    if key == "trainer.precision" and config.trainer.precision is Precision.auto:
        return "auto is bf16 on a GPU"
    if value_of(config, key) is not None:
        return ""
    needed = "model.fp8_params=true needs it" if model.fp8_params else "nothing needs it"
    notes = {
        "model.transformer_engine": "on a GPU" if spec.kernels.transformer_engine else "local layers compute this FP8",
        "model.use_distributed_optimizer": f"null is {show(uses_distributed_optimizer(model))}: {needed}",
    }
    if fp8 is not None:
        formats = f"{fp8.recipe.name} uses {'hybrid' if fp8.hybrid else 'e4m3'}"
        notes |= dict.fromkeys(("model.fp8_hybrid", "model.fp8_e4m3"), formats)
        notes |= {f"model.{name}": "null is the default" for name in ("fp8_backend", "fp8_recipe", *DELAYED_KEYS)}
    return notes.get(key, "")


def _local(key: str, settings: Fp8Settings) -> dict[str, str]:
    name = _IN_LOCAL_LAYERS.get(key)
    if name is None:
        return {}
    value = getattr(settings, name)
    return {f"{_layers(settings)}: {name}": value.name if name == "recipe" else _shown(value)}


def _layers(settings: Fp8Settings) -> str:
    return "emulated layers" if settings.emulate else "layers of TorchAO"


def effective_settings(spec: RunSpec) -> Iterator[Setting]:
    """Each FP8, parallelism and precision key of a checked run."""
    reached: dict[str, dict[str, str]] = {}
    for class_name, fields in fields_by_class(spec).items():
        for field in fields:
            for key in field.keys:
                reached.setdefault(key, {})[f"{class_name}.{field.name}"] = _shown(field.value)
    for key in KEYS:
        inert = why_no_effect(spec, key) or _one_rank(spec, key)
        effective = reached.get(key, {})
        is_fp8 = is_fp8_key(key)
        if spec.fp8 is not None and spec.fp8.in_local_layers and (is_fp8 or key == "model.fp8"):
            # megatron-core gets none of these keys then.
            requested = {} if inert else {_layers(spec.fp8): _shown(value_of(spec.config, key))}
            effective = _local(key, spec.fp8) or effective or requested
        elif is_fp8 and spec.fp8 is None:
            effective = {}
        yield Setting(
            key=key,
            requested=_shown(value_of(spec.config, key)),
            effective=effective,
            inert=inert,
            note="" if inert else _resolved_null(spec, key),
        )


def _one_rank(spec: RunSpec, key: str) -> str:
    """Why a key about exchanges changes nothing on one rank. It does no harm there, so no rule refuses it."""
    exchanges = ("model.overlap_grad_reduce", "model.overlap_param_gather", "model.ddp_bucket_size")
    return "one data-parallel rank has nothing to exchange" if key in exchanges and spec.layout.shards == 1 else ""
