"""Takes a run back to one of its own checkpoints while it runs, and on from there with other samples.

What the rewind decides is on the disk before anything is loaded, in three steps, each of them whole or not there at
all: `latest` names the checkpoint, those of steps that are given up go, and its manifest says with which sample
training goes on. A process that is killed meanwhile finds a checkpoint to resume from: with the same samples again
until the last of the three is done, and from then on with those that the rewind itself would have gone on with.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gpt_pretrain.checkpoint.directory import POINTER, complete_checkpoints, is_given_up, step_of
from gpt_pretrain.checkpoint.durable import fsync, write_durably
from gpt_pretrain.checkpoint.manifest import write_manifest
from gpt_pretrain.checkpoint.publishing import out_of_the_way
from gpt_pretrain.checkpoint.start import VerifiedCheckpoint
from gpt_pretrain.checkpoint.state import Progress
from gpt_pretrain.megatron.parallel import on_rank_zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Detour:
    """Where training goes on from a checkpoint, in place of the sample that it was saved at."""

    next_sample: int
    """The first sample to train on; those from the checkpoint's up to it are passed over."""
    given_up_at: Progress
    """How far the run was: it has no checkpoint of a later step."""


def checkpoints_away_from(
    directory: Path, steps: Iterable[int], progress: Progress, *, before: int, margin: int
) -> list[Path]:
    """A run's checkpoints that may be gone back to, newest first; all ranks call it.

    Args:
        directory: The run's checkpoints, `RUN_DIR/checkpoints`; no save is being written.
        steps: Steps that no such checkpoint is near to, on either side.
        progress: The run's: attempts that it was taken back from have left checkpoints, too.
        before: A step that lies behind all of them.
        margin: Steps that are near.
    """

    def find() -> list[Path]:
        return [
            path
            for path in complete_checkpoints(directory)[::-1]
            if step_of(path) <= before - margin
            and all(abs(step - step_of(path)) >= margin for step in steps)
            and not is_given_up(path, progress.given_up)
        ]

    return on_rank_zero(find)


def take_back(checkpoint: VerifiedCheckpoint, detour: Detour) -> VerifiedCheckpoint:
    """Makes a checkpoint the newest of its run, with another sample to go on with; all ranks call it.

    Args:
        checkpoint: One of the run's own.
        detour: What comes after it.

    Returns:
        The checkpoint as it is now: its tensors are what they were.

    Raises:
        UserError: The directory cannot be written.
    """
    path, saved = checkpoint.path, checkpoint.manifest
    skipped = [saved.consumed_samples, detour.next_sample - saved.consumed_samples]
    manifest = replace(
        saved,
        consumed_samples=detour.next_sample,
        rewinds=detour.given_up_at.rewinds + 1,
        given_up=detour.given_up_at.given_up,
        passed_over=[*saved.passed_over, skipped],
    )

    def write() -> None:
        write_durably(path.parent / POINTER, path.name + "\n")
        given_up = range(step_of(path) + 1, detour.given_up_at.step + 1)
        others = [other for other in complete_checkpoints(path.parent) if step_of(other) in given_up]
        renamed = [out_of_the_way(other) for other in others]
        fsync(path.parent)
        for left in renamed:
            # A file that cannot be removed now is tried again at the next save.
            shutil.rmtree(left, ignore_errors=True)
        write_manifest(path, manifest)

    on_rank_zero(write)
    return replace(checkpoint, manifest=manifest)
