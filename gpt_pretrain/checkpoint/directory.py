"""A run's directory of checkpoints: which it holds, how one is added, and which others are then removed.

A checkpoint is a directory `RUN_DIR/checkpoints/step_00000300`, and `RUN_DIR/checkpoints/latest` names the newest one.
Names that begin with a dot belong to what is being written or removed: nothing reads them, and the next save removes
those that a killed process has left. None of this needs torch.
"""

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpt_pretrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import fsync, publish_directory, remove, unfinished_path, write_file

POINTER = "latest"
_REMOVED = ".removed"
# Between checkpoints that would have the same time by the clock.
_TICK_S = 1e-3


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"step_{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint of a run in the order in which they were saved; after a rewind not that of their steps."""
    complete = [path for path in _steps(directory) if (path / MANIFEST).is_file()]
    return sorted(complete, key=lambda path: (_saved_at(path), step_of(path)))


def _steps(directory: Path) -> list[Path]:
    """Everything named like a checkpoint; nothing without a directory, but a dangling link is an error."""
    try:
        return [directory / name for name in os.listdir(directory) if _is_step(name)]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(directory):
            return []
        raise UserError(
            f"{directory} cannot be read as a directory of checkpoints ({error.strerror}): is a disk missing? Put it "
            "back, or start afresh with another run_dir"
        ) from error


def time_after(directory: Path, given_up: Iterable[Sequence[float]] = ()) -> float:
    """The time to save a checkpoint with, in seconds since 1970-01-01 UTC.

    It is now or, if the clock was set back, later than every time at which the run saved or gave up a checkpoint.
    """
    before = [*map(_saved_at, complete_checkpoints(directory)), *(moment for _, moment in given_up)]
    return max([time.time(), *(moment + _TICK_S for moment in before)])


def _manifest_of(path: Path) -> Manifest | None:
    """None if it is garbled."""
    try:
        return read_manifest(path)
    except UserError:
        return None


def _saved_at(path: Path) -> float:
    """When a checkpoint was saved; one with a garbled manifest counts as older than all others."""
    manifest = _manifest_of(path)
    return 0.0 if manifest is None else manifest.time_unix


def _is_step(name: str) -> bool:
    return name.startswith("step_") and name.removeprefix("step_").isdecimal()


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def is_given_up(path: Path, given_up: Iterable[Sequence[float]]) -> bool:
    """Whether a checkpoint belongs to an attempt that a rewind gave up (`Manifest.given_up`)."""
    return any(step_of(path) >= step and _saved_at(path) < moment for step, moment in given_up)


def earlier_checkpoints(path: Path) -> list[Path]:
    """The checkpoints beside one that its run passed on the way to it, the last saved first.

    A rewind gave up those of higher steps, and maybe some of lower steps.
    """
    if not _is_step(path.name):
        return []
    complete, own = complete_checkpoints(path.parent)[::-1], _manifest_of(path)
    # If its manifest is garbled, all readable ones beside it tell what was given up.
    manifests = [own] if own is not None else map(_manifest_of, complete)
    given_up = [entry for manifest in manifests if manifest is not None for entry in manifest.given_up]
    return [other for other in complete if step_of(other) < step_of(path) and not is_given_up(other, given_up)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, if both exist."""
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return directory / name if _is_step(name) and (directory / name).is_dir() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoints:
    """The checkpoints that a run can resume from."""

    paths: Sequence[Path]
    """The one that `latest` names and those before it, newest first; all complete ones if `latest` has a problem."""
    problem: str | None
    """Why `latest` names none of them."""


def find_checkpoints(directory: Path) -> FoundCheckpoints:
    """Finds what a run can resume from; files are not checked.

    A checkpoint newer than `latest` was given up: a user changes `latest` to go back behind it.

    Raises:
        UserError: `latest` or the directory of a checkpoint exists, but no complete one; `latest` is not a file; the
            directory cannot be read.
    """
    complete, pointer = complete_checkpoints(directory)[::-1], directory / POINTER
    if os.path.lexists(pointer) and not pointer.is_file():
        raise UserError(f"{pointer} is not a file, so the next save could not write it; remove it")
    newest = latest_checkpoint(directory)
    if newest is not None:
        return FoundCheckpoints(paths=[newest, *earlier_checkpoints(newest)], problem=None)
    if not complete:
        there = [path for path in (pointer, *_steps(directory)) if os.path.lexists(path)]
        if there:
            raise UserError(
                f"{there[0]} exists, but no complete checkpoint does: they were deleted or moved; put "
                "them back, or start afresh with another run_dir"
            )
        return FoundCheckpoints(paths=[], problem=None)
    problem = f"{pointer} names no existing checkpoint" if os.path.lexists(pointer) else f"{pointer} is missing"
    return FoundCheckpoints(paths=complete, problem=problem)


def name_in(directory: Path, path: Path) -> str:
    """What a run calls a checkpoint: the name of one of its own, which moves with the run, or the real path."""
    path = Path(os.path.realpath(path))
    return path.name if path.parent == Path(os.path.realpath(directory)) else str(path)


def progress_since(directory: Path, named: Path) -> FoundCheckpoints | None:
    """What a run can resume from if its newest checkpoint descends from the one that a path names; else None.

    The path itself may be gone: the run keeps its last checkpoints, not the one that it began with.
    """
    if not complete_checkpoints(directory):
        return None
    found = find_checkpoints(directory)
    # If the newest one is garbled, the one before it knows; if none does, none may be given up.
    newest = next((known for path in found.paths if (known := _manifest_of(path)) is not None), None)
    return found if newest is None or name_in(directory, named) in newest.resumed_from else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints of a run stay once another is complete."""

    keep_last: int | None
    """How many of those saved last stay; None: all."""
    keep_every: int | None
    """Checkpoints stay forever if it divides their step; None: none does."""
    keep_best: bool = False
    """The one with the lowest validation loss stays until another has a lower one."""

    def superseded(self, complete: list[Path]) -> list[Path]:
        """Which of all checkpoints, in the order in which they were saved, go; never the last."""
        if self.keep_last is None:
            return []
        best = best_checkpoint(complete) if self.keep_best else None
        return [path for path in complete[: -self.keep_last] if path != best and not self.keeps_forever(path)]

    def keeps_forever(self, path: Path) -> bool:
        """Whether `keep_every` keeps a checkpoint."""
        return self.keep_every is not None and step_of(path) % self.keep_every == 0


def best_checkpoint(paths: Sequence[Path]) -> Path | None:
    """The one that was saved with the lowest validation loss, the first of equals; None if none was validated."""
    losses = {
        path: manifest.validation_loss
        for path in paths
        if (manifest := _manifest_of(path)) is not None and manifest.validation_loss is not None
    }
    return min(losses, key=losses.__getitem__, default=None)


KEEP_ALL = Retention(keep_last=None, keep_every=None)


def unfinished_saves(directory: Path) -> list[Path]:
    """What killed saves have left, or a save writes now; the next start or save removes it."""
    return sorted(directory.glob(unfinished_path(Path("step_*")).name))


def remove_unfinished(directory: Path) -> None:
    """Removes what killed saves have left in a run's directory of checkpoints, which need not exist."""
    for left in (*unfinished_saves(directory), *directory.glob(f".step_*{_REMOVED}")):
        # What stays is in the way only of a save of its own step.
        with suppress(OSError):
            remove(left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A run's directory of checkpoints as it was: whether its path still leads to the run's checkpoints."""

    directory: Path
    identity: tuple[int, int] | None
    """Device and inode; None: there was none."""
    newest: Path | None
    """The checkpoint that `latest` named."""

    @classmethod
    def of(cls, directory: Path) -> Self:
        """As it is now."""
        return cls(directory=directory, identity=_identity(directory), newest=latest_checkpoint(directory))

    def problem(self) -> str | None:
        """Why nothing should be saved there now; None if it may, also if the directory was deleted or moved as a whole.

        Another directory is the run's if it holds the newest checkpoint, as on another disk that a link leads to.
        """
        now = _identity(self.directory)
        if now is None or now == self.identity or self.newest is None or self.newest.is_dir():
            return None
        return (
            f"{self.directory} is another directory than before and lacks {self.newest.name}: is a disk missing? Put "
            f"it back, or delete {self.directory} to save there anew"
        )


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = directory.stat()
    except OSError:
        # Saving there says more.
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a checkpoint is saved."""

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
        """Where it is written until it is complete."""
        return unfinished_path(self.path)

    def clear(self) -> None:
        """Makes the run's directory of checkpoints, and removes what killed saves have left in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.directory)

    def publish(self) -> None:
        """Gives the complete checkpoint its name, makes `latest` name it, and removes those that it supersedes.

        A checkpoint of the same step is replaced. Those that give way to the next one (`Manifest.gives_way`) go,
        whatever the retention says. After an OSError `latest` still names a complete checkpoint.
        """
        fsync(self.unfinished)
        replaced = out_of_the_way(self.path) if os.path.lexists(self.path) else None
        publish_directory(self.unfinished, self.path)
        write_file(self.directory / POINTER, self.path.name + "\n")
        # The new one is the last, even if the clock was set back.
        others = [other for other in complete_checkpoints(self.directory) if other != self.path]
        superseded = [other for other in others if (found := _manifest_of(other)) is not None and found.gives_way]
        stay = [other for other in others if other not in superseded]
        superseded += self.retention.superseded([*stay, self.path])
        for left in filter(None, [replaced, *(out_of_the_way(old) for old in superseded)]):
            # The next save removes what cannot be removed now.
            shutil.rmtree(left, ignore_errors=True)


def out_of_the_way(path: Path) -> Path:
    """Renames a checkpoint before its removal, so that a half removed one is never taken for a whole one.

    The next save removes the returned path if nobody else does.
    """
    removed = path.with_name(f".{path.name}{_REMOVED}")
    remove(removed)
    return path.rename(removed)
