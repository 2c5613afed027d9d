"""`python -m gpt_pretrain.checkpoint list|verify DIR`: which checkpoints a run has, and whether they are whole.

It reads files alone: no GPU, no process group, and torch is not loaded. Exit codes: 0, or 2 for a wrong path and for
a checkpoint that is not what was written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpt_pretrain.checkpoint.directory import complete_checkpoints
from gpt_pretrain.checkpoint.listing import find_directory, list_checkpoints, unfinished_saves
from gpt_pretrain.checkpoint.manifest import MANIFEST, check_files, read_manifest
from gpt_pretrain.commands.door import exit_code
from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.config.numbers import format_bytes

_WIDTH_OF_A_PIPE = 200


def show_list(path: Path) -> None:
    """Prints a run's checkpoints as a table.

    Raises:
        UserError: There are none at this path.
    """
    directory = find_directory(path)
    # A pipe has no width: whole lines, for grep and awk.
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt_pretrain.checkpoint", description="Which checkpoints a run has, and whether they are whole."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for function, name, what, names in (
        (show_list, "list", "show a run's checkpoints: step, time, size, layout, FP8", "a run's directory"),
        (
            verify,
            "verify",
            "compare every byte with the SHA-256 that was written",
            "a checkpoint, or a run's directory",
        ),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        command.add_argument("path", type=Path, metavar="DIR", help=f"{names} (or its checkpoints/)")
        command.set_defaults(function=function)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.checkpoint`; `sys.argv` when not given.
    """
    chosen = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: chosen.function(chosen.path))
