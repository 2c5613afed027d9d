"""gpt_pretrain.checkpoint: which checkpoints a run has, and whether they are whole.

Exit codes: 0 done; 2 a wrong path, or a checkpoint that is not what was
written; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.checkpoint list outputs/mine
    python -m gpt_pretrain.checkpoint verify outputs/mine/checkpoints/step_00000300
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console

from gpt_pretrain.checkpoint.directory import complete_checkpoints, find_directory, list_checkpoints, unfinished_saves
from gpt_pretrain.checkpoint.manifest import MANIFEST, check_files, read_manifest
from gpt_pretrain.commands.door import run_with_arguments
from gpt_pretrain.config.errors import ConfigError, UserError, format_bytes


class Task(Enum):
    """What is done with checkpoints."""

    list = "list"
    verify = "verify"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    """What the command takes, in this order also without the keys."""

    command: Task
    """list: show step, time, size, layout and FP8 of each checkpoint; verify: compare every byte with its SHA-256."""
    path: str
    """A run's directory or its checkpoints/; for verify also one checkpoint."""


def show_list(path: Path) -> None:
    """Prints a run's checkpoints as a table.

    Raises:
        UserError: There are none at this path.
    """
    directory = find_directory(path)
    # A pipe has no width: whole lines, for grep and awk.
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
    console.print(list_checkpoints(directory))
    for left in unfinished_saves(directory):
        console.print(f"{left.name}: a save that did not end; the next one removes it", markup=False)


def verify(path: Path) -> None:
    """Reads every byte of a checkpoint, or of all checkpoints of a run, and prints what was found.

    Raises:
        UserError: A file is missing, truncated or changed: names each; or there is no checkpoint at this path.
    """
    is_one = (path / MANIFEST).is_file() or path.name.startswith("step_")
    paths = [path] if is_one else complete_checkpoints(find_directory(path))
    problems = []
    for checkpoint in paths:
        try:
            manifest = read_manifest(checkpoint)
        except UserError as error:
            problems.append(str(error))
            continue
        found = check_files(checkpoint, manifest)
        problems += found
        if not found:
            size = format_bytes(manifest.num_bytes)
            sys.stdout.write(f"{checkpoint}: {len(manifest.files)} files, {size}: as they were written\n")
            sys.stdout.flush()
    if problems:
        raise ConfigError(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""

    def list_or_verify(given: CheckpointArguments) -> None:
        (show_list if given.command is Task.list else verify)(Path(given.path))

    return run_with_arguments(__doc__, CheckpointArguments, list_or_verify, arguments, plain=("command", "path"))


if __name__ == "__main__":
    raise SystemExit(main())
