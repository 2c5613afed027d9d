"""What is told while a comparison trains: read from the run directories, whichever processes write them."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from gpt_pretrain.compare.planned import PlannedRun
from gpt_pretrain.report.columns import format_duration, format_loss, format_rate
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.report.records import TrainRecord

# Between two lines of a log.
_LINE_EVERY_S = 60.0


class Progress:
    """Which run of how many trains, how far it is, and when it and all others will be done.

    On a terminal a line that is redrawn; anywhere else a line a minute.
    """

    def __init__(self, runs: Sequence[PlannedRun], console: Console) -> None:
        self._runs = runs
        self._console = console
        self._status: Status | None = None
        self._told_at, self._told_step = 0.0, -1

    def watch(self, number: int) -> None:
        """Shows the newest record of a run, counted from 1."""
        if not self._console.is_terminal and time.monotonic() - self._told_at < _LINE_EVERY_S:
            return
        run = self._runs[number - 1]
        record = _newest_record(run)
        if record is None or record.step == self._told_step:
            return
        self._told_at, self._told_step = time.monotonic(), record.step
        text = (
            f"step {record.step}/{run.max_steps}, loss {format_loss(record.loss)}, "
            f"{format_rate(1 / record.step_time_s)} steps/s, {format_duration(record.eta_s)} left"
        )
        steps_to_come = sum(later.max_steps for later in self._runs[number:] if not later.problems)
        if steps_to_come and record.eta_s is not None:
            # As if all were as fast as this one, and none had begun.
            text += f", about {format_duration(record.eta_s + steps_to_come * record.step_time_s)} for all"
        if not self._console.is_terminal:
            self.tell(number, text)
            return
        line = escape(self._line(number, text))
        if self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        self._status.update(line)

    def tell(self, number: int, text: str) -> None:
        """Prints what became of a run."""
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
    """None before the first one."""
    if not metrics_path(run.run_dir).exists():
        return None
    train = load_metrics(run.run_dir).train
    return train[-1] if train else None


def print_line(console: Console, line: str) -> None:
    """Prints a line as it is, however wide."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)
