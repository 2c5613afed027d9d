"""What a checkpoint holds of a run, and how it describes the run.

It holds megatron-core's sharded state, whose parts each rank names. The description decides what a run may restore: the
architecture (which tensors there are), the layout (which rank has which part), and the kind of FP8 scales and amax
histories. It is plain text by key, so that a checkpoint needs none of our classes.

Delayed scaling keeps scales and histories, and FP8 attention keeps its own; the other recipes compute each scale from
its tensor and have nothing to restore. Transformer Engine would silently take another recipe's state, or drop it.
"""

import importlib.metadata
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import convert_cuda_rng_state
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.config.choices import LayerName, PositionEmbedding
from gpt_pretrain.config.derived import (
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
    uses_distributed_optimizer,
)
from gpt_pretrain.config.errors import UserError, written
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.optimizer_state import sharded_optimizer_state
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.run.fp8 import Fp8Settings

# The name and version of the format, which megatron-core's reader asks for.
FORMAT = CheckpointingConfig("torch_dist", 1)
# Tells the reader that optimizer states are sharded like the model's tensors.
METADATA: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

# megatron-core's name for what is not a tensor.
COMMON_STATE = "common_state"
RANDOM_STATES = "random_states"
# Where this rank's parts of sharded weights are in a state; checkpoints know nothing of it.
OWN_PARTS = "own_parts"
# The digests of FP8 scales and histories by layer, in the common state.
FP8_DIGESTS = "fp8_digests"
# Where Transformer Engine's layers and emulated ones keep FP8 scales and histories.
EXTRA_STATE = "_extra_state"

_ARCHITECTURE_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "position_embedding_type",
    "rotary_percentage",
    "rotary_base",
    "rope_scaling_factor",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "bias",
    "qkv_bias",
    "qk_layernorm",
    "share_embeddings_and_output_weights",
)
# A model with muP also has these.
_MUP_KEYS = (
    "use_mup",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
)
# A model states these, each with what follows it, where the first is not null.
_OPTIONAL_KEYS = (
    ("no_rope_freq",),
    ("final_logit_softcapping",),
    ("yarn_original_max_position_embeddings",),
    ("value_embedding_freq", "value_embedding_mult"),
    ("window_size", "window_attn_skip_freq"),
)
# Values of keys that older checkpoints lack.
_BEFORE = {"model.rope_scaling_factor": "null", "model.qk_layernorm": "false"}
# Stated for other layers than the program's own.
_LAYER = "model.layer"
# What keys mean in a model that does not state them, if the other one does.
_UNSTATED = {
    _LAYER: LayerName.gpt.name,
    "model.use_mup": "false",
    **{f"model.{key}": "null" for keys in _OPTIONAL_KEYS for key in keys},
    "model.value_embedding_mult": "1.0",
}
_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
# A mixture of experts also has these.
_EXPERT_ARCHITECTURE_KEYS = ("num_moe_experts", "moe_router_topk")
OPTIMIZER = "model.optim.name"
_DISTRIBUTED_OPTIMIZER = "model.use_distributed_optimizer"


def random_states() -> dict[str, Any]:
    """The states of this rank's generators, for `restore_random_states`."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        # With CUDA graphs these are generators. Saved as states, they also suit a run without graphs.
        "tracker": {name: convert_cuda_rng_state(state) for name, state in tracked.items()},
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets this rank's generators to where they were saved."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, state in states["tracker"].items():
        if isinstance(present[name], torch.Generator):
            # In place: recorded graphs draw from this generator.
            present[name].set_state(state)
        else:
            present[name] = state
    tracker.set_states(present)


def chunks_by_name(model: Model) -> dict[str, Any]:
    """The model's chunks by megatron-core's names, by which the optimizer looks up its parameters' chunks."""
    chunks = model.gpt_chunks
    return {"model" if len(chunks) == 1 else f"model{index}": chunk for index, chunk in enumerate(chunks)}


def sharded_model(model: Model) -> dict[str, Any]:
    """This rank's model, by chunk (`chunks_by_name`): where each tensor belongs."""
    return {name: chunk.sharded_state_dict(metadata=dict(METADATA)) for name, chunk in chunks_by_name(model).items()}


def sharded_state(trainable: Trainable, *, is_loading: bool, masters_alone: bool = False) -> dict[str, Any]:
    """This rank's parts of model, optimizer and random states, to write from or read into.

    With `masters_alone` the optimizer's other states are left out.
    """
    state = sharded_model(trainable.model)
    state["optimizer"] = sharded_optimizer_state(
        trainable.optimizer, state, metadata=METADATA, is_loading=is_loading, masters_alone=masters_alone
    )
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state[RANDOM_STATES] = ShardedObject(RANDOM_STATES, random_states(), (world_size,), (rank,), replica_id=0)
    return state


def _described(model: ModelConfig, keys: Sequence[str]) -> dict[str, str]:
    """Keys and values as the user writes them."""
    return {f"model.{key}": written(getattr(model, key)) for key in keys}


def describe_weights(model: ModelConfig) -> dict[str, str]:
    """The keys that decide which weights there are, their shapes and what is computed with them; plain text by key."""
    described = _described(model, _ARCHITECTURE_KEYS)
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        described |= _described(model, ["max_position_embeddings"])
    if model.num_moe_experts is not None:
        described |= _described(model, _EXPERT_ARCHITECTURE_KEYS)
        described["model.moe_ffn_hidden_size"] = str(moe_ffn_hidden_size(model))
    if model.use_mup:
        described |= _described(model, _MUP_KEYS)
    for keys in _OPTIONAL_KEYS:
        if getattr(model, keys[0]) is not None:
            described |= _described(model, keys)
    if model.layer is not LayerName.gpt:
        # Checkpoints from before there was a choice do not name it.
        described[_LAYER] = model.layer.name
    return described | {
        "model.ffn_hidden_size": str(ffn_hidden_size(model)),
        "model.num_query_groups": str(num_query_groups(model)),
        "model.kv_channels": str(kv_channels(model)),
    }


def architecture(model: ModelConfig, transformer_config: TransformerConfig) -> dict[str, str]:
    """What decides which tensors there are, their shapes and their meaning; plain text by key."""
    return describe_weights(model) | {
        "padded vocabulary": str(padded_vocab_size(model)),
        OPTIMIZER: model.optim.name.name,
        # Transformer Engine's layers have tensors that local layers lack, and only BF16 weights have masters.
        "layers": transformer_config.transformer_impl,
        "parameters": str(transformer_config.params_dtype).removeprefix("torch."),
    }


def layout(model: ModelConfig, num_processes: int) -> dict[str, str]:
    """How the tensors are spread over processes; plain text by key."""
    described = _described(model, _LAYOUT_KEYS)
    if model.num_moe_experts is not None:
        described |= _described(model, ["expert_model_parallel_size"])
        described["model.expert_tensor_parallel_size"] = str(expert_tensor_parallel_size(model))
    return described | {
        _DISTRIBUTED_OPTIMIZER: written(uses_distributed_optimizer(model)),
        "processes": str(num_processes),
    }


def places_of_ranks(layout: Mapping[str, str]) -> dict[str, str]:
    """The part of a layout that decides which part of the model and which samples each rank has."""
    return {key: value for key, value in layout.items() if key != _DISTRIBUTED_OPTIMIZER}


def differences(current: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """The keys of `current` whose saved values differ, as `key=value (saved with value)`; empty if none does.

    The saved values may be older than some keys (`_BEFORE`).
    """
    saved = {**_BEFORE, **saved}
    current = {**{key: value for key, value in _UNSTATED.items() if key in saved}, **current}
    return ", ".join(
        f"{key}={value} (saved {f'with {saved[key]}' if key in saved else 'without it'})"
        for key, value in current.items()
        if value != saved.get(key)
    )


def describe_fp8_state(settings: Fp8Settings | None) -> dict[str, str]:
    """What decides the shape and the meaning of FP8 scales and histories; empty if there are none to keep."""
    if settings is None or (not settings.recipe.keeps_history and not settings.dot_product_attention):
        return {}
    return _describe_fp8(settings)


def _describe_fp8(settings: Fp8Settings) -> dict[str, str]:
    described = {
        # The name from when there was only one engine.
        "model.fp8_recipe": settings.recipe.preset,
        "format of gradients": settings.gradient_format,
        "model.fp8_amax_history_len": str(settings.amax_history_len),
        "model.fp8_dot_product_attention": written(settings.dot_product_attention),
        "model.fp8_exclude": written(list(settings.exclude)),
        "model.fp8_emulate": written(settings.emulate),
    }
    if not settings.in_local_layers:
        described["Transformer Engine"] = importlib.metadata.version("transformer_engine")
    return described


def keeps_fp8_state(
    path: Path, settings: Fp8Settings | None, saved: Mapping[str, str], *, reset: bool, was_reset: bool = False
) -> bool:
    """Whether FP8 scales and histories are restored; they are not if the checkpoint has none.

    `saved` is the checkpoint's `describe_fp8_state`. Without `reset` (`checkpoint.reset_fp8_state`) a run that has no
    scales, or scales of another kind, is refused by a UserError. With it they are dropped, but only once: a run that
    `was_reset` when it saved them has collected them since, and is started again with the same command.
    """
    if not saved:
        return False
    current = {"model.fp8": "false"} if settings is None else _describe_fp8(settings)
    different = differences(current, {"model.fp8": "true", **saved})
    if reset and (different or not was_reset):
        return False
    if different:
        raise UserError(
            f"{path} holds the FP8 scales of another recipe: {different}; resume with the saved values, or drop its "
            "scales and amax histories with checkpoint.reset_fp8_state=true"
        )
    return True


def take_extra_states(state: dict[str, Any]) -> list[str]:
    """Removes the entries of FP8 scales and histories from a model's state, and returns their names."""
    # Experts in a single module have an entry each: `…_extra_state`, `…_extra_state1`, `…_extra_state2`.
    keys = [key for key in state if re.search(rf"{EXTRA_STATE}\d*$", key)]
    for key in keys:
        del state[key]
    return keys
