"""Trains the runs of a comparison one after another, each in its own processes.

    planned.plan_runs → runs that are not finished → benchmark.worker (torchrun) → run directories

Ctrl-C and SIGTERM reach the run, which saves a checkpoint and ends; the same command continues from there. If a run
fails, the others are still trained.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gpt_pretrain.benchmark.results import PlatformSeen, TrainingDone
from gpt_pretrain.benchmark.variants import variant_refusals
from gpt_pretrain.benchmark.worker import OUTPUT, run_task
from gpt_pretrain.compare.planned import PlannedRun, plan_runs
from gpt_pretrain.config.errors import ConfigError, RunError, override_word
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.run_dir import run_lock
from gpt_pretrain.report.console import print_line

# Folders for the task and the output of each start.
_STARTS, _PLATFORM = "starts", "platform"


def train_variants(
    config: Config, source: Source, overrides: Sequence[str], run_dir: Path, console: Console
) -> list[tuple[PlannedRun, bool]]:
    """Trains all runs that are not finished yet.

    Returns the runs and whether each is finished, variant by variant with the baseline first, seeds rising.

    Raises:
        ConfigError: See `plan_runs`; or the rules or the machine refuse the baseline, or all other variants.
        UserError: A run was started with other values, its records are damaged, or another comparison trains here.
    """
    runs = plan_runs(config, source, overrides, run_dir)
    with run_lock(run_dir) as held:
        if held.note is not None:
            print_line(console, f"note: {held.note}")
        runs = _refused_here(runs, source, overrides, run_dir)
        _tell_left_out(runs, console)
        try:
            trained = _train(runs, source, run_dir, console)
        except (KeyboardInterrupt, SystemExit):
            print_line(
                console, f"stopped; run the same command with {override_word('run_dir', str(run_dir))} to continue"
            )
            raise
    order = list(dict.fromkeys(run.variant for run in runs))
    return sorted(trained, key=lambda each: order.index(each[0].variant))


def _refused_here(
    runs: Sequence[PlannedRun], source: Source, overrides: Sequence[str], run_dir: Path
) -> list[PlannedRun]:
    """The runs with the problems that this machine has with those still to be trained.

    Another process looks up the machine, so that this one needs no torch and holds no CUDA context beside the runs.
    """
    if all(run.is_finished for run in runs):
        return list(runs)
    folder = _next_folder(run_dir / _STARTS / _PLATFORM)
    outcome = run_task("platform", PlatformSeen, folder, source=source, overrides=overrides)
    if outcome.problem is not None:
        raise RunError(f"this machine's devices and libraries could not be looked up: {outcome.problem}")
    platform = outcome.results[0].platform
    return [
        run if run.is_finished else replace(run, problems=tuple(variant_refusals(run.config, platform))) for run in runs
    ]


def _tell_left_out(runs: Sequence[PlannedRun], console: Console) -> None:
    """Says which variants are left out, and what others go without; refuses if the baseline or all others are."""
    left = {run.variant.name for run in runs if not run.problems or run.is_finished}
    refused = {run.variant.name: run.problems for run in runs if run.variant.name not in left}
    if runs[0].variant.name in refused or len(left) < 2:
        raise ConfigError([f"{problem} [{name}]" for name, problems in refused.items() for problem in problems])
    for name, problems in refused.items():
        print_line(console, f"{name} is left out: {ConfigError(problems)}")
    for line in dict.fromkeys(line for run in runs for line in run.unread):
        print_line(console, line)


def _next_folder(place: Path) -> Path:
    earlier = [int(path.name) for path in place.glob("*") if path.name.isdecimal()]
    return place / str(1 + max(earlier, default=0))


def _train(
    runs: Sequence[PlannedRun], source: Source, run_dir: Path, console: Console
) -> list[tuple[PlannedRun, bool]]:
    trained = []
    for number, run in enumerate(runs, start=1):
        place = f"run {number} of {len(runs)} ({run.name})"
        problem = "\n".join(run.problems) or None
        if problem is None and run.is_finished:
            print_line(console, f"{place}: was finished before")
        elif problem is None:
            folder = _next_folder(run_dir / _STARTS / run.run_dir.name)
            print_line(console, f"{place}: trains; what it prints: {folder / OUTPUT}")
            problem = run_task(
                "train",
                TrainingDone,
                folder,
                source=source,
                overrides=run.overrides,
                num_processes=run.config.trainer.devices or 1,
            ).problem
        if problem is not None:
            print_line(console, f"{place}: failed: {problem}")
        trained.append((run, problem is None))
    return trained
