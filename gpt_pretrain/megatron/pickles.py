"""A checkpoint is read without running anything in it: pickles may name what is on a list, and nothing else.

torch keeps a checkpoint's index and its objects (random states, step counts, FP8 scales) as pickles, and Transformer
Engine keeps each layer's scales as a pickle in a tensor. A pickle calls whatever it names, and a checksum is no
protection: who can write the pickle can write that too. A name that is not listed is an error before it is looked up.
"""

import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path, PurePath
from typing import Any

import torch
from megatron.core import safe_globals
from torch.distributed.checkpoint import metadata as index_of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from gpt_pretrain.config.errors import UserError, reason
from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import patch

# What torch 2.11 and earlier versions write into an index.
_INDEX = frozenset(
    {
        *(
            (index_of_torch.__name__, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)


class _Unpickler(pickle._Unpickler):
    """Looks up listed (module, name) pairs only.

    It is the unpickler in Python: a pickle of 9 bytes can make the memo of the one in C take 64 GiB.
    """

    def __init__(self, stream: IOBase, names: Collection[tuple[str, str]]) -> None:
        super().__init__(stream)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """`FileSystemReader.read_metadata` (torch 2.11) by the list, with every entry checked."""
    path = self._get_metadata_path(kwargs.get("rank"))
    try:
        with self.fs.create_stream(path, "rb") as stream:
            index = _checked_index(_Unpickler(stream, _INDEX).load(), Path(self.path))
    except FileNotFoundError:
        # torch has a way on.
        raise
    except Exception as error:  # a garbled pickle raises almost anything
        raise UserError(f"{path} cannot be read: {reason(error)}; use another checkpoint") from error
    if index.storage_meta is None:
        index.storage_meta = StorageMeta()
    index.storage_meta.load_id = self.load_id
    return index


def _checked_index(index: Any, directory: Path) -> Metadata:
    """The index, if it names no file elsewhere and its tensors are whole; torch would silently skip missing parts.

    Raises:
        ValueError: It is not such an index.
    """
    if not isinstance(index, Metadata):
        raise ValueError("it is not an index")
    sizes: dict[str, int] = {}
    for info in index.storage_data.values():
        name = str(info.relative_path)
        if PurePath(name).name != name:
            raise ValueError(f"it names a file outside of its directory: {name}")
        if name not in sizes:
            file = directory / name
            sizes[name] = file.stat().st_size if file.is_file() else 0
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise ValueError(f"it names bytes that {name} does not have")
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"the pieces of {key} do not make the whole")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"{key} has no type")
    return index


_torch_load_bytes = DefaultLoadPlanner.load_bytes


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """`DefaultLoadPlanner.load_bytes` of a copy that holds only what torch's and megatron-core's lists allow."""
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        name = read_item.dest_index.fqn
        raise UserError(
            f"{name} in the checkpoint cannot be read: {refused_name(error)}; use another checkpoint"
        ) from error
    copy = io.BytesIO()
    torch.save(loaded, copy)
    copy.seek(0)
    _torch_load_bytes(self, read_item, copy)


@contextmanager
def restricted(checkpoint: Path) -> Iterator[None]:
    """Inside, a checkpoint is read by the lists, which stay in force afterwards.

    Raises:
        UserError: It names what no checkpoint needs, or cannot be read.
    """
    safe_globals.register_safe_globals()
    patch(patches.CHECKPOINT_INDEX, read_metadata=_read_metadata)
    patch(patches.CHECKPOINT_OBJECTS, load_bytes=_load_bytes)
    with unreadable_told(checkpoint):
        # torch takes an error in the index for a missing index, and would look for another.
        FileSystemReader(checkpoint).read_metadata()
        yield


@contextmanager
def unreadable_told(checkpoint: Path) -> Iterator[None]:
    """Inside, a checkpoint's content is used, which may be nonsense even if its files are intact.

    Raises:
        UserError: In place of any error, except when memory runs out or other ranks are gone.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except CheckpointException as error:
        failure = next((failure for failure, _ in error.failures.values()), error)
        raise failure if isinstance(failure, UserError) else _unreadable(checkpoint, failure) from error
    except Exception as error:
        # A rank that lost the others raises gloo's plain RuntimeError, which names a file of gloo's sources.
        if "/third_party/gloo/" in str(error):
            raise
        raise _unreadable(checkpoint, error) from error


def _unreadable(checkpoint: Path, error: BaseException) -> UserError:
    return UserError(f"{checkpoint} cannot be read: {reason(error)}; use another checkpoint")


def harmless_state(name: str, state: Any) -> Any:
    """A layer's FP8 state for Transformer Engine, pickled again from what megatron-core's list allows.

    A checkpoint holds it under `name` as uint8 [n]. Anything else was read by the lists already.

    Raises:
        UserError: It names something else.
    """
    if not isinstance(state, torch.Tensor) or not state.numel():
        return state
    try:
        stream = io.BytesIO(state.detach().cpu().numpy().tobytes())
        values = _Unpickler(stream, safe_globals.SafeUnpickler._SAFE_CLASSES).load()
    except Exception as error:  # a garbled pickle raises almost anything
        raise UserError(f"{name} in the checkpoint cannot be read: {reason(error)}; use another checkpoint") from error
    return torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)


def refused_name(error: pickle.UnpicklingError) -> str:
    """Why torch did not unpickle something, without its advice to load the file freely."""
    _, found, said = str(error).partition("WeightsUnpickler error: ")
    return said.partition("\n")[0].strip() if found else "it is not a pickle of tensors and plain values"
