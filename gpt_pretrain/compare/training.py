"""Trains the runs of a comparison, each in its own processes: here one after another, or as Slurm jobs.

    planned.plan_runs → runs that are not finished → benchmark.worker (torchrun) or sbatch → run directories

Ctrl-C and SIGTERM reach the run, which saves a checkpoint and ends; the same command continues from there. If a run
fails, the others are still trained.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.status import Status
from rich.text import Text

from gpt_pretrain.benchmark.results import PlatformSeen, TrainingDone
from gpt_pretrain.benchmark.variants import variant_refusals
from gpt_pretrain.benchmark.worker import run_task
from gpt_pretrain.compare.planned import PlannedRun, plan_runs
from gpt_pretrain.config.errors import ConfigError, RunError, override_word
from gpt_pretrain.config.files import parse_json, read_foreign_text, write_file
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.run_dir import run_lock
from gpt_pretrain.launch.slurm import Submission, has_job, is_submission, read_submission, submit
from gpt_pretrain.report.columns import format_duration, format_loss, format_rate
from gpt_pretrain.report.console import print_line
from gpt_pretrain.report.metrics_file import metrics_path
from gpt_pretrain.report.records import TrainRecord
from gpt_pretrain.rules.jobs import check_command

# Folders for the task and the output of each start, and the file with the number of a run's Slurm job.
_STARTS, _JOB, _PLATFORM = "starts", "job", "platform"
# FP8 statistics between two training records: 5,000 tensors of 250 bytes each.
_TAIL_BYTES = 5_000 * 250
_LINE_EVERY_S = 60.0

State = Literal["finished", "failed", "waiting"]
"""What became of a run; waiting: its Slurm job runs or is queued."""


class ProgressLine:
    """Shows which run trains and when it and all runs will be done: one redrawn line, in a log one line per minute."""

    def __init__(self, runs: Sequence[PlannedRun], console: Console) -> None:
        self._runs = runs
        self._steps = [0 if run.problems or run.is_finished else run.config.trainer.max_steps for run in runs]
        self._console = console
        self._status: Status | None = None
        self._told_at, self._told_step = 0.0, -1

    def watch(self, number: int) -> None:
        """Shows the newest record of a run; the first run has number 1."""
        if not self._console.is_terminal and time.monotonic() - self._told_at < _LINE_EVERY_S:
            return
        run = self._runs[number - 1]
        record = _newest_record(run)
        if record is None or record.step == self._told_step:
            return
        self._told_at, self._told_step = time.monotonic(), record.step
        text = (
            f"step {record.step}/{run.config.trainer.max_steps}, loss {format_loss(record.loss)}, "
            f"{format_rate(1 / record.step_time_s)} steps/s, {format_duration(record.eta_s)} left"
        )
        steps_to_come = sum(self._steps[number:])
        if steps_to_come and record.eta_s is not None:
            # As if all were as fast as this one and had not begun.
            text += f", about {format_duration(record.eta_s + steps_to_come * record.step_time_s)} for all"
        if not self._console.is_terminal:
            self.tell(number, text)
            return
        line = Text(self._line(number, text))
        if self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        self._status.update(line)

    def tell(self, number: int, text: str) -> None:
        """Prints a line about a run."""
        self.close()
        print_line(self._console, self._line(number, text))

    def close(self) -> None:
        """Gives the terminal back."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _line(self, number: int, text: str) -> str:
        return f"run {number} of {len(self._runs)} ({self._runs[number - 1].name}): {text}"


def _newest_record(run: PlannedRun) -> TrainRecord | None:
    """The newest training record of the run's current process, read from the end of the file.

    Parsing the whole file every two seconds would disturb the run that is timed. Damaged lines are reported when the
    run is compared.
    """
    path = metrics_path(run.run_dir)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        # The last line may be incomplete.
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if line.startswith(b'{"kind": "start"'):
            return None
        if line.startswith(b'{"kind": "train"'):
            with suppress(ValueError):
                return TrainRecord.from_json(parse_json(line))
    return None


def train_variants(
    config: Config, source: Source, overrides: Sequence[str], run_dir: Path, console: Console
) -> list[tuple[PlannedRun, State]]:
    """Trains all runs that are not finished yet, or submits them to Slurm.

    Returns the runs and what became of each, variant by variant with the baseline first, seeds rising.

    Raises:
        ConfigError: See `plan_runs`; or the rules or the machine refuse the baseline, or all other variants.
        UserError: A run was started with other values, its records are damaged, or another comparison trains here.
    """
    launcher = Loader(source).compose(list(overrides)).hydra.launcher
    submission = read_submission(launcher) if is_submission(launcher) else None
    runs = plan_runs(config, source, overrides, run_dir, submission)
    with run_lock(run_dir) as held:
        if held.note is not None:
            print_line(console, f"note: {held.note}")
        if submission is None:
            runs = _refused_here(runs, source, overrides, run_dir)
        _tell_left_out(runs, console)
        progress = ProgressLine(runs, console)
        try:
            trained = _train(runs, source, run_dir, progress, submission)
        except (KeyboardInterrupt, SystemExit):
            progress.close()
            print_line(
                console, f"stopped; run the same command with {override_word('run_dir', str(run_dir))} to continue"
            )
            raise
        finally:
            progress.close()
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
    seeds = [run for run in runs if run.role == "seed"]
    left = {run.variant.name for run in seeds if not run.problems or run.is_finished}
    refused = {run.variant.name: run.problems for run in seeds if run.variant.name not in left}
    if seeds[0].variant.name in refused or len(left) < 2:
        raise ConfigError([f"{problem} [{name}]" for name, problems in refused.items() for problem in problems])
    for name, problems in refused.items():
        print_line(console, f"{name} is left out: {ConfigError(problems)}")
    for line in dict.fromkeys(line for run in seeds for line in run.unread):
        print_line(console, line)


def _next_folder(place: Path) -> Path:
    earlier = [int(path.name) for path in place.glob("*") if path.name.isdecimal()]
    return place / str(1 + max(earlier, default=0))


def _train(
    runs: Sequence[PlannedRun], source: Source, run_dir: Path, progress: ProgressLine, submission: Submission | None
) -> list[tuple[PlannedRun, State]]:
    trained = []
    for number, run in enumerate(runs, start=1):
        state: State = "finished"
        text, starts = "finished", run_dir / _STARTS / run.run_dir.name
        if run.problems:
            state, text = "failed", "failed: " + "\n".join(run.problems)
        elif run.is_finished:
            text = "was finished before"
        elif submission is not None:
            state, text = "waiting", f"waiting: {_hand_over(run, source, starts)}"
        else:
            problem = run_task(
                "train",
                TrainingDone,
                _next_folder(starts),
                source=source,
                overrides=run.overrides,
                num_processes=run.config.trainer.devices or 1,
                watch=partial(progress.watch, number),
            ).problem
            if problem is not None:
                state, text = "failed", f"failed: {problem}"
        progress.tell(number, text)
        trained.append((run, state))
    return trained


def _hand_over(run: PlannedRun, source: Source, starts: Path) -> str:
    """Submits a run to Slurm unless it has a job already; says which job it is."""
    job = starts / _JOB
    with suppress(FileNotFoundError):
        if has_job(number := read_foreign_text(job).strip()):
            return f"job {number} has it"
    (planned,) = check_command(Loader(source), run.overrides, multirun=True)
    assert planned.submission is not None, "the command line hands its runs to Slurm"
    number = submit(planned.submission, run.run_dir, planned.arguments)
    starts.mkdir(parents=True, exist_ok=True)
    write_file(job, f"{number}\n")
    return f"submitted as job {number}; its log: {run.run_dir}/slurm-{number}.out"
