"""This rank's parts of sharded weights (`sharded_weights`): what a checkpoint is written from and read into.

No weight is whole in a save or a load. Checkpoints are those of whole weights, in boxes (`checkpoint_boxes`): FP8
weights become BF16 when they are written, each box by itself, and are cast from their masters when they were read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor

from gpt_pretrain.kernels.adam import StoredValues
from gpt_pretrain.megatron.checkpoint_boxes import boxes_of_part, tensors_of
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.stored_weights import StoredWeight

# Rows and columns of the blocks of blockwise weights.
_BLOCK = 128


class _OwnCodes:
    """This rank's part of a weight that is stored in FP8, as `StoredValues` read it."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self.values: torch.Tensor = weight.own_part
        self.saved_as: torch.dtype = weight.dtype

    def read(self, start: int, end: int) -> torch.Tensor:
        """Values in fp32, [end - start]."""
        return self.values[start:end].view(torch.float8_e4m3fn).float() * self._inverse_scales(start, end)

    def _inverse_scales(self, start: int, end: int) -> torch.Tensor:
        """fp32: [1], or [end - start] if each 128×128 values have their own."""
        weight = self._weight
        if isinstance(weight, StoredWeight):
            return weight.scale.reciprocal()
        if hasattr(weight, "_scale_inv"):
            return weight._scale_inv  # type: ignore[no-any-return]
        columns = weight.shape[-1]
        first, last = weight.own_start + start, weight.own_start + end
        rows = torch.arange(first // columns, -(-last // columns), device=self.values.device)
        of_rows: torch.Tensor = weight._rowwise_scale_inv[rows // _BLOCK].repeat_interleave(_BLOCK, dim=1)
        return of_rows[:, :columns].flatten()[first % columns :][: end - start]


def _own_values(weight: Any) -> torch.Tensor:
    """This rank's part of a weight, [n], in the weight's type; `dequantize` reads that of one stored in FP8."""
    return StoredValues(_OwnCodes(weight)) if is_float8tensor(weight) else weight.own_part


def read_own_part(weight: Any) -> torch.Tensor:
    """The values of this rank's part of a weight, [n]."""
    values = _own_values(weight)
    return values.dequantize() if isinstance(values, StoredValues) else values.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnParts:
    """This rank's parts of all weights of a model."""

    boxes: dict[str, ShardedTensor]
    """By any names; views of `values`."""
    values: Mapping[Any, torch.Tensor]
    """[n] each."""

    @torch.no_grad()
    def read(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Takes `boxes` that were loaded; weights in FP8 keep what they have until they are cast from masters."""
        for name, box in self.boxes.items():
            box.data.copy_(loaded[name])
        for weight, values in self.values.items():
            if not is_float8tensor(weight):
                weight.own_part.copy_(values)


@torch.no_grad()
def take_own_parts(model: Model, state: dict[str, dict[str, Any]], *, is_loading: bool) -> OwnParts:
    """Takes the weights out of the sharded state of a model's chunks, which says where they belong.

    With `is_loading` the parts are host memory to read into, because the device may not have room for them.
    """
    chunk = model.chunks[0]
    has_replicas = chunk.ddp_config.num_distributed_optimizer_instances > 1
    instance = chunk.inter_dist_opt_group.rank() if has_replicas else 0
    values: dict[Any, torch.Tensor] = {}
    boxes: list[ShardedTensor] = []
    for of_chunk in state.values():
        for key, weight in list(_weights(of_chunk)):
            place = of_chunk.pop(key)
            own = torch.empty(weight.own_part.shape, dtype=weight.dtype) if is_loading else _own_values(weight)
            values[weight] = own
            for tensor in tensors_of(place, "", weight.dtype):
                boxes += boxes_of_part(tensor, own, weight.own_start, instance)
    return OwnParts(boxes={str(index): box for index, box in enumerate(boxes)}, values=values)


def _weights(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, entry in state.items():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and hasattr(entry.data, "own_part"):
            yield key, entry.data
