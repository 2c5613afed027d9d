"""gpt_pretrain.checkpoint: which checkpoints a run has, and whether they are whole.

Exit codes: 0 done; 2 a wrong path, or a checkpoint that is not what was
written; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.checkpoint list outputs/mine
    python -m gpt_pretrain.checkpoint verify outputs/mine/checkpoints/step_00000300
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gpt_pretrain.checkpoint.directory import complete_checkpoints, latest_checkpoint, step_of, unfinished_saves
from gpt_pretrain.checkpoint.manifest import MANIFEST, check_files, read_manifest
from gpt_pretrain.commands.command import run_with_arguments
from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.errors import ConfigError, UserError, format_bytes, reason, visible
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.report.console import console_of_width


class Task(Enum):
    """What is done with checkpoints."""

    list = "list"
    verify = "verify"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    """What the command takes, in this order also without the keys."""

    command: Task
    """list: show step, time, size and FP8 of each checkpoint; verify: compare every byte with its SHA-256."""
    path: str
    """A run's directory or its checkpoints/; for verify also one checkpoint."""


def find_directory(path: Path) -> Path:
    """The directory of checkpoints, given a run's directory or its `checkpoints`; a UserError for anything else."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name a run's directory, or its checkpoints/")
    if (path / MANIFEST).is_file():
        raise UserError(f"{path} is a single checkpoint; name its run's directory, or check it with verify {path}")
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not complete_checkpoints(directory):
        raise UserError(f"{directory} holds no complete checkpoint (step_…/{MANIFEST})")
    return directory


def show_list(path: Path) -> None:
    """Prints a run's checkpoints as a table, in the order in which they were saved."""
    directory = find_directory(path)
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for name in ("step", "saved", "size", "fp8", "validation"):
        table.add_column(name, justify="right" if name in ("step", "size", "validation") else "left", no_wrap=True)
    table.add_column("", overflow="fold")
    newest = latest_checkpoint(directory)
    for checkpoint in complete_checkpoints(directory):
        mark = Text("latest", style="bold green") if checkpoint == newest else Text()
        try:
            manifest = read_manifest(checkpoint)
            fp8 = _fp8(manifest.config["model"])
        except (UserError, LookupError, TypeError) as error:
            why = str(error) if isinstance(error, UserError) else f"{MANIFEST} describes no run ({reason(error)})"
            table.add_row(str(step_of(checkpoint)), "", "", "", "", Text(why, style="bold red"))
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_unix))
        loss = "" if manifest.validation_loss is None else f"{manifest.validation_loss:.4f}"
        table.add_row(str(manifest.step), saved, format_bytes(manifest.num_bytes), fp8, loss, mark)
    # A pipe has no width: whole lines, for grep and awk.
    console = console_of_width(200)
    console.print(table)
    for left in unfinished_saves(directory):
        console.print(f"{left.name}: a save that did not end; the next one removes it", markup=False)


def _fp8(model: Mapping[str, Any]) -> str:
    if not model["fp8"]:
        return "off"
    emulated = ", emulated" if model["fp8_emulate"] else ""
    # Checkpoints older than the key come from Transformer Engine.
    backend = Fp8Backend[model.get("fp8_backend") or Fp8Backend.transformer_engine.name]
    recipe = model["fp8_recipe"] or recipes_of(backend)[0].name
    engine = "" if backend is Fp8Backend.transformer_engine else f"{backend.name} "
    return engine + recipe + (", weights in FP8" if model["fp8_params"] else "") + emulated


def verify(path: Path) -> None:
    """Reads every byte of a checkpoint, or of all of a run, and prints each that is whole; raises the problems."""
    is_one = (path / MANIFEST).is_file() or path.name.startswith("step_")
    problems = []
    for checkpoint in [path] if is_one else complete_checkpoints(find_directory(path)):
        try:
            manifest = read_manifest(checkpoint)
        except UserError as error:
            problems.append(str(error))
            continue
        found = check_files(checkpoint, manifest)
        problems += found
        if not found:
            size = format_bytes(manifest.num_bytes)
            sys.stdout.write(f"{visible(str(checkpoint))}: {len(manifest.files)} files, {size}: as they were written\n")
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
