"""The tensors of a model by their keys in our checkpoints, which are megatron-core's own with all layers stacked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from gpt_pretrain.checkpoint.state import EXTRA_STATE
from gpt_pretrain.config.choices import Normalization, PositionEmbedding
from gpt_pretrain.config.derived import padded_vocab_size
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.huggingface.tensors import layer_shapes

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """A tensor of a model, or one layer of a stacked one."""

    key: str
    layer: int | None
    shape: tuple[int, ...]
    """Without the axis of layers."""


def model_tensors(model: ModelConfig) -> list[ModelTensor]:
    """Every tensor of a model, by its key in our checkpoints."""
    norm = ("weight", "bias") if model.normalization is Normalization.layernorm else ("weight",)
    hidden = model.hidden_size
    outer: dict[str, tuple[int, ...]] = {EMBEDDING: (padded_vocab_size(model), hidden)}
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        outer["embedding.position_embeddings.weight"] = (model.max_position_embeddings, hidden)
    outer |= {f"decoder.final_layernorm.{part}": (hidden,) for part in norm}
    if not model.share_embeddings_and_output_weights:
        outer[HEAD] = outer[EMBEDDING]
    shapes = layer_shapes(model)
    return [
        *(ModelTensor(key=key, layer=None, shape=shape) for key, shape in outer.items()),
        *(
            ModelTensor(key=f"decoder.layers.{key}", layer=layer, shape=shapes[key])
            for layer in range(model.num_layers)
            for key in _layer_keys(model, norm)
        ),
    ]


def _layer_keys(model: ModelConfig, norm: tuple[str, ...]) -> Iterator[str]:
    yield from (f"self_attention.linear_qkv.layer_norm_{part}" for part in norm)
    yield "self_attention.linear_qkv.weight"
    yield "self_attention.linear_proj.weight"
    if model.bias or model.qkv_bias:
        yield "self_attention.linear_qkv.bias"
    if model.bias:
        yield "self_attention.linear_proj.bias"
    if model.qk_layernorm:
        yield from (f"self_attention.{name}_layernorm.{part}" for name in "qk" for part in norm)
    if model.num_moe_experts is not None:
        yield from (f"pre_mlp_layernorm.{part}" for part in norm)
        yield "mlp.router.weight"
        yield from (f"mlp.experts.experts.linear_{name}.weight" for name in ("fc1", "fc2"))
        return
    yield from (f"mlp.linear_fc1.layer_norm_{part}" for part in norm)
    yield from (f"mlp.linear_{name}.weight" for name in ("fc1", "fc2"))
    if model.bias:
        yield from (f"mlp.linear_{name}.bias" for name in ("fc1", "fc2"))


def empty_extra_states(model: ModelConfig) -> dict[str, Any]:
    """What megatron-core's modules store without FP8 state, by unique key: its reader demands an object of each.

    Local layers ask for some of what Transformer Engine's ask for.
    """
    layers, experts = model.num_layers, model.num_moe_experts
    of_attention = ["linear_qkv", "core_attention", "linear_proj"]
    of_attention += ["q_layernorm", "k_layernorm"] if model.qk_layernorm else []
    names = [f"self_attention.{name}" for name in of_attention]
    names += ["mlp.linear_fc1", "mlp.linear_fc2"] if experts is None else ["pre_mlp_layernorm"]
    places = [("decoder.final_layernorm", (1,), (0,))]
    places += [(f"decoder.layers.{name}", (layers,), (layer,)) for name in names for layer in range(layers)]
    of_experts = [
        (f"decoder.layers.mlp.experts.experts.{name}", (layers, experts), (layer, expert))
        for name in ("linear_fc1", "linear_fc2")
        for layer in range(layers)
        for expert in range(experts or 0)
    ]
    # A list, because one rank may have several objects of a key.
    nothing = [torch.empty(0, dtype=torch.uint8)]
    return {
        ShardedObject(f"{name}.{EXTRA_STATE}", None, shape, offset).unique_key: nothing
        for name, shape, offset in (*places, *of_experts)
    }
