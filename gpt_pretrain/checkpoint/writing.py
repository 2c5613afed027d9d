"""From a copy in host memory to a checkpoint on the disk: written, hashed, synced, described, renamed.

This touches neither the model nor the groups that training communicates over, so it can run beside the training loop. A
checkpoint appears in one piece:

    .step_00000300.unfinished/   each rank writes its files, hashes them on the way and syncs them; then rank 0 writes
                                 the metadata, compares all sizes with the disk, and writes manifest.json last
    step_00000300/               the same directory, renamed
    latest                       replaced; then rank 0 removes what the retention does not keep

A process killed anywhere in between leaves the newest complete checkpoint and `latest` as they were. Each GB takes a
processor 0.8 s to hash and 0.3 s to hand to the system; training steps have priority.
"""

import hashlib
import io
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, save_config
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from gpt_pretrain.checkpoint.directory import Destination
from gpt_pretrain.checkpoint.manifest import FileDigest, Manifest, check_files, deal, hash_files, write_manifest
from gpt_pretrain.checkpoint.state import FORMAT
from gpt_pretrain.config.files import fsync, named

# torch.save puts a header and a directory around each tensor.
_BYTES_AROUND_AN_ITEM = 4096
# Tensors begin at multiples of this in the host's buffer, which suits every dtype.
_ALIGNMENT = 64
# A rank writes its share as up to four files side by side, each of at least 256 MiB.
_MAX_FILES, _BYTES_OF_A_FILE = 4, 256 * 1024**2
# Added to the writers' niceness: they then get a tenth of the time of a processor that training wants.
_NICER = 10


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor or object that this rank writes."""

    write: WriteItem
    """Which part of the whole it is, as torch describes it."""
    data: torch.Tensor | io.BytesIO

    @property
    def num_bytes(self) -> int:
        """Its size in a file, header included."""
        data = self.data
        size = data.getbuffer().nbytes if isinstance(data, io.BytesIO) else data.numel() * data.dtype.itemsize
        return size + _BYTES_AROUND_AN_ITEM


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank writes of a checkpoint."""

    items: list[Item]
    metadata: Metadata | None
    """The whole checkpoint's, on rank 0: torch's reader finds each tensor by it."""

    @property
    def num_bytes(self) -> int:
        """The most that it takes on the disk."""
        return sum(item.num_bytes for item in self.items)


class HostBuffer:
    """Host memory for this rank's share; kept, because locking pages for fast copies takes longer than a copy."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._is_locked = False

    def reserve(self, share: Share) -> None:
        """Reserves memory for a share before the share is needed."""
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
        """Copies a share into the buffer and waits for the copy; weights stored in FP8 become BF16."""
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
        # A tensor over only its own bytes: torch.save writes the whole memory that a view belongs to.
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


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank has written."""

    files: Mapping[str, FileDigest]
    results: list[WriteResult]


class SaveProblem(Exception):
    """Why a checkpoint could not be written: a path and the system's words."""


def write_checkpoint(
    destination: Destination,
    share: Share | str,
    manifest: Manifest,
    group: torch.distributed.ProcessGroup | None,
) -> int:
    """Writes this rank's files, and with the other ranks completes the checkpoint; every rank calls it.

    Args:
        destination: `destination.unfinished` is an empty directory that all ranks see.
        share: What this rank writes, in host memory; or the reason why it cannot.
        manifest: Everything but the files.
        group: All ranks, for CPU tensors; nothing else uses it meanwhile. None for a single rank.

    Returns:
        Bytes of all files.

    Raises:
        SaveProblem: Some rank failed; the same on all ranks. The unfinished directory is removed.
    """
    own = share if isinstance(share, str) else _write_own_files(destination.unfinished, share)
    is_first = group is None or group.rank() == 0
    reports = [own]
    if group is not None:
        reports = [own] * group.size()
        torch.distributed.gather_object(own, reports if is_first else None, dst=0, group=group)
    # Bytes, or why there are none.
    answer: list[int | str] = [0]
    if is_first:
        problem = next((report for report in reports if isinstance(report, str)), None)
        written = [report for report in reports if isinstance(report, _Written)]
        answer = [problem or _complete(destination, cast("Share", share), written, manifest)]
        if isinstance(answer[0], str):
            shutil.rmtree(destination.unfinished, ignore_errors=True)
    if group is not None:
        torch.distributed.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], str):
        raise SaveProblem(answer[0])
    return answer[0]


def _write_own_files(directory: Path, share: Share) -> _Written | str:
    """This rank's files, or why they cannot be written."""
    rank = torch.distributed.get_rank()
    num_files = min(_MAX_FILES, 1 + share.num_bytes // _BYTES_OF_A_FILE)
    buckets = [bucket for bucket in deal(share.items, lambda item: item.num_bytes, num_files) if bucket]
    names = [f"__{rank}_{index}.distcp" for index in range(len(buckets))]
    try:
        with _without_crc32(), ThreadPoolExecutor(_MAX_FILES, initializer=_let_training_go_first) as threads:
            written = list(threads.map(_write_file, [directory / name for name in names], buckets))
    except Exception as error:  # one rank's failure must reach all of them, whatever it is
        return _described(error, directory)
    results = [result for _, results in written for result in results]
    return _Written({name: digest for name, (digest, _) in zip(names, written, strict=True)}, results)


def _let_training_go_first() -> None:
    """Lowers this thread's priority; outside of Linux `os.nice` would lower the whole process's."""
    if sys.platform == "linux":
        os.nice(_NICER)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Spares torch.save its CRC-32, 0.5 s per GB, which torch.load never reads; the manifest has a SHA-256."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _described(error: Exception, directory: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or directory}: {error.strerror or error}"
    return f"{directory}: {type(error).__name__}: {error}"


class _HashedFile(io.BufferedWriter):
    """A file that hashes the bytes it is given, whatever the disk makes of them.

    On a full disk torch's writer says only "unexpected pos", so the file remembers the system's error. Closing it
    lets go of it even if the flush fails: an open file would keep its space on the disk after it is removed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path = path
        self._hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with self._noting_errors():
            num_bytes = super().write(data)
        self._hash.update(data)
        return num_bytes

    def flush(self) -> None:
        with self._noting_errors():
            super().flush()

    def finish(self) -> FileDigest:
        """Waits for the disk, and returns what was written."""
        self.flush()
        with self._noting_errors():
            os.fsync(self.fileno())
        return FileDigest(num_bytes=self.tell(), sha256=self._hash.hexdigest())

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            with named(self._path):
                yield
        except OSError as error:
            self.error = self.error or error
            raise


def _write_file(path: Path, items: Sequence[Item]) -> tuple[FileDigest, list[WriteResult]]:
    file = _HashedFile(path)
    try:
        with file:
            results = [
                _write_item(
                    _StorageWriterTransforms(), file, item.data, item.write, path.name, SerializationFormat.TORCH_SAVE
                )
                for item in items
            ]
            return file.finish(), results
    except Exception:
        if file.error is not None:
            raise file.error from None
        raise


def _complete(destination: Destination, share: Share, written: Sequence[_Written], manifest: Manifest) -> int | str:
    """On rank 0: describes and publishes what all ranks have written. Returns bytes, or a problem."""
    unfinished = destination.unfinished
    try:
        results = [of_rank.results for of_rank in written]
        FileSystemWriter(unfinished).finish(cast("Metadata", share.metadata), results)
        save_config(FORMAT, str(unfinished))
        described = [".metadata", CONFIG_FNAME]
        for name in described:
            fsync(unfinished / name)
        files = {name: digest for of_rank in written for name, digest in of_rank.files.items()}
        manifest = replace(manifest, files={**files, **hash_files(unfinished, described)})
        problems = check_files(unfinished, manifest, hashes=False)
        if problems:
            return f"{'; '.join(problems)}. Do all nodes share this directory?"
        write_manifest(unfinished, manifest)
        destination.publish()
    except Exception as error:  # the other ranks wait for the answer
        return _described(error, unfinished)
    return manifest.num_bytes
