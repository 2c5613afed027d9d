"""The manifest of a checkpoint: its contents, its run, and the size and SHA-256 of each of its files.

`manifest.json` is written last, so a checkpoint that has one is complete. It is plain JSON, which Python reads without
torch. A SHA-256 of its own shows a changed digit in it, as the files' hashes do in a tensor.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import stat
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Self

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, read_foreign_json, write_file
from gpt_pretrain.data.cache import fingerprint

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

# Hashing releases Python's lock: four threads read as fast as most file systems can.
_NUM_THREADS = 4
# Names that the readers of torch and megatron-core look for.
_READ = (".metadata", "*.distcp", "common.pt", "metadata.json")
# The packages that a checkpoint depends on.
_DISTRIBUTIONS = ("torch", "megatron-core", "transformer_engine", "gpt_pretrain")
# Counts of steps, samples and bytes, and seconds since 1970 of which every system makes a date.
_LARGEST, _LAST_S = 2**53, 2**32
_ANOTHER = "use another checkpoint of the run"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """What a file must be; its SHA-256 is hexadecimal."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, entry: Any) -> Self:
        """Reads a file's entry in `manifest.json`; a ValueError if it is malformed or the file is elsewhere."""
        if PurePath(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file in its directory")
        if not isinstance(entry, dict) or not all(
            _fits(entry.get(field.name), field.type) for field in dataclasses.fields(cls)
        ):
            raise ValueError(f"{name!r} has no num_bytes and sha256")
        return cls(num_bytes=entry["num_bytes"], sha256=entry["sha256"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint says of itself and of the run that saved it; older ones lack the fields with defaults."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples behind the run in the data, including those passed over."""
    time_unix: float
    """When it was saved: seconds since 1970-01-01 UTC."""
    versions: Mapping[str, str]
    """Versions of the installed packages that decide what the tensors mean."""
    config: Mapping[str, Any]
    """The whole resolved configuration, as `config.load.config_to_dict` gives it."""
    data: Mapping[str, str]
    """Fingerprints of the tokenizer, the tokens, their shares and splits, by name."""
    architecture: Mapping[str, str]
    """What decides which tensors there are (`state.architecture`)."""
    layout: Mapping[str, str]
    """How they were spread over processes (`state.layout`)."""
    fp8: Mapping[str, str]
    """What decides the meaning of FP8 scales and amax histories (`state.describe_fp8_state`); empty without any."""
    files: Mapping[str, FileDigest]
    """Every other file of the checkpoint's directory, by its name."""
    rewinds: int = 0
    """How often the run went back behind a loss spike."""
    passed_over: Sequence[Sequence[int]] = ()
    """Samples that rewinds gave up and nothing was trained on: the first and the number of each range."""
    losses: Sequence[float] = ()
    """The last losses in nats per token, oldest first, by which spikes are found."""
    spikes: Sequence[int] = ()
    """Steps with a loss spike that the run kept."""
    given_up: Sequence[Sequence[float]] = ()
    """Which checkpoints of the directory belong to attempts that were given up: pairs of a step and a time, for those
    of that step or a later one that were saved before that time (`directory.is_given_up`)."""
    gives_way: bool = False
    """Whether the next checkpoint replaces it, because only the clock asked for it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.num_bytes for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the manifest's own hash."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Undoes `to_json` and ignores unknown fields; a ValueError if a field is missing or holds something else."""
        fields = [
            field for field in dataclasses.fields(cls) if field.name in values or field.default is dataclasses.MISSING
        ]
        for field in fields:
            if not _fits(values.get(field.name), field.type):
                raise ValueError(f'"{field.name}" is missing or has a wrong value')
        if not 0 <= values["time_unix"] <= _LAST_S:
            raise ValueError('"time_unix" is not a date')
        pairs = [pair for name in ("passed_over", "given_up") for pair in values.get(name, [])]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError('"passed_over" and "given_up" hold pairs')
        files = {name: FileDigest.of(name, entry) for name, entry in values["files"].items()}
        known = {field.name: values[field.name] for field in fields}
        return cls(**{**known, "files": files})


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value, with everything inside it, fits a field's type."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(each, inside[1]) for each in value.values())
    if origin is Sequence:
        return isinstance(value, list) and all(_fits(each, inside[0]) for each in value)
    if kind is int:
        return type(value) is int and 0 <= value <= _LARGEST
    types = {bool: (bool,), str: (str,), float: (int, float)}
    # `FileDigest.of` checks files, the schema the configuration.
    return type(value) in types[kind] if kind in types else True


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages that a checkpoint's tensors depend on."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` into a checkpoint's directory, and waits until the disk has it."""
    values = manifest.to_json()
    text = json.dumps({**values, "sha256": fingerprint(values)}, indent=1, sort_keys=True)
    write_file(directory / MANIFEST, text + "\n")


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint; a UserError if there is none, or it is garbled or of another version."""
    file = path / MANIFEST
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}; name the directory of a checkpoint, RUN_DIR/checkpoints/step_…")
    try:
        values = read_foreign_json(file)
    except FileNotFoundError:
        # The user may have named the run's directory, or that of its checkpoints.
        below = sorted(found.parent for found in [*path.glob(f"step_*/{MANIFEST}"), *path.glob(f"*/step_*/{MANIFEST}")])
        other = f"one in it, such as {below[-1]}" if below else "another, RUN_DIR/checkpoints/step_…"
        raise UserError(
            f"{path} is not a complete checkpoint of this application (no {MANIFEST} in it); name the "
            f"directory of {other}"
        ) from None
    except ForeignFileError as error:
        raise UserError(f"{error}: it is garbled; {_ANOTHER}") from error
    if "format_version" not in values:
        raise UserError(f"{file} is garbled (it states no format_version); {_ANOTHER}")
    saved_hash = values.pop("sha256", None)
    if saved_hash != fingerprint(values):
        raise UserError(f"{file} has changed since it was written: it does not match its own SHA-256; {_ANOTHER}")
    if values["format_version"] != FORMAT_VERSION:
        versions = values.get("versions")
        wrote = versions.get("gpt_pretrain") if isinstance(versions, dict) else None
        raise UserError(
            f"{file} is of format version {values['format_version']}, and this version of gpt_pretrain reads "
            f"{FORMAT_VERSION}; use the version that wrote it: {wrote or 'it does not say which'}"
        )
    try:
        return Manifest.from_json(values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is garbled ({error}); {_ANOTHER}") from error


def deal[Item](items: Iterable[Item], size_of: Callable[[Item], int], num_shares: int) -> list[list[Item]]:
    """Deals items out to ranks or files in even shares; every process computes the same.

    The largest item goes first, each to the smallest share so far.
    """
    shares: list[list[Item]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for item in sorted(items, key=size_of, reverse=True):
        smallest = totals.index(min(totals))
        shares[smallest].append(item)
        totals[smallest] += size_of(item)
    return shares


def _hash_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(num_bytes=file.tell(), sha256=digest.hexdigest())


def hash_files(directory: Path, names: Collection[str]) -> dict[str, FileDigest]:
    """Sizes and hashes of files of a directory, read by several threads."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: _hash_file(directory / name), names), strict=True))


def check_files(path: Path, manifest: Manifest, *, hashes: bool = True, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Compares this rank's share of a checkpoint's files with the manifest; returns a sentence for each problem.

    Without `hashes` only the sizes are compared. A file that the manifest does not know is a problem if torch or
    megatron-core would read it.
    """
    read = [] if rank else sorted({file for name in _READ for file in path.glob(name)})
    unknown = [
        f"{file} is unknown to the checkpoint's manifest; move it away"
        for file in read
        if file.name not in manifest.files
    ]
    names = deal(manifest.files, lambda name: manifest.files[name].num_bytes, num_ranks)[rank]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        found = threads.map(lambda name: _problem(path / name, manifest.files[name], hashes=hashes), names)
        return [*unknown, *(problem for problem in found if problem is not None)]


def _problem(path: Path, expected: FileDigest, *, hashes: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a regular file"
        if status.st_size != expected.num_bytes:
            how = "is truncated" if status.st_size < expected.num_bytes else "has grown"
            return f"{path} {how}: it has {status.st_size} bytes, and {expected.num_bytes} were written"
        found = _hash_file(path) if hashes else expected
    except FileNotFoundError:
        return f"{path} is missing: {expected.num_bytes} bytes were written"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if found != expected:
        return f"{path} has changed: its SHA-256 is {found.sha256}, and {expected.sha256} was written"
    return None
