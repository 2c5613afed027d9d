"""Where a run starts from, and where it goes back to while it runs.

It starts from its newest checkpoint, one that it was given, the weights of another run, or nothing. Nothing is loaded
from a checkpoint whose files are not, byte for byte, what was written.

A rewind is on the disk before anything is loaded, in three atomic steps: `latest` names the checkpoint, those of the
steps that are given up are removed, and the checkpoint's manifest says with which sample training goes on. A process
that is killed meanwhile leaves a checkpoint to resume from: before the last step with the samples that it was saved
with, and after it with those of the rewind.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.directory import (
    POINTER,
    complete_checkpoints,
    earlier_checkpoints,
    find_checkpoints,
    is_given_up,
    out_of_the_way,
    step_of,
    time_after,
)
from gpt_pretrain.checkpoint.manifest import Manifest, check_files, read_manifest, write_manifest
from gpt_pretrain.checkpoint.state import Progress
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import fsync, write_file
from gpt_pretrain.config.schema import CheckpointConfig
from gpt_pretrain.megatron.parallel import on_rank_zero

_PROBLEMS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files are what its manifest says; `verify_checkpoint` makes it."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run starts from."""

    checkpoint: VerifiedCheckpoint
    weights_only: bool
    """Whether only its weights are taken (`checkpoint.init_from`); otherwise the run goes on where it was saved."""
    warnings: Sequence[str] = ()
    """What went wrong in choosing it, for the user."""
    notes: Sequence[str] = ()
    """What else the user should know of the choice."""


def verify_checkpoint(path: Path) -> VerifiedCheckpoint:
    """Reads every byte of a checkpoint, each rank its share; all ranks call it.

    Raises:
        UserError: It is not a checkpoint, or files are missing, truncated or changed: names them; on all ranks alike.
    """
    manifest = on_rank_zero(lambda: read_manifest(path))
    world_size = torch.distributed.get_world_size()
    found: list[list[str]] = [[]] * world_size
    own = check_files(path, manifest, rank=torch.distributed.get_rank(), num_ranks=world_size)
    torch.distributed.all_gather_object(found, own)
    problems = [problem for of_rank in found for problem in of_rank]
    if problems:
        more = f"; {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
        raise UserError("; ".join(problems[:_PROBLEMS_SHOWN]) + more)
    return VerifiedCheckpoint(path=path, manifest=manifest)


def choose_start(config: CheckpointConfig, directory: Path) -> Start | None:
    """Finds and verifies what a run starts from; all ranks call it.

    A start from an earlier checkpoint gives up the later ones of the run's directory: the start's manifest says so in
    memory, and the manifests that the run will save say so on the disk.

    Returns:
        None where the run begins with fresh weights.

    Raises:
        UserError: The checkpoint that is meant is missing or damaged, and none may take its place; or `resume=never`
            would overwrite a run.
    """
    start = _find_start(config, directory)
    return start if start is None or start.weights_only else _give_up_others(start, directory)


def _find_start(config: CheckpointConfig, directory: Path) -> Start | None:
    if config.resume not in ("auto", "never"):
        named = Path(config.resume).absolute()
        return resume_from([named, *on_rank_zero(lambda: earlier_checkpoints(named))], fall_back=config.fall_back)
    found = on_rank_zero(lambda: find_checkpoints(directory))
    if config.resume == "never" and found.paths:
        raise UserError(
            f"checkpoint.resume=never, but run_dir={directory.parent} holds the checkpoints of a run; "
            "give another run_dir, or checkpoint.resume=auto to go on with it"
        )
    if found.paths:
        # If nothing says which one is meant, the newest good one is the best answer.
        start = resume_from(found.paths, fall_back=config.fall_back or found.problem is not None)
        if found.problem is not None:
            warning = f"{found.problem}; going on from {start.checkpoint.path.name}, the newest one that verifies"
            start = replace(start, warnings=[warning, *start.warnings])
        if config.init_from is not None:
            # A requeued run starts with the same command.
            note = f"checkpoint.init_from={config.init_from} is passed over: this run has checkpoints of its own"
            start = replace(start, notes=[note])
        return start
    if config.init_from is not None:
        return Start(checkpoint=verify_checkpoint(Path(config.init_from).absolute()), weights_only=True)
    return None


def _give_up_others(start: Start, directory: Path) -> Start:
    path, manifest = start.checkpoint.path, start.checkpoint.manifest
    # A run that goes on from another's checkpoint has no past in its own directory.
    first = manifest.step + 1 if path.parent.resolve() == directory.resolve() else 0

    def now_if_there_are() -> float | None:
        there = any(step_of(other) >= first for other in complete_checkpoints(directory))
        return time_after(directory, manifest.given_up) if there else None

    now = on_rank_zero(now_if_there_are)
    if now is None:
        return start
    before = [[step, saved] for step, saved in manifest.given_up if step < first]
    manifest = replace(manifest, given_up=[*before, [first, now]])
    return replace(start, checkpoint=replace(start.checkpoint, manifest=manifest))


def resume_from(candidates: Sequence[Path], *, fall_back: bool) -> Start:
    """Verifies the first candidate, or with `fall_back` finds the first one that verifies; all ranks call it.

    Raises:
        UserError: No candidate verifies; says why, and the ways out.
    """
    passed_over: list[str] = []
    for path in candidates:
        try:
            checkpoint = verify_checkpoint(path)
        except UserError as error:
            if not fall_back:
                raise UserError(f"{error}. {_way_out(candidates)}") from None
            passed_over.append(f"{path} is passed over: {error}")
            continue
        return Start(checkpoint=checkpoint, weights_only=False, warnings=passed_over)
    raise UserError(f"no checkpoint verifies. {'. '.join(passed_over[:_PROBLEMS_SHOWN])}. {_way_out(())}")


def _way_out(candidates: Sequence[Path]) -> str:
    anew = "start anew with another run_dir"
    if len(candidates) < 2:
        return f"Put the files back from a copy, or {anew}"
    return (
        "Put the files back from a copy, go on from the newest earlier checkpoint that verifies with "
        f"checkpoint.fall_back=true, or {anew}"
    )


def checkpoints_away_from(
    directory: Path, steps: Iterable[int], progress: Progress, *, before: int, margin: int
) -> list[Path]:
    """The checkpoints that a run may go back to, newest first; all ranks call it, while no save is being written.

    They lie at least `margin` steps before the step `before`, and at least as many away from each of `steps`. Those of
    attempts that the run was taken back from do not count.
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


def take_back(checkpoint: VerifiedCheckpoint, *, next_sample: int, given_up_at: Progress) -> VerifiedCheckpoint:
    """Makes a checkpoint the newest of its run, and has the run go on from it with another sample; all ranks call it.

    Args:
        checkpoint: One of the run's own.
        next_sample: The first to train on; the samples between the checkpoint's and this one are passed over.
        given_up_at: How far the run was: it has no checkpoint of a later step.

    Returns:
        The checkpoint with its new manifest; its tensors are unchanged.

    Raises:
        UserError: The directory cannot be written.
    """
    path, saved = checkpoint.path, checkpoint.manifest
    skipped = [saved.consumed_samples, next_sample - saved.consumed_samples]
    manifest = replace(
        saved,
        consumed_samples=next_sample,
        rewinds=given_up_at.rewinds + 1,
        given_up=given_up_at.given_up,
        passed_over=[*saved.passed_over, skipped],
    )

    def write() -> None:
        write_file(path.parent / POINTER, path.name + "\n")
        given_up = range(step_of(path) + 1, given_up_at.step + 1)
        others = [other for other in complete_checkpoints(path.parent) if step_of(other) in given_up]
        renamed = [out_of_the_way(other) for other in others]
        fsync(path.parent)
        for left in renamed:
            # The next save tries again to remove what cannot be removed now.
            shutil.rmtree(left, ignore_errors=True)
        write_manifest(path, manifest)

    on_rank_zero(write)
    return replace(checkpoint, manifest=manifest)
