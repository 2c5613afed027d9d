"""The manifest of a checkpoint: its contents, its run, and the size and SHA-256 of each of its files.

`manifest.json` is written last, so a checkpoint that has one is complete. It is plain JSON, which Python reads without
torch. A SHA-256 of its own shows a changed digit in it, as the files' hashes do in a tensor.
"""

import hashlib
import importlib.metadata
import json
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, read_foreign_json, write_file
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.config.mixtures import ConsumedSource
from gpt_pretrain.config.schedule import Trained
from gpt_pretrain.config.yaml_files import check_values
from gpt_pretrain.data.cache import fingerprint

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

# Hashing releases Python's lock: four threads read as fast as most file systems can.
_NUM_THREADS = 4
# Names that the readers of torch and megatron-core look for.
_READ = (".metadata", "*.distcp", "common.pt", "metadata.json")
# Of these, a checkpoint of ours has none, nor the folder above it.
_OF_MEGATRON = (
    "common.pt",
    "latest_checkpointed_iteration.txt",
    "weights/metadata.json",
    "model_weights/metadata.json",
)
# The packages that a checkpoint depends on.
_DISTRIBUTIONS = ("torch", "megatron-core", "transformer_engine", "gpt_pretrain")
# Seconds since 1970 of which every system makes a date.
_LAST_S = 2**32
_ANOTHER = "use another checkpoint of the run"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest(JsonObject):
    """What a file must be; its SHA-256 is hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress(JsonObject):
    """How far a run is; manifests of older checkpoints lack the fields with defaults."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples behind the run in the data, including those passed over."""
    rewinds: int = 0
    """How often the run went back behind a loss spike."""
    passed_over: tuple[tuple[int, int], ...] = ()
    """Samples that rewinds gave up and nothing was trained on: the first and the number of each range."""
    losses: tuple[float, ...] = ()
    """The last losses in nats per token, oldest first, by which spikes are found."""
    spikes: tuple[int, ...] = ()
    """Steps with a loss spike that the run kept."""
    fp8_proofs: int = 0
    """Proofs of FP8 so far, by which the next ones take turns."""
    given_up: tuple[tuple[int, float], ...] = ()
    """Which checkpoints of the directory belong to attempts that were given up: pairs of a step and a time, for those
    of that step or a later one that were saved before that time (`directory.is_given_up`)."""
    resumed_from: tuple[str, ...] = ()
    """Which checkpoints `checkpoint.resume=PATH` has named on the way here (`directory.name_in`)."""
    earlier_lengths: tuple[tuple[int, int], ...] = ()
    """What was consumed before model.encoder_seq_length changed: numbers of samples, and the value for each."""
    validation_loss: float | None = None
    """Of a validation after this very step; None: there was none, or its loss is not finite."""
    sources: Mapping[str, ConsumedSource] | None = None
    """What was read of each source, by its name; None if an earlier version has saved it."""

    def consumed_tokens(self, sequence_length: int) -> int:
        """Training tokens behind the run in the data, the last of them in samples of `sequence_length` tokens."""
        return self._tokens_of(self.consumed_samples, sequence_length)

    def trained(self, sequence_length: int) -> Trained:
        """What the run has trained on, without what rewinds passed over."""
        samples, tokens = self.consumed_samples, self.consumed_tokens(sequence_length)
        for first, num_samples in self.passed_over:
            samples -= num_samples
            tokens -= self._tokens_of(first + num_samples, sequence_length) - self._tokens_of(first, sequence_length)
        return Trained(self.step, samples, tokens)

    def _tokens_of(self, num_samples: int, sequence_length: int) -> int:
        """Tokens of the first samples."""
        tokens = 0
        for earlier, length in self.earlier_lengths:
            of_length = min(earlier, num_samples)
            tokens += of_length * length
            num_samples -= of_length
        return tokens + num_samples * sequence_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(TrainingProgress):
    """What a checkpoint says of itself and of the run that saved it."""

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
    extensions: Mapping[str, str] | None = None
    """SHA-256 of the code of each package whose modules were extensions (`extend.code.code_digests`); None if an
    earlier version has saved it."""
    gives_way: bool = False
    """Whether the next checkpoint replaces it, because only the clock asked for it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def has_reset_fp8_state(self) -> bool:
        """Whether its run was started with `checkpoint.reset_fp8_state`, so that its FP8 scales are from since then."""
        section = self.config.get("checkpoint")
        return isinstance(section, dict) and section.get("reset_fp8_state") is True

    @property
    def progress(self) -> TrainingProgress:
        """How far the run was."""
        return TrainingProgress(**{field.name: getattr(self, field.name) for field in fields(TrainingProgress)})

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample; None if its configuration does not say."""
        section = self.config.get("model")
        length = section.get("encoder_seq_length") if isinstance(section, dict) else None
        return length if type(length) is int else None

    def progress_at(self, sequence_length: int) -> TrainingProgress:
        """How far the run was, for a run whose samples have so many tokens."""
        saved, done = self.sequence_length, self.progress
        if saved is None or saved == sequence_length:
            return done
        since = done.consumed_samples - sum(num_samples for num_samples, _ in done.earlier_lengths)
        return replace(done, earlier_lengths=(*done.earlier_lengths, (since, saved)))


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages that a checkpoint's tensors depend on."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` into a checkpoint's directory, and waits until the disk has it."""
    values = {"format_version": FORMAT_VERSION, **manifest.to_json()}
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
        if any((path / name).exists() for name in _OF_MEGATRON):
            raise UserError(
                f"{path} is a checkpoint of Megatron-LM or NeMo: python -m gpt_pretrain.import_megatron path={path} "
                "out=start makes one of it that checkpoint.init_from takes"
            ) from None
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
        manifest = Manifest.from_json(values)
        check_values(manifest.config)
        times = [manifest.time_unix, *(moment for _, moment in manifest.given_up)]
        if not all(0 <= moment <= _LAST_S for moment in times):
            raise ValueError('"time_unix" or "given_up" holds no date')
        if elsewhere := [name for name in manifest.files if PurePath(name).name != name]:
            raise ValueError(f"{elsewhere[0]!r} is not the name of a file in its directory")
    except ValueError as error:
        raise UserError(f"{file} is garbled ({error}); {_ANOTHER}") from error
    return manifest


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
