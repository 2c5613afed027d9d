"""From a run to megatron-core's configs: the fields of `spec.core_fields`, in the types of torch and megatron-core."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.spec.core_fields import (
    ActivationFunction,
    Dtype,
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
)
from gpt_pretrain.spec.run_spec import RunSpec

_ACTIVATIONS = {
    ActivationFunction.silu: F.silu,
    ActivationFunction.gelu: F.gelu,
    ActivationFunction.gelu_tanh: partial(F.gelu, approximate="tanh"),
}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The type of torch with this name."""
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _live(value: Any) -> Any:
    """A field's value in the type that megatron-core expects."""
    if isinstance(value, Dtype):
        return torch_dtype(value)
    if isinstance(value, ActivationFunction):
        return _ACTIVATIONS[value]
    if isinstance(value, HighPrecision):
        override = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        overrides = {"high_precision": override} if value.patterns else {}
        return RecipeConfig([GlobMatcher(pattern, "high_precision") for pattern in value.patterns], overrides)
    return value


def _arguments(fields: Iterable[Field]) -> dict[str, Any]:
    return {field.name: _live(field.value) for field in fields}


def translate_transformer(spec: RunSpec) -> TransformerConfig:
    """The config of the layers."""
    return TransformerConfig(**_arguments(transformer_fields(spec)))


def translate_ddp(spec: RunSpec) -> DistributedDataParallelConfig:
    """The config of gradient reduction and parameter gathering."""
    return DistributedDataParallelConfig(**_arguments(ddp_fields(spec)))


def translate_optimizer(spec: RunSpec) -> OptimizerConfig:
    """The config of the optimizer."""
    options = OptimizerConfig(**_arguments(optimizer_fields(spec)))
    if spec.model.optim.use_precision_aware_optimizer:
        # Set after megatron-core's check, which asks for Transformer Engine's FusedAdam: ours replaces it.
        for name, value in _arguments(optimizer_state_fields(spec)).items():
            setattr(options, name, value)
    return options
