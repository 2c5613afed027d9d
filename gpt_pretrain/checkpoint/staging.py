"""From the sharded state to bytes in host memory: megatron-core plans which rank writes what, each copies its share.

The run stands still during the copy. Writing, hashing and waiting for the disk read only the copy, so the run goes on
meanwhile. megatron-core and torch plan which parts of the whole this rank holds, and which of the ranks with the same
part writes it (`FullyParallelSaveStrategyWrapper`: each about the same number of bytes). Their writers are not used:
megatron-core's starts a process that imports the program anew, hands the bytes to a forked child, and reports the death
of that child only at the next save.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

# torch.save puts a header and a directory around each tensor.
_BYTES_AROUND_AN_ITEM = 4096
# Tensors begin at multiples of this in the host's buffer; it suits every dtype.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor or object that this rank writes."""

    write: WriteItem
    """Which part of the whole it is, in torch's words."""
    data: torch.Tensor | io.BytesIO

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a file, header included."""
        data = self.data
        size = data.getbuffer().nbytes if isinstance(data, io.BytesIO) else data.numel() * data.dtype.itemsize
        return size + _BYTES_AROUND_AN_ITEM


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank writes of a checkpoint."""

    items: list[Item]
    metadata: Metadata | None
    """Of the whole checkpoint, on rank 0: torch's reader looks up in it where a tensor lies."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the share takes on the disk, at most."""
        return sum(item.num_bytes for item in self.items)


class _Planned(FileSystemWriter):
    """Takes the plan where torch would begin to write."""

    can_run_decentralized_global_plan = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.items = [Item(write, planner.resolve_data(write)) for write in plan.items]


class _Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's save up to the point where it would write."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = _Planned(checkpoint_dir)
        (_, metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key),
            writer,
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )
        self.share = Share(writer.items, metadata)


def plan_share(state: dict[str, Any], directory: Path, content_metadata: dict[str, Any]) -> Share:
    """What this rank writes of a state; every rank calls it. The tensors are still those of the run.

    Args:
        state: megatron-core's sharded state; values that are not sharded are written by rank 0 as the common state.
        directory: The checkpoint's, to be named in its metadata.
        content_metadata: megatron-core's choice of formats, kept for its reader.
    """
    sharded, common = save_preprocess({**state, "content_metadata": content_metadata})
    sharded["common_state"] = ShardedObject(
        "common_state", common, global_shape=(1,), global_offset=(0,), replica_id=torch.distributed.get_rank()
    )
    strategy = _Strategy()
    # Ranks with the same tensors differ only in their data and their part of the sequence.
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(strategy, replicas).save(sharded, directory)
    return strategy.share


class HostBuffer:
    """Host memory for this rank's share, kept from save to save.

    A copy from a GPU is fast only into locked pages, and locking them takes longer than the copy.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._is_locked = False

    def reserve(self, share: Share) -> None:
        """Makes room for a share, before it is needed."""
        num_bytes = sum(_aligned(item.num_bytes) for item in share.items if isinstance(item.data, torch.Tensor))
        if num_bytes <= len(self._bytes):
            return
        self.release()
        self._bytes = bytearray(num_bytes)
        if any(isinstance(item.data, torch.Tensor) and item.data.device.type == "cuda" for item in share.items):
            error = torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, 0)
            if int(error) != 0:
                raise MemoryError(f"the driver cannot lock {num_bytes} bytes of host memory for checkpoints ({error})")
            self._is_locked = True

    @property
    def _address(self) -> int:
        return torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()

    def copy(self, share: Share) -> Share:
        """Copies a share into the buffer and waits until it is there; weights stored in FP8 become BF16."""
        self.reserve(share)
        items, offset = [], 0
        for item in share.items:
            if not isinstance(item.data, torch.Tensor):
                items.append(item)
                continue
            source = item.data.detach()
            if "dequantize" in type(source).__dict__:
                source = source.dequantize()
            items.append(Item(item.write, self._copied(source, offset)))
            offset += _aligned(item.num_bytes)
        torch.cuda.current_stream().synchronize()
        return Share(items, share.metadata)

    def _copied(self, source: torch.Tensor, offset: int) -> torch.Tensor:
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype)
        # A tensor over its own bytes alone: torch.save writes the whole memory that a view belongs to.
        flat = torch.frombuffer(self._bytes, dtype=source.dtype, count=source.numel(), offset=offset)
        return flat.view(source.shape).copy_(source, non_blocking=True)

    def release(self) -> None:
        """Gives the memory back."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_locked = False
        self._bytes = bytearray()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
