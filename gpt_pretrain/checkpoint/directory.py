"""A run's directory of checkpoints: which it holds, how one is added, which others are then removed, and their table.

A checkpoint is a directory `RUN_DIR/checkpoints/step_00000300`, and `RUN_DIR/checkpoints/latest` names the newest one.
Names that begin with a dot belong to what is being written or removed: nothing reads them, and the next save removes
those that a killed process has left. None of this needs torch.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gpt_pretrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.errors import UserError, format_bytes, reason
from gpt_pretrain.config.files import fsync, publish_directory, unfinished_path, write_file
from gpt_pretrain.spec.recipes import recipes_of

POINTER = "latest"
_REMOVED = ".removed"
# Checkpoints that the clock would give the same time are this far apart.
_TICK_S = 1e-3


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"step_{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint of a run in the order in which they were saved, whether `latest` names it or not.

    That need not be the order of their steps: a run that was taken back has newer checkpoints of lower steps.
    """
    complete = [path for path in _steps(directory) if (path / MANIFEST).is_file()]
    return sorted(complete, key=lambda path: (_saved_at(path), step_of(path)))


def _steps(directory: Path) -> list[Path]:
    """Everything that is named like a checkpoint; nothing where there is no directory yet.

    Raises:
        UserError: The directory cannot be read, or it is a link that leads nowhere.
    """
    try:
        return [directory / name for name in os.listdir(directory) if _is_step(name)]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(directory):
            return []
        raise UserError(
            f"{directory} cannot be read as a directory of checkpoints ({error.strerror}): is a disk missing? Put it "
            "back, or start anew with another run_dir"
        ) from error


def time_after(directory: Path, given_up: Iterable[Sequence[float]] = ()) -> float:
    """The time to save a checkpoint with: now, or later than all that the run has saved or given up before.

    Seconds since 1970-01-01 UTC; the clock may have been set back in the meantime.
    """
    before = [*map(_saved_at, complete_checkpoints(directory)), *(moment for _, moment in given_up)]
    return max([time.time(), *(moment + _TICK_S for moment in before)])


def _manifest_of(path: Path) -> Manifest | None:
    """A checkpoint's manifest; None if it is garbled."""
    try:
        return read_manifest(path)
    except UserError:
        return None


def _saved_at(path: Path) -> float:
    """When a checkpoint was saved; one whose manifest is garbled counts as older than all others."""
    manifest = _manifest_of(path)
    return 0.0 if manifest is None else manifest.time_unix


def _is_step(name: str) -> bool:
    return name.startswith("step_") and name.removeprefix("step_").isdecimal()


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def is_given_up(path: Path, given_up: Iterable[Sequence[float]]) -> bool:
    """Whether a checkpoint belongs to an attempt that the run was taken back from (`Manifest.given_up`)."""
    return any(step_of(path) >= step and _saved_at(path) < moment for step, moment in given_up)


def earlier_checkpoints(path: Path) -> list[Path]:
    """The checkpoints beside one that it came from, the last saved first.

    Those of higher steps were given up when the run was taken back behind them; so may some of lower steps have been.
    """
    if not _is_step(path.name):
        return []
    given_up = _given_up(path)
    return [
        other
        for other in complete_checkpoints(path.parent)[::-1]
        if step_of(other) < step_of(path) and not is_given_up(other, given_up)
    ]


def _given_up(path: Path) -> Sequence[Sequence[float]]:
    """What a checkpoint's manifest says of others; if it is garbled, what all readable manifests beside it say."""
    own = _manifest_of(path)
    manifests = map(_manifest_of, complete_checkpoints(path.parent)) if own is None else [own]
    return [entry for manifest in manifests if manifest is not None for entry in manifest.given_up]


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, if both exist."""
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return directory / name if _is_step(name) and (directory / name).is_dir() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoints:
    """The checkpoints that a run can go on from."""

    paths: Sequence[Path]
    """The one that `latest` names and the earlier ones, newest first."""
    problem: str | None
    """What is wrong with `latest`, if it names none of them; the paths are then all complete checkpoints."""


def find_checkpoints(directory: Path) -> FoundCheckpoints:
    """The checkpoint that `latest` names, and those before it; their files are not checked.

    A checkpoint newer than the named one was given up: a user changes `latest` to go back behind it.

    Raises:
        UserError: `latest` or the directory of a checkpoint exists, but no complete one; `latest` is not a file; the
            directory cannot be read.
    """
    complete, pointer = complete_checkpoints(directory)[::-1], directory / POINTER
    if os.path.lexists(pointer) and not pointer.is_file():
        raise UserError(f"{pointer} is no file, which the next save could not write; remove it")
    newest = latest_checkpoint(directory)
    if newest is not None:
        return FoundCheckpoints(paths=[newest, *earlier_checkpoints(newest)], problem=None)
    if not complete:
        there = [path for path in (pointer, *_steps(directory)) if os.path.lexists(path)]
        if there:
            raise UserError(
                f"{there[0]} is there, and no complete checkpoint is: they were deleted, or are kept elsewhere; put "
                "them back, or start anew with another run_dir"
            )
        return FoundCheckpoints(paths=[], problem=None)
    problem = f"{pointer} names no checkpoint that is there" if os.path.lexists(pointer) else f"{pointer} is missing"
    return FoundCheckpoints(paths=complete, problem=problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints of a run stay once another is complete."""

    keep_last: int | None
    """How many of those saved last; None: all."""
    keep_every: int | None
    """Checkpoints of steps that it divides stay for ever; None: none."""

    def superseded(self, complete: list[Path]) -> list[Path]:
        """Which checkpoints go, given all in the order in which they were saved; never the last."""
        if self.keep_last is None:
            return []
        return [path for path in complete[: -self.keep_last] if not self.keeps_for_ever(path)]

    def keeps_for_ever(self, path: Path) -> bool:
        """Whether `keep_every` says so."""
        return self.keep_every is not None and step_of(path) % self.keep_every == 0


KEEP_ALL = Retention(keep_last=None, keep_every=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a checkpoint goes."""

    directory: Path
    """The run's checkpoints, `RUN_DIR/checkpoints`."""
    step: int
    retention: Retention

    @property
    def path(self) -> Path:
        """The checkpoint's own directory."""
        return checkpoint_path(self.directory, self.step)

    @property
    def unfinished(self) -> Path:
        """Where it is written, until it is complete."""
        return unfinished_path(self.path)

    def clear(self) -> None:
        """Makes the run's directory of checkpoints, and removes what killed saves have left in it.

        Raises:
            OSError: It cannot be made.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in (*unfinished_saves(self.directory), *self.directory.glob(f".step_*{_REMOVED}")):
            shutil.rmtree(left, ignore_errors=True)

    def publish(self) -> None:
        """Gives the complete checkpoint its name, makes `latest` name it, and removes those that it supersedes.

        A checkpoint of the same step is replaced. Those that give way to the next one (`Manifest.gives_way`) go,
        whatever the retention says.

        Raises:
            OSError: A name cannot be changed; `latest` names a complete checkpoint in any case.
        """
        fsync(self.unfinished)
        replaced = out_of_the_way(self.path) if self.path.exists() else None
        publish_directory(self.unfinished, self.path)
        write_file(self.directory / POINTER, self.path.name + "\n")
        # The new one is the last, even if the clock was set back.
        others = [other for other in complete_checkpoints(self.directory) if other != self.path]
        superseded = [other for other in others if (found := _manifest_of(other)) is not None and found.gives_way]
        stay = [other for other in others if other not in superseded]
        superseded += self.retention.superseded([*stay, self.path])
        for left in filter(None, [replaced, *(out_of_the_way(old) for old in superseded)]):
            # The next save tries again to remove what cannot be removed now.
            shutil.rmtree(left, ignore_errors=True)


def out_of_the_way(path: Path) -> Path:
    """Renames a checkpoint that is to be removed, so that a half removed one is never taken for a whole one.

    The next save removes the returned path if nobody else does.

    Raises:
        OSError: It cannot be renamed.
    """
    removed = path.with_name(f".{path.name}{_REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    return path.rename(removed)


def find_directory(path: Path) -> Path:
    """The directory of checkpoints, given a run's directory or its `checkpoints`.

    Raises:
        UserError: It is neither.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name a run's directory, or its checkpoints/")
    if (path / MANIFEST).is_file():
        raise UserError(f"{path} is a single checkpoint; name its run's directory, or check it with verify {path}")
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not complete_checkpoints(directory):
        raise UserError(f"{directory} holds no complete checkpoint (step_…/{MANIFEST})")
    return directory


def list_checkpoints(directory: Path) -> Table:
    """A row for each complete checkpoint, in the order in which they were saved."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for name, justify in (("step", "right"), ("saved", "left"), ("size", "right"), ("layout", "left"), ("fp8", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # rich knows the words
    table.add_column("", overflow="fold")
    newest = latest_checkpoint(directory)
    for path in complete_checkpoints(directory):
        mark = Text("latest", style="bold green") if path == newest else Text()
        try:
            manifest = read_manifest(path)
            described = _described(path, manifest)
        except UserError as error:
            table.add_row(str(step_of(path)), "", "", "", "", Text(str(error), style="bold red"))
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_unix))
        table.add_row(str(manifest.step), saved, format_bytes(manifest.num_bytes), *described, mark)
    return table


def _described(path: Path, manifest: Manifest) -> tuple[str, str]:
    try:
        return describe_layout(manifest), _fp8(manifest)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path / MANIFEST} describes no run ({reason(error)})") from error


def describe_layout(manifest: Manifest) -> str:
    """How a checkpoint was spread over ranks: "8 ranks: TP2 PP2 DP2, distributed optimizer"."""
    layout = manifest.layout
    ranks = int(layout["processes"])
    sizes = {name: int(layout[f"model.{key}_parallel_size"]) for name, key in _SIZES.items()}
    sizes["DP"] = ranks // (sizes["TP"] * sizes["PP"] * sizes["CP"])
    spread = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    described = f"{ranks} ranks: {spread}" if ranks > 1 else "1 rank"
    distributed = layout["model.use_distributed_optimizer"] == "true"
    return described + (", distributed optimizer" if distributed else "")


_SIZES = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context"}


def _fp8(manifest: Manifest) -> str:
    model: Mapping[str, Any] = manifest.config["model"]
    if not model["fp8"]:
        return "off"
    emulated = ", emulated" if model["fp8_emulate"] else ""
    # Checkpoints older than the key come from Transformer Engine.
    backend = Fp8Backend[model.get("fp8_backend") or Fp8Backend.transformer_engine.name]
    recipe = model["fp8_recipe"] or recipes_of(backend)[0].name
    engine = "" if backend is Fp8Backend.transformer_engine else f"{backend.name} "
    return engine + recipe + (", weights in FP8" if model["fp8_params"] else "") + emulated


def unfinished_saves(directory: Path) -> list[Path]:
    """What killed saves have left, or a save writes now; the next save removes it."""
    return sorted(directory.glob(unfinished_path(Path("step_*")).name))
