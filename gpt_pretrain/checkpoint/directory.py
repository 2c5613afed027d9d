"""A run's directory of checkpoints: which are there, and which is the newest.

A checkpoint is a directory `RUN_DIR/checkpoints/step_00000300`, and `RUN_DIR/checkpoints/latest` names the newest one.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.checkpoint.manifest import MANIFEST, read_manifest
from gpt_pretrain.config.errors import UserError

POINTER = "latest"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"step_{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint of a run in the order in which they were saved, whether `latest` names it or not.

    Not by their steps: a run that was taken back to an earlier step has newer checkpoints with lower ones.
    """
    complete = [path for path in directory.glob("step_*") if _is_step(path.name) and (path / MANIFEST).is_file()]
    return sorted(complete, key=lambda path: (_saved_at(path), step_of(path)))


def _saved_at(path: Path) -> float:
    """When a checkpoint was saved; one whose manifest is garbled counts as older than all others."""
    try:
        return read_manifest(path).time_unix
    except UserError:
        return 0.0


def _is_step(name: str) -> bool:
    return name.startswith("step_") and name.removeprefix("step_").isdecimal()


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def is_given_up(path: Path, given_up: Iterable[Sequence[float]]) -> bool:
    """Whether a checkpoint is of an attempt that the run was taken back from, and so none of its past.

    Args:
        path: A checkpoint.
        given_up: Pairs of a step and a time, seconds since 1970-01-01 UTC: what was saved of that step or a later one
            before that time was given up (`Manifest.given_up`).
    """
    return any(step_of(path) >= step and _saved_at(path) < time for step, time in given_up)


def earlier_checkpoints(path: Path) -> list[Path]:
    """The checkpoints beside one that it came from, the last saved first.

    Those of higher steps were given up when the run was taken back behind them, and some of lower ones may have been
    by an attempt before.
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
    """What a checkpoint's manifest says of others; where it is garbled, what all that can be read beside it say."""
    try:
        return read_manifest(path).given_up
    except UserError:
        pass
    found: list[Sequence[float]] = []
    for other in complete_checkpoints(path.parent):
        with suppress(UserError):
            found += read_manifest(other).given_up
    return found


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, if it is there."""
    name = _latest_name(directory)
    return directory / name if name is not None and (directory / name).is_dir() else None


def _latest_name(directory: Path) -> str | None:
    """None where there is no `latest`, or nothing in it that could be the name of a checkpoint."""
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return name if _is_step(name) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoints:
    """The checkpoints that a run can go on from."""

    paths: Sequence[Path]
    """The one that `latest` names and the earlier ones; newest first."""
    problem: str | None
    """What is wrong with `latest`, where it names none of them: then all are there."""


def find_checkpoints(directory: Path) -> FoundCheckpoints:
    """The checkpoint that `latest` names, and those before it. Whether they are whole is another question.

    A checkpoint newer than the named one was given up: `latest` is what a user changes to go back behind it.

    Raises:
        UserError: There is a pointer, and no checkpoint at all.
    """
    newest, complete = latest_checkpoint(directory), complete_checkpoints(directory)[::-1]
    if newest is not None:
        return FoundCheckpoints(paths=[newest, *earlier_checkpoints(newest)], problem=None)
    pointer = directory / POINTER
    if not complete:
        if pointer.exists():
            raise UserError(
                f"{pointer} is there, and no checkpoint is: they were deleted, or are kept elsewhere; put them back, "
                "or start anew with another run_dir"
            )
        return FoundCheckpoints(paths=[], problem=None)
    problem = f"{pointer} names no checkpoint that is there" if pointer.exists() else f"{pointer} is missing"
    return FoundCheckpoints(paths=complete, problem=problem)
