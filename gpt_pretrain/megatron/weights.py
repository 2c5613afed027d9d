"""A rank's initial weights: drawn from the seed, the same in every layout.

megatron-core draws each rank's shard from a generator of that rank, so one seed gives another model in every layout.
Here each weight matrix is drawn whole, from a generator seeded by (seed, its name, its layer), and each rank keeps its
part. megatron-core's sharded state dict says which: it names every local tensor, its global shape and its place in it,
across TP, PP, interleaved chunks and tied embeddings alike. The distribution is GPT-2's: normal with `init_method_std`,
and std / sqrt(2 · num_layers) for the two projections that write into the residual stream (Radford et al. 2019,
section 2.3); muP scales it by width (`features.mup`). Norms and biases keep their ones and zeros.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.mup import initial_std
from gpt_pretrain.launch.patches import FIRST_VALUES, patched

_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


def _weight_shards(chunk: MegatronModule) -> Iterator[ShardedTensor]:
    """Every sharded weight matrix of this chunk; one stored in parts (gated MLPs) comes in parts."""
    for value in nested_values(chunk.sharded_state_dict()):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            if isinstance(part, ShardedTensor) and part.data is not None and part.data.dim() >= 2:
                yield part


@torch.no_grad()
def initialize_weights(chunks: Sequence[MegatronModule], model: ModelConfig) -> None:
    """Draws every weight matrix of this rank's model chunks, before they are wrapped."""
    for chunk in chunks:
        with _fp8_weights_drawn_whole(chunk):
            for shard in _weight_shards(chunk):
                _draw(shard, model)


def _draw(shard: ShardedTensor, model: ModelConfig) -> None:
    axes = shard.prepend_axis_num
    std = initial_std(model, shard.key)
    if shard.key.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2.0 * model.num_layers)
    # Leading axes count layers and the halves of a gated MLP: they belong to the name, not to the matrix.
    index, shape = shard.global_offset[:axes], shard.global_shape[axes:]
    digest = hashlib.sha256(f"{model.seed}/{shard.key}/{'/'.join(map(str, index))}".encode()).digest()
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    whole = torch.empty(shape, dtype=torch.float32, device=shard.data.device).normal_(0.0, std, generator=generator)
    place = tuple(
        slice(offset, offset + size) for offset, size in zip(shard.global_offset[axes:], shard.data.shape, strict=True)
    )
    shard.data.copy_(whole[place])


@contextmanager
def _fp8_weights_drawn_whole(chunk: MegatronModule) -> Iterator[None]:
    """Inside, FP8 weights are drawn in high precision; at the end each is quantized.

    Drawn in parts, like the halves of a gated MLP, a weight would take its scale from each part in turn. The optimizer
    makes unrounded masters from the drawn values (TE's `get_high_precision_init_val`).
    """
    drawn: list[tuple[Any, torch.Tensor]] = []
    with ExitStack() as hooks:
        for module in chunk.modules():
            values = {
                name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                for name, parameter in module.named_parameters(recurse=False)
                if is_float8tensor(parameter)
            }
            if values:
                hooks.callback(module.register_state_dict_post_hook(partial(_put, values)).remove)
                drawn += [(getattr(module, name), value) for name, value in values.items()]
        yield
    for parameter, value in drawn:
        parameter.copy_(value)
        _keep(parameter, value)


def _keep(parameter: Any, value: torch.Tensor) -> None:
    """Gives a weight TE's methods for a first value that it keeps, here on the device instead of the host."""
    kept = [value]
    parameter.get_high_precision_init_val = lambda: kept[0] if kept else None
    parameter.clear_high_precision_init_val = kept.clear


def forget_first_values(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the drawn values of FP8 weights once the optimizer has made its masters.

    megatron-core frees only those whose master this rank holds. The others would stay through the first step's passes:
    6.5 GiB for Llama 3 8B on two ranks, and more on many.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()


@contextmanager
def built_without_first_values(*, fp8_params: bool) -> Iterator[None]:
    """Layers built inside do not copy their undrawn weights to the host (`patches.FIRST_VALUES`)."""
    if not fp8_params:
        yield
        return
    with patched(FIRST_VALUES, with_high_precision_init_val=classmethod(lambda cls: False)):
        yield


def _put(
    values: dict[str, torch.Tensor], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.update({prefix + name: value for name, value in values.items()})
