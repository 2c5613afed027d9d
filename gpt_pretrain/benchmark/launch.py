"""Starts the processes of a benchmark, waits for them, and reads what they left."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.benchmark.results import Failure
from gpt_pretrain.benchmark.worker import Task, failure_path, result_path
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.ranks import start_command, without_launcher
from gpt_pretrain.report.json_object import JsonObject

TASK, OUTPUT = "task.json", "output.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome[Result]:
    """What came of a task."""

    results: tuple[Result, ...]
    """One for each rank, rank 0's first; empty if it failed."""
    problem: str | None
    """Why it failed, from the rank that failed first; None otherwise."""


def run_task[Result: JsonObject](
    kind: str,
    result: type[Result],
    folder: Path,
    *,
    source: Source,
    overrides: Sequence[str],
    num_processes: int = 1,
    profiled: bool = False,
) -> Outcome[Result]:
    """Runs one task in processes of its own and waits for them.

    Args:
        kind: See `worker.Task`.
        result: What each rank hands back.
        folder: Made for the task, for what it writes and prints.
        source: Which YAML the configuration is composed from.
        overrides: The command line of the run.
        num_processes: Ranks; several are started with torchrun.
        profiled: Whether to profile a few steps.
    """
    folder.mkdir(parents=True)
    path = folder / TASK
    Task(
        kind=kind,
        overrides=list(overrides),
        config_name=source.config_name,
        config_path=str(source.config_path),
        config_dir=None if source.config_dir is None else str(source.config_dir),
        profiled=profiled,
        launched_unix=time.time(),
    ).write(path)
    code = _run_processes(path, folder / OUTPUT, num_processes)
    failures = _read_all(Failure, [failure_path(path, rank) for rank in range(num_processes)])
    results = _read_all(result, [result_path(path, rank) for rank in range(num_processes)])
    if failures:
        return Outcome(results=(), problem=min(failures, key=lambda failure: failure.time_unix).problem)
    if code or len(results) < num_processes:
        return Outcome(results=(), problem=f"ended with exit code {code}; what it printed: {folder / OUTPUT}")
    return Outcome(results=tuple(results), problem=None)


def _read_all[Result: JsonObject](kind: type[Result], paths: Sequence[Path]) -> list[Result]:
    """Those of the files that are there."""
    return [kind.from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def _run_processes(task: Path, output: Path, num_processes: int) -> int:
    command = [*start_command(num_processes), "-m", "gpt_pretrain.benchmark.worker", str(task)]
    env = without_launcher(os.environ)
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            # Only torchrun itself can end its ranks, which are sessions of their own.
            process.terminate()
            process.wait()
            raise
