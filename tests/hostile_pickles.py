"""Pickles that run code in whoever loads them freely, each by another way: they create a file, the canary."""

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.checkpoint.manifest import hash_files, read_manifest, write_manifest


class _Calls:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._called


def hostile_pickles(canary: Path) -> Mapping[str, bytes]:
    """Pickles by the way in which they run code.

    Args:
        canary: The file that each of them creates.
    """
    code = f"open({str(canary)!r}, 'w').close()"
    touch = f"touch {canary}"
    in_bytes = io.BytesIO()
    torch.save(_Calls(exec, code), in_bytes)
    quoted = repr(code).encode()
    return {
        "reduce": pickle.dumps(_Calls(exec, code)),
        "reduce, protocol 0": pickle.dumps(_Calls(exec, code), protocol=0),
        "system": b"cposix\nsystem\n(V" + touch.encode() + b"\ntR.",
        "inst": b"(S" + quoted + b"\nibuiltins\nexec\n.",
        "obj": b"(cbuiltins\nexec\nS" + quoted + b"\no.",
        "build": b"ctypes\nSimpleNamespace\n)R(dVx\ncbuiltins\nexec\n(S" + quoted + b"\ntRsb.",
        "nested getattr": b"\x80\x04cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(V"
        + touch.encode()
        + b"\ntR.",
        "dotted name": b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93(V" + touch.encode() + b"\ntR.",
        # By name: megatron-core puts another function in the place of torch's.
        "a tensor's bytes": b"ctorch.storage\n_load_from_bytes\n(B"
        + len(in_bytes.getvalue()).to_bytes(4, "little")
        + in_bytes.getvalue()
        + b"tR.",
        "a pickle in a pickle": pickle.dumps(_Calls(pickle.loads, pickle.dumps(_Calls(exec, code)))),
    }


def as_if_written_so(checkpoint: Path) -> None:
    """Gives a checkpoint the checksums of what it holds now, as its writer could."""
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, dataclasses.replace(manifest, files=hash_files(checkpoint, manifest.files)))


def plant_index(checkpoint: Path, planted: bytes) -> None:
    """Other bytes for torch's index."""
    (checkpoint / ".metadata").write_bytes(planted)
    as_if_written_so(checkpoint)


def plant_object(checkpoint: Path, planted: bytes, name: str = "random_states/shard_0_1") -> None:
    """Puts other bytes in the place of an object."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    (entry,) = [key for key in index.storage_data if key.fqn == name]
    info = index.storage_data[entry]
    file = checkpoint / info.relative_path
    index.storage_data[entry] = dataclasses.replace(info, offset=file.stat().st_size, length=len(planted))
    with file.open("ab") as stream:
        stream.write(planted)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    as_if_written_so(checkpoint)
