"""A rank's initial weights: drawn from the seed, the same in every layout.

megatron-core draws each rank's shard from a generator of that rank, so one seed gives another model in every layout.
Here each weight matrix is drawn whole, from a generator seeded by (seed, its name, its layer), and each rank keeps its
part. megatron-core's sharded state dict says which: it names every local tensor, its global shape and its place in it,
across TP, PP, interleaved chunks and tied embeddings alike. The distribution is GPT-2's: normal with `init_method_std`,
and std / sqrt(2 · num_layers) for the two projections that write into the residual stream (Radford et al. 2019,
section 2.3); muP scales it by width (`features.mup`). Norms and biases keep their ones and zeros.

A matrix can be drawn at any time, and again: FP8 weights are drawn a second time for their masters, which start from
the values before any rounding to FP8. Where weights are sharded (`sharded_weights`), a layer gives the memory of its
matrices back as soon as it is built, and each is drawn when its section is (`section_buffers`).
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.mup import initial_std
from gpt_pretrain.launch.patches import FIRST_VALUES, LAYERS, patched
from gpt_pretrain.megatron.stored_weights import drop_transpose, memory_of

_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A matrix of the whole model, and the place in a parameter of this rank's part of it."""

    seed: int
    shape: tuple[int, ...]
    """Of the whole matrix."""
    part: tuple[slice, ...]
    """What this rank has of it."""
    std: float
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Where the part lies in its parameter, as `as_strided` has it."""

    @classmethod
    def of(cls, shard: ShardedTensor, start: int, model: ModelConfig) -> "_Piece":
        """From the part's description for checkpoints, whose data are a view of what begins at `start`."""
        axes = shard.prepend_axis_num
        # Leading axes count layers and the halves of a gated MLP: they belong to the name, not to the matrix.
        index, offsets = shard.global_offset[:axes], shard.global_offset[axes:]
        digest = hashlib.sha256(f"{model.seed}/{shard.key}/{'/'.join(map(str, index))}".encode()).digest()
        std = initial_std(model, shard.key)
        if shard.key.endswith(_RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2.0 * model.num_layers)
        return cls(
            seed=int.from_bytes(digest[:8], "little", signed=True),
            shape=shard.global_shape[axes:],
            part=tuple(slice(start, start + size) for start, size in zip(offsets, shard.data.shape, strict=True)),
            std=std,
            size=tuple(shard.data.shape),
            stride=shard.data.stride(),
            offset=shard.data.storage_offset() - start,
        )

    def draw(self, values: torch.Tensor) -> None:
        """Writes the part into a parameter's values."""
        generator = torch.Generator(device=values.device)
        generator.manual_seed(self.seed)
        whole = torch.empty(self.shape, dtype=torch.float32, device=values.device)
        whole.normal_(0.0, self.std, generator=generator)
        values.as_strided(self.size, self.stride, values.storage_offset() + self.offset).copy_(whole[self.part])


def initialize_weights(chunks: Sequence[MegatronModule], model: ModelConfig, *, put_off: bool) -> None:
    """Draws every weight matrix of this rank's model chunks, before they are wrapped.

    With `put_off` it only prepares for `draw`, which whoever gives a matrix its memory calls.

    Raises:
        TypeError: A matrix gave its memory back, and is not in the model's sharded state.
    """
    for chunk in chunks:
        pieces = _pieces(chunk, model)
        for name, parameter in chunk.named_parameters():
            if parameter in pieces:
                parameter.pieces = pieces[parameter]
                if not put_off:
                    draw(parameter)
            elif put_off and not memory_of(parameter).untyped_storage().nbytes():
                raise TypeError(f"{name} is not drawn: it is not in sharded_state_dict() of its layer")


@torch.no_grad()
def draw(parameter: Any) -> None:
    """Gives a weight its first values, and memory for them if it has none; others keep what they have."""
    pieces = getattr(parameter, "pieces", None)
    if pieces is None:
        return
    memory = memory_of(parameter)
    if not memory.untyped_storage().nbytes():
        memory.untyped_storage().resize_(memory.nbytes)
    if not is_float8tensor(parameter):
        for piece in pieces:
            piece.draw(parameter)
        return
    first_values = partial(_drawn, pieces, parameter.shape, parameter.dtype, parameter.device)
    # Drawn in parts, like the halves of a gated MLP, it would take its scale from each part in turn.
    parameter.copy_(first_values())
    # TE's name for what masters are made from. They are drawn again: on the device, and nothing is kept.
    parameter.get_high_precision_init_val = first_values
    parameter.clear_high_precision_init_val = _keeps_nothing


def _drawn(pieces: Sequence[_Piece], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = torch.empty(shape, dtype=dtype, device=device)
    for piece in pieces:
        piece.draw(values)
    return values


def _keeps_nothing() -> None:
    pass


def _pieces(chunk: MegatronModule, model: ModelConfig) -> Mapping[torch.nn.Parameter, Sequence[_Piece]]:
    """What the weight matrices of a chunk are made of; one stored in parts (gated MLPs) comes in parts."""
    pieces: dict[torch.nn.Parameter, list[_Piece]] = defaultdict(list)
    with _stand_ins(chunk) as owners:
        for value in nested_values(chunk.sharded_state_dict()):
            parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
            for part in parts:
                if isinstance(part, ShardedTensor) and part.data is not None and part.data.dim() >= 2:
                    parameter, start = owners[_identity(part.data)]
                    pieces[parameter].append(_Piece.of(part, start, model))
    return pieces


def _identity(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


@contextmanager
def _stand_ins(chunk: MegatronModule) -> Iterator[Mapping[int, tuple[torch.nn.Parameter, int]]]:
    """Inside, tensors without values stand for weight matrices in a chunk's state: FP8 weights have no flat form.

    Gives the parameters by the `_identity` of what is there, and where in that they begin.
    """
    owners: dict[int, tuple[torch.nn.Parameter, int]] = {}
    with ExitStack() as hooks:
        for module in chunk.modules():
            values = {}
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2:
                    continue
                values[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                owners[_identity(values[name])] = parameter, 0
                if not is_float8tensor(parameter):
                    # A tied embedding's copy on the last stage comes from elsewhere than the module's state.
                    owners[_identity(parameter)] = parameter, parameter.storage_offset()
            if values:
                hooks.callback(module.register_state_dict_post_hook(partial(_put, values)).remove)
        yield owners


def _put(
    values: dict[str, torch.Tensor], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.update({prefix + name: value for name, value in values.items()})


@contextmanager
def built_without_first_values(device: torch.device, *, fp8_params: bool, keeps_matrices: bool) -> Iterator[None]:
    """Layers built inside do not copy their undrawn weights to the host (`patches.FIRST_VALUES`).

    Unless it `keeps_matrices`, each layer moves to the device and gives their memory back before the next one is built.
    """
    with ExitStack() as patches:
        if fp8_params:
            nowhere = classmethod(lambda cls: False)
            patches.enter_context(patched(FIRST_VALUES, with_high_precision_init_val=nowhere))
        if not keeps_matrices:
            build = partial(_build_without_matrices, transformer_block.build_module, device)
            patches.enter_context(patched(LAYERS, build_module=build))
        yield


def _build_without_matrices(build: Any, device: torch.device, spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    # megatron-core builds a router on the host, and what has no memory cannot be moved from there.
    layer = build(spec_or_module, *args, **kwargs).to(device)
    for parameter in layer.parameters():
        if parameter.dim() < 2:
            continue
        drop_transpose(parameter)
        memory = memory_of(parameter)
        assert memory.untyped_storage().nbytes() == memory.nbytes, "each weight has memory of its own"
        memory.untyped_storage().resize_(0)
    return layer
