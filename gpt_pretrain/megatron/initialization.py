"""Initial weights that do not depend on the parallel layout.

megatron-core draws each rank's shard from a generator of that rank, so the same seed gives another model at every
layout. Here each weight matrix is drawn whole, from a generator seeded by (seed, its name, its layer), and each rank
keeps its part. What the part is, megatron-core's sharded state dict says: it names every local tensor, its global
shape and its place in it, across TP, PP, interleaved chunks and tied embeddings alike.

The distribution is GPT-2's: normal with `init_method_std`, and std / sqrt(2 · num_layers) for the two projections that
write into the residual stream (Radford et al. 2019, section 2.3). Norms and biases keep their ones and zeros.
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
from gpt_pretrain.megatron.patches import FIRST_VALUES, patched

_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


def _generator_seed(seed: int, key: str, index: Sequence[int]) -> int:
    digest = hashlib.sha256(f"{seed}/{key}/{'/'.join(map(str, index))}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _weight_shards(chunk: MegatronModule) -> Iterator[ShardedTensor]:
    """Every sharded weight matrix of this chunk; a matrix that is stored in parts (gated MLPs) comes in parts."""
    for value in nested_values(chunk.sharded_state_dict()):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            if isinstance(part, ShardedTensor) and part.data is not None and part.data.dim() >= 2:
                yield part


@torch.no_grad()
def initialize_weights(chunks: Sequence[MegatronModule], model: ModelConfig) -> None:
    """Draws every weight matrix of this rank's model chunks.

    Args:
        chunks: Model chunks of this rank, before they are wrapped.
        model: Gives seed, standard deviation and depth.
    """
    for chunk in chunks:
        with _fp8_weights_drawn_whole(chunk):
            for shard in _weight_shards(chunk):
                _draw(shard, model)


def _draw(shard: ShardedTensor, model: ModelConfig) -> None:
    axes = shard.prepend_axis_num
    std = model.init_method_std
    if shard.key.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2.0 * model.num_layers)
    # Leading axes count layers (and the halves of a gated MLP): part of the name, not of the matrix.
    index, shape = shard.global_offset[:axes], shard.global_shape[axes:]
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(_generator_seed(model.seed, shard.key, index))
    whole = torch.empty(shape, dtype=torch.float32, device=shard.data.device).normal_(0.0, std, generator=generator)
    place = tuple(
        slice(offset, offset + size) for offset, size in zip(shard.global_offset[axes:], shard.data.shape, strict=True)
    )
    shard.data.copy_(whole[place])


@contextmanager
def _fp8_weights_drawn_whole(chunk: MegatronModule) -> Iterator[None]:
    """Lets weights that are stored in FP8 be drawn in high precision, and quantises each of them at the end.

    Drawn in parts, as the halves of a gated MLP are, each part would set the scale of the whole. The drawn values are
    kept where the optimizer takes its masters from (TE's `get_high_precision_init_val`): masters start unrounded.
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
    """What Transformer Engine gives a weight that keeps its first value, on the device and not on the host."""
    kept = [value]
    parameter.get_high_precision_init_val = lambda: kept[0] if kept else None
    parameter.clear_high_precision_init_val = kept.clear


def forget_first_values(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees what FP8 weights were drawn as, once the optimizer has made its masters of it.

    megatron-core frees the weights' that this rank has a master of. The others', 6.5 GiB of Llama 3 8B on two ranks and
    more on many, would lie there through the first forward and backward pass.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()


@contextmanager
def built_without_first_values(*, fp8_params: bool) -> Iterator[None]:
    """Layers that are built here copy nothing to the host: their weights are drawn later.

    Otherwise Transformer Engine (2.12, `TransformerEngineBaseModule.reset_parameters`) copies every weight that it
    stores in FP8, which nobody has drawn yet, to memory that is not locked: 14 GB and over ten seconds for Llama 3 8B.
    """
    if not fp8_params:
        yield
        return
    with patched(FIRST_VALUES, with_high_precision_init_val=classmethod(lambda cls: False)):
        yield


def _put(
    values: dict[str, torch.Tensor], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.update({prefix + name: value for name, value in values.items()})
