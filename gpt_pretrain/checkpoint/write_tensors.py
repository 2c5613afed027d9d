"""A checkpoint of weights alone, written from one plain process: tensors come one by one, from wherever they are.

What `checkpoint.tensors` reads, the other way. There is no model, no optimizer and no process group; a run takes the
weights with `checkpoint.init_from`, at any layout.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from gpt_pretrain.checkpoint.state import METADATA

# megatron-core's name and version of the format, and its place for what is not a tensor.
_FORMAT = CheckpointingConfig("torch_dist", 1)
_COMMON_KEY = ShardedObject("common_state", None, (1,), (0,)).unique_key
# Files that are written side by side; as many tensors are in memory.
_NUM_FILES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor that will be written, or one layer's part of a stacked one."""

    key: str
    """Its key in the checkpoint."""
    layer: int | None
    """Which layer's part; None: all of it."""
    shape: tuple[int, ...]
    """Of that part, without the axis of layers."""
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    """Makes its values, on the CPU, when they are needed."""


def write_weights(directory: Path, tensors: Sequence[PlannedTensor], *, num_layers: int) -> None:
    """Writes the tensors into a checkpoint's directory, and waits until the disk has them; the manifest is not written.

    Args:
        directory: Empty.
        tensors: All tensors of a model.
        num_layers: Layers of each stacked tensor.

    Raises:
        OSError: The disk does not take them.
    """
    writer = FileSystemWriter(directory, thread_count=_NUM_FILES)
    save({}, storage_writer=writer, planner=_OneByOne(tensors, num_layers), no_dist=True)
    save_config(_FORMAT, str(directory))


class _OneByOne(SavePlanner):
    """Tells torch's writer which tensors there are, and makes each when it is its turn."""

    def __init__(self, tensors: Sequence[PlannedTensor], num_layers: int) -> None:
        self._num_layers = num_layers
        self._by_place: dict[tuple[str, torch.Size | None], PlannedTensor] = {}
        items = [WriteItem(index=MetadataIndex(_COMMON_KEY), type=WriteItemType.BYTE_IO)]
        for tensor in tensors:
            item = self._item(tensor)
            self._by_place[tensor.key, item.index.offset] = tensor
            items.append(item)
        self._plan = SavePlan(items)

    def _item(self, tensor: PlannedTensor) -> WriteItem:
        layers = [] if tensor.layer is None else [self._num_layers]
        ones = [1] * len(layers)
        sizes = torch.Size([*ones, *tensor.shape])
        offsets = torch.Size([tensor.layer or 0] * len(layers) + [0] * len(tensor.shape))
        return WriteItem(
            index=MetadataIndex(tensor.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size([*layers, *tensor.shape]),
            ),
        )

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is left to set up."""

    def create_local_plan(self) -> SavePlan:
        """All tensors."""
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """There is one process."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """There is one process."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A tensor's values, or what megatron-core's reader looks for beside the tensors."""
        if write_item.type is WriteItemType.BYTE_IO:
            common = io.BytesIO()
            torch.save([{"content_metadata": METADATA}], common)
            return common
        planned = self._by_place[write_item.index.fqn, write_item.index.offset]
        values = planned.load()
        assert (tuple(values.shape), values.dtype) == (planned.shape, planned.dtype), "a tensor is what was planned"
        return (values if planned.layer is None else values[None]).contiguous()
