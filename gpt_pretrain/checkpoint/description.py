"""What a checkpoint says of the run that saved it: which of its tensors mean the same in another run."""

from collections.abc import Mapping, Sequence

import torch
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.config.choices import PositionEmbedding
from gpt_pretrain.config.derived import (
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
    uses_distributed_optimizer,
)
from gpt_pretrain.config.errors import written
from gpt_pretrain.config.schema import ModelConfig

# What decides which tensors there are and what shape they have, and what they mean.
_ARCHITECTURE_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "position_embedding_type",
    "rotary_percentage",
    "rotary_base",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "bias",
    "qkv_bias",
    "share_embeddings_and_output_weights",
)
_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
# Of a mixture of experts, beside those.
_EXPERT_ARCHITECTURE_KEYS = ("num_moe_experts", "moe_router_topk")
_EXPERT_LAYOUT_KEYS = ("expert_model_parallel_size",)
_DISTRIBUTED_OPTIMIZER = "model.use_distributed_optimizer"


def _described(model: ModelConfig, keys: Sequence[str]) -> dict[str, str]:
    """Keys and values as the user writes them; plain text, so that a checkpoint needs none of our classes."""
    return {f"model.{key}": written(getattr(model, key)) for key in keys}


def architecture(model: ModelConfig, transformer_config: TransformerConfig) -> dict[str, str]:
    """What decides which tensors there are, their shapes and their meaning; plain text by key."""
    keys = list(_ARCHITECTURE_KEYS)
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        keys.append("max_position_embeddings")
    experts = {}
    if model.num_moe_experts is not None:
        keys += _EXPERT_ARCHITECTURE_KEYS
        experts["model.moe_ffn_hidden_size"] = str(moe_ffn_hidden_size(model))
    return (
        _described(model, keys)
        | experts
        | {
            "model.ffn_hidden_size": str(ffn_hidden_size(model)),
            "model.num_query_groups": str(num_query_groups(model)),
            "model.kv_channels": str(kv_channels(model)),
            "padded vocabulary": str(padded_vocab_size(model)),
            "model.optim.name": model.optim.name.name,
            # Layers of the other kind have other tensors beside their weights, and masters exist in BF16 only.
            "layers": transformer_config.transformer_impl,
            "parameters": str(transformer_config.params_dtype).removeprefix("torch."),
        }
    )


def layout(model: ModelConfig) -> dict[str, str]:
    """How the tensors are spread over processes; plain text by key."""
    keys, experts = list(_LAYOUT_KEYS), {}
    if model.num_moe_experts is not None:
        keys += _EXPERT_LAYOUT_KEYS
        experts["model.expert_tensor_parallel_size"] = str(expert_tensor_parallel_size(model))
    return (
        _described(model, keys)
        | experts
        | {
            _DISTRIBUTED_OPTIMIZER: written(uses_distributed_optimizer(model)),
            "processes": str(torch.distributed.get_world_size()),
        }
    )


def places_of_ranks(layout: Mapping[str, str]) -> dict[str, str]:
    """Of a layout, what decides which part of the model and which samples each rank has; plain text by key."""
    return {key: value for key, value in layout.items() if key != _DISTRIBUTED_OPTIMIZER}
