"""Single tensors of a checkpoint by their keys, in one plain process: no process groups, no model, any layout.

A checkpoint names its tensors by the whole model, whichever ranks wrote them, and each may lie in pieces over many
files. What is asked for is put together from the pieces that touch it, so that one layer of a stacked tensor costs the
memory of one layer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gpt_pretrain.config.errors import UserError

# Beside the model's own: optimizer states carry the names of their tensors behind this.
_OPTIMIZER = "optimizer."


class CheckpointTensors:
    """The model's tensors in a checkpoint.

    Args:
        path: A checkpoint's directory.

    Raises:
        UserError: Its index cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a garbled pickle raises almost anything
            raise UserError(f"{path / '.metadata'} cannot be read: {error!r}; use another checkpoint") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_OPTIMIZER)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """A tensor's whole shape; that of a layer's tensor has the number of layers in front."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """The type that a tensor was saved in."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, layer: int | None = None) -> torch.Tensor:
        """A tensor on the CPU: all of it, or what one layer has of it, without the axis of layers."""
        entry = self._tensors[key]
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        part = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [part])
        assert sum(item.lengths.numel() for item in items) == target.numel(), f"the pieces of {key} make the whole"
        planner = _IntoOneTensor(items, target)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return target if layer is None else target[0]


class _IntoOneTensor(LoadPlanner):
    """Tells torch's reader where each piece of a tensor belongs."""

    def __init__(self, items: list[ReadItem], target: torch.Tensor) -> None:
        self._items = items
        self._target = target

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is left to set up."""

    def create_local_plan(self) -> LoadPlan:
        """All pieces."""
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """There is one process."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """There is one process."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Only tensors are asked for."""
        raise AssertionError("a tensor's pieces are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The place of a piece."""
        place = tuple(
            slice(start, start + size) for start, size in zip(read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self._target[place]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The piece has been copied into its place already."""
