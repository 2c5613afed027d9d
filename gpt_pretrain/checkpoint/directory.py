"""A run's directory of checkpoints: which are there, and which is the newest.

A checkpoint is a directory `RUN_DIR/checkpoints/step_00000300`, and `RUN_DIR/checkpoints/latest` names the newest one.
"""

from pathlib import Path

from megatron.core import dist_checkpointing

from gpt_pretrain.config.errors import UserError

POINTER = "latest"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"step_{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint of a run, oldest first, whether `latest` names it or not."""
    steps = {path: path.name.removeprefix("step_") for path in directory.glob("step_*")}
    complete = [
        path
        for path, step in steps.items()
        if step.isdecimal() and dist_checkpointing.check_is_distributed_checkpoint(str(path))
    ]
    return sorted(complete, key=lambda path: int(steps[path]))


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, if it is there."""
    name = _latest_name(directory)
    return directory / name if name and (directory / name).is_dir() else None


def _latest_name(directory: Path) -> str:
    pointer = directory / POINTER
    return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""


def find_newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; None where no checkpoint was ever completed.

    Raises:
        UserError: The pointer names a checkpoint that is not there, or is missing where there are checkpoints.
    """
    newest = latest_checkpoint(directory)
    if newest is not None:
        return newest
    pointer, name, complete = directory / POINTER, _latest_name(directory), complete_checkpoints(directory)
    if name:
        raise UserError(
            f"{pointer} names {name}, which is not in {directory}; write the name of one that is into it, "
            "or start anew with checkpoint.resume=never and another run_dir"
        )
    if complete:
        # Which of them is meant is not for us to guess: the newest may be what somebody wanted to go back behind.
        raise UserError(
            f"{directory} holds {len(complete)} complete checkpoint(s), and {pointer} does not name one of them; the "
            f"newest is {complete[-1].name}: write its name into that file, or use "
            f"checkpoint.resume={complete[-1]}; to start anew, give another run_dir"
        )
    return None
