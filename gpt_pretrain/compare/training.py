"""Trains the runs of a comparison, variants × seeds, one after another, each in processes and a directory of its own.

    plan_runs → runs that are not finished → benchmark.worker (torchrun) → run directories

Run k of every variant has `model.seed` + k, hence the same initial weights, data order and dropout as run k of the
others: they differ only in the variant. A run is finished if its records say so; an unfinished one resumes from its
newest checkpoint. Ctrl-C and SIGTERM reach the run, which saves a checkpoint and ends; the same command continues from
there. If a run fails, the others are still trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console

from gpt_pretrain.benchmark.results import PlatformSeen
from gpt_pretrain.benchmark.variants import (
    Variant,
    common_key_problems,
    launch_here,
    load_variants,
    process_problems,
    read_variants,
    variant_refusals,
)
from gpt_pretrain.benchmark.worker import OUTPUT, run_task
from gpt_pretrain.compare.comparability import identity
from gpt_pretrain.compare.gate import gate_problems
from gpt_pretrain.config.errors import ConfigError, RunError, UserError, hydra_quoted, override_word, show
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict, load_saved_config
from gpt_pretrain.config.schedule import last_step
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.run_dir import run_lock
from gpt_pretrain.report.console import print_line
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.report.records import DONE
from gpt_pretrain.rules.check import config_problems, ranges

# Folders of the runs, and of the task and output of each start.
RUNS, _STARTS = "runs", "starts"
# The sections whose values change losses or times, and their keys that change neither.
_COUNTING, _IDLE = ("model.", "trainer."), ("trainer.max_time", "trainer.hang_timeout")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a comparison."""

    name: str
    variant: str
    seed: int
    run_dir: Path
    overrides: tuple[str, ...]
    """The whole command line of the run."""
    unread: tuple[str, ...]
    """As of `LoadedVariant`."""
    config: Config

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done; raises `UserError` if the run's records are damaged."""
        if not metrics_path(self.run_dir).exists():
            return False
        metrics = load_metrics(self.run_dir)
        if metrics.summary is not None:
            return metrics.summary.end_reason in DONE
        # A run that was killed after its last step would write no summary when started again either.
        return bool(metrics.train) and metrics.train[-1].step >= last_step(self.config)


def compare_problems(config: Config) -> Iterator[str]:
    """The rules about the keys of `compare`; `plan_runs` checks each run."""
    yield from ranges(config, "compare.")
    yield from gate_problems(config.compare)
    try:
        if len(read_variants(config, "compare")) == 1:
            yield "compare.variants has one entry and nothing to compare it with; put the baseline before it: [bf16,…]"
    except ConfigError as error:
        yield from error.problems


def plan_runs(config: Config, source: Source, overrides: Sequence[str], run_dir: Path) -> list[PlannedRun]:
    """The runs in training order: all variants of the first seed, then of the next, to compare as early as possible.

    Raises:
        ConfigError: A variant has unknown keys, wrong values or keys that all must share, or makes losses incomparable;
            or the baseline breaks a rule about runs.
        UserError: A run directory holds a run with other values.
    """

    def refuse(variant: Variant, config: Config) -> Iterator[str]:
        yield from common_key_problems(variant, "compare", ["model.seed"])
        yield from process_problems(config)

    loaded = load_variants(read_variants(config, "compare"), source, overrides, refuse)
    baseline, first = next((variant.name, each.config) for variant, each in loaded.items())
    problems = [f"{problem} [{baseline}]" for problem in config_problems(first, launch_here(first))]
    folders: dict[Variant, str] = {}
    for variant, each in loaded.items():
        problems += [f"{problem} [{variant.name}]" for problem in _obstacles(each.config, first, baseline)]
        names = chain([variant.file_name], (f"{variant.file_name}_{number}" for number in count(2)))
        folders[variant] = next(name for name in names if name not in folders.values())
    if problems:
        raise ConfigError(problems)
    runs = []
    for seed in range(config.model.seed, config.model.seed + config.compare.seeds):
        for variant, each in loaded.items():
            path = run_dir / RUNS / f"{folders[variant]}_seed_{seed}"
            run = PlannedRun(
                name=f"{variant.name}, seed {seed}",
                variant=variant.name,
                seed=seed,
                run_dir=path,
                overrides=(*each.overrides, f"model.seed={seed}", f"run_dir={hydra_quoted(str(path))}"),
                unread=each.unread,
                config=replace(each.config, model=replace(each.config.model, seed=seed), run_dir=str(path)),
            )
            _check_same_values(run)
            runs.append(run)
    return runs


def _values(config: Config) -> dict[str, Any]:
    return dict(flatten(config_to_dict(config)))


def _obstacles(config: Config, first: Config, baseline: str) -> list[str]:
    """What a variant changes although it must share it with the baseline: found here, not after days of training."""
    ours, theirs = _values(config), _values(first)
    return [
        f"{key}={show(ours[key])} changes the {what}, so losses cannot be compared with those of {baseline} at "
        f"{show(theirs[key])}; set it outside of compare.variants"
        for what, keys in identity().items()
        for key in keys
        if ours[key] != theirs[key]
    ]


def _check_same_values(run: PlannedRun) -> None:
    """Refuses a directory whose run has other values than this command line's."""
    path = run.run_dir / "config.yaml"
    saved = _values(load_saved_config(path) if path.exists() else run.config)
    different = [
        f"{key}={show(saved[key])} there, {show(value)} here"
        for key, value in _values(run.config).items()
        if saved[key] != value and key.startswith(_COUNTING) and key not in _IDLE
    ]
    if different:
        raise UserError(
            f"{run.run_dir} holds a run with other values ({'; '.join(different)}); give the values that it was "
            "started with, or another run_dir"
        )


def train_variants(
    config: Config, source: Source, overrides: Sequence[str], run_dir: Path, console: Console
) -> list[PlannedRun]:
    """Trains all runs that are not finished yet.

    Returns those that are finished now, variant by variant with the baseline first, seeds rising.

    Raises:
        ConfigError: See `plan_runs`; or the rules or the machine refuse the baseline, or all other variants.
        UserError: A run was started with other values, its records are damaged, or another comparison trains here.
        RunError: This machine's devices and libraries could not be looked up.
    """
    runs = plan_runs(config, source, overrides, run_dir)
    with run_lock(run_dir) as held:
        if held.note is not None:
            print_line(console, f"note: {held.note}")
        runs = _accepted(runs, source, overrides, run_dir, console)
        try:
            finished = [
                run
                for number, run in enumerate(runs, start=1)
                if _train(run, f"run {number} of {len(runs)} ({run.name})", source, run_dir, console)
            ]
        except (KeyboardInterrupt, SystemExit):
            again = override_word("run_dir", str(run_dir))
            print_line(console, f"stopped; run the same command with {again} to continue")
            raise
    return sorted(finished, key=lambda run: config.compare.variants.index(run.variant))


def _accepted(
    runs: list[PlannedRun], source: Source, overrides: Sequence[str], run_dir: Path, console: Console
) -> list[PlannedRun]:
    """The runs that are finished or that the rules and this machine allow; tells what is left out, and of what.

    Another process looks up the machine, so that this one needs no torch and holds no CUDA context beside the runs.
    """
    # Seeds make no difference to rules and machine.
    unfinished = {run.variant: run for run in runs if not run.is_finished}
    refused = {}
    if unfinished:
        folder = _next_folder(run_dir, "platform")
        (seen,) = run_task("platform", PlatformSeen, folder, source=source, overrides=overrides)
        found = {variant: variant_refusals(run.config, seen.platform) for variant, run in unfinished.items()}
        refused = {variant: problems for variant, problems in found.items() if problems}
    left = [run for run in runs if run.variant not in refused or run.is_finished]
    variants = {run.variant for run in left}
    if runs[0].variant not in variants or len(variants) == 1:
        raise ConfigError([f"{problem} [{variant}]" for variant, problems in refused.items() for problem in problems])
    for variant, problems in refused.items():
        print_line(console, f"{variant} is left out: {ConfigError(problems)}")
    for line in dict.fromkeys(line for run in left for line in run.unread):
        print_line(console, line)
    return left


def _next_folder(run_dir: Path, name: str) -> Path:
    earlier = [int(path.name) for path in (run_dir / _STARTS / name).glob("*") if path.name.isdecimal()]
    return run_dir / _STARTS / name / str(1 + max(earlier, default=0))


def _train(run: PlannedRun, place: str, source: Source, run_dir: Path, console: Console) -> bool:
    """Trains a run unless it is finished; returns whether it is finished then."""
    if run.is_finished:
        print_line(console, f"{place}: was finished before")
        return True
    folder, num_processes = _next_folder(run_dir, run.run_dir.name), run.config.trainer.devices or 1
    print_line(console, f"{place}: trains; what it prints: {folder / OUTPUT}")
    try:
        run_task("train", PlatformSeen, folder, source=source, overrides=run.overrides, num_processes=num_processes)
    except RunError as error:
        print_line(console, f"{place}: failed: {error}")
        return False
    return True
