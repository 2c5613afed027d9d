"""Checkpoints without tensors: directories with a few bytes and a true manifest, for tests of what only reads files."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from gpt_pretrain.checkpoint.directory import KEEP_ALL, Destination, Retention
from gpt_pretrain.checkpoint.manifest import Manifest, hash_files, read_manifest, write_manifest


def manifest(step: int, *, saved_at: float | None = None, **changes: object) -> Manifest:
    """A manifest without files; saved at a second of its own unless `saved_at` says when."""
    layout = {
        "model.tensor_model_parallel_size": "2",
        "model.pipeline_model_parallel_size": "1",
        "model.context_parallel_size": "1",
        "model.use_distributed_optimizer": "true",
        "processes": "4",
    }
    known = {
        "step": step,
        "consumed_samples": 8 * step,
        "time_unix": 1000.0 + step if saved_at is None else saved_at,
        "versions": {"torch": "2.11.0", "gpt_pretrain": "0.1.0"},
        "config": {"model": {"fp8": True, "fp8_recipe": "tensorwise", "fp8_params": True, "fp8_emulate": False}},
        "data": {"tokenizer": "none", "tokens": "abc"},
        "architecture": {"model.num_layers": "2"},
        "layout": layout,
        "fp8": {},
        "files": {},
    }
    return Manifest(**{**known, **changes})


def publish(
    directory: Path, step: int, retention: Retention = KEEP_ALL, *, saved_at: float | None = None, **changes: object
) -> Path:
    """Writes a checkpoint of two small files as the application does; returns its directory."""
    destination = Destination(directory=directory, step=step, retention=retention)
    destination.clear()
    destination.unfinished.mkdir()
    (destination.unfinished / "__0_0.distcp").write_bytes(b"tensors of step %d" % step * 10)
    (destination.unfinished / "metadata.json").write_text("{}")
    files = hash_files(destination.unfinished, ["__0_0.distcp", "metadata.json"])
    write_manifest(destination.unfinished, manifest(step, saved_at=saved_at, files=files, **changes))
    destination.publish()
    return destination.path


def rewrite_manifest(checkpoint: Path, **changes: object) -> None:
    """Gives a manifest other fields and the checksum that goes with them, as its writer could."""
    write_manifest(checkpoint, replace(read_manifest(checkpoint), **changes))


def flip(path: Path, place: float) -> None:
    """Changes a bit of a file, in the first byte for 0, in the last for 1."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


_at_open: list[Callable[[str], None]] = []


@cache
def _watch_files() -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and _at_open and "w" in str(arguments[1]) and str(arguments[0]).endswith(".distcp"):
            _at_open[-1](str(arguments[0]))

    sys.addaudithook(hook)


@contextmanager
def disk_that(action: Callable[[str], None]) -> Iterator[None]:
    """Calls `action` with the path of each file of tensors that this process is about to write, in the writing thread.

    It may wait, as a slow disk does, or raise what the writer is to meet.
    """
    _watch_files()
    _at_open.append(action)
    try:
        yield
    finally:
        _at_open.pop()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: what a full disk or a quota does, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
