"""What rank 0 shows: a header, the progress of the run, validations, and a summary with the loss curve.

On a terminal the newest record stays at the bottom above a progress bar; anywhere else (a Slurm log, a pipe) each
record is one plain line that grep and awk can read. Only records are shown, so a finished run can be shown again.
The screen is redrawn when a record arrives and not in between: a redraw timer would wake up the thread that launches
the GPU's kernels.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.config.numbers import format_bytes
from gpt_pretrain.report.fp8_lines import coverage_sentence, fp8_table, plain_coverage_line, plain_fp8_lines
from gpt_pretrain.report.live import (
    MAX_WIDTH,
    LiveStatus,
    plain_checkpoint_line,
    plain_experts_line,
    plain_train_line,
    plain_validation_line,
)
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.numbers import format_loss
from gpt_pretrain.report.records import (
    CheckpointRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Record,
    LossSpikeRecord,
    Record,
    RewindRecord,
    SkippedStepRecord,
    SummaryRecord,
    TrainRecord,
    ValidationRecord,
)
from gpt_pretrain.report.summary_lines import plain_summary_lines, summary_panels


class RunConsole:
    """Everything that a run prints; a context manager, so that the terminal is left in order however the run ends.

    Args:
        max_steps: Steps of the whole run.
        start_step: Steps done before this start.
        output: Where to print; standard output when not given.
    """

    def __init__(self, *, max_steps: int, start_step: int = 0, output: Console | None = None) -> None:
        self._out = Console(highlight=False, emoji=False) if output is None else output
        self._max_steps = max_steps
        self._step = start_step
        self._record: TrainRecord | None = None
        self._experts: ExpertsRecord | None = None
        self._live: Live | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the output can be redrawn."""
        return self._out.is_terminal and not self._out.is_dumb_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop_live()

    def start_live(self) -> None:
        """Shows the progress from here on; on a terminal only."""
        if self.is_terminal and self._live is None:
            self._live = Live(self._status(), console=self._out, auto_refresh=False)
            self._live.start(refresh=True)

    def stop_live(self) -> None:
        """Leaves the newest record on the screen and gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print_header(self, title: str, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Prints what the run is.

        Args:
            title: Name of the run.
            sections: Section → name → value, in the order to print; empty sections are left out.
        """
        sections = {name: entries for name, entries in sections.items() if entries}
        if not self.is_terminal:
            self._print_plain(title)
            for name, entries in sections.items():
                self._print_plain(f"[{name}]")
                for key, value in entries.items():
                    self._print_plain(f"  {key}: {value}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, entries in sections.items():
            shown = Text(name)
            for key, value in entries.items():
                table.add_row(shown, Text(key), Text(value))
                shown = Text()
        self._out.print(Panel(table, title=Text(title, style="bold"), title_align="left", width=self._width))

    def show(self, record: Record) -> None:
        """Shows what a run logs while it trains, each kind in its way."""
        match record:
            case TrainRecord():
                self.train(record)
            case ValidationRecord():
                self.validation(record)
            case SkippedStepRecord() | LossSpikeRecord():
                self.warning(_bad_step_sentence(record))
            case RewindRecord():
                self.rewind(record)
            case CheckpointRecord():
                self.checkpoint(record)
            case Fp8CoverageRecord():
                self.fp8_coverage(record)
            case Fp8Record():
                self.fp8(record)
            case ExpertsRecord():
                self.experts(record)

    def train(self, record: TrainRecord) -> None:
        """Shows a training record."""
        self._step, self._record = record.step, record
        if not self.is_terminal:
            self._print_plain(plain_train_line(record, self._max_steps))
            return
        self.start_live()
        self._refresh()

    def experts(self, record: ExpertsRecord) -> None:
        """Shows how a mixture of experts fares."""
        self._experts = record
        if self.is_terminal:
            self._refresh()
        else:
            self._print_plain(plain_experts_line(record, self._max_steps))

    def rewind(self, record: RewindRecord) -> None:
        """Prints where the run went back to, or why it did not."""
        self._step = record.step
        for text in (*record.warnings, _rewind_sentence(record)):
            self.warning(text)
        self._refresh()

    def validation(self, record: ValidationRecord) -> None:
        """Prints a validation."""
        self._step = max(self._step, record.step)
        if not self.is_terminal:
            self._print_plain(plain_validation_line(record, self._max_steps))
            return
        self._out.print(
            Text.assemble(
                (f"step {record.step}/{self._max_steps}", "dim"),
                "  validation loss ",
                (format_loss(record.loss), "bold green"),
                f"  perplexity {record.perplexity:.2f}",
                (f"  {record.num_samples} samples in {record.time_s:.1f} s", "dim"),
            )
        )
        self._refresh()

    def checkpoint(self, record: CheckpointRecord) -> None:
        """Prints that a checkpoint is complete, or why it is not."""
        if record.problem is not None:
            self.warning(record.problem)
        elif not self.is_terminal:
            self._print_plain(plain_checkpoint_line(record, self._max_steps))
        else:
            self._out.print(
                Text.assemble(
                    (f"step {record.saved_step}/{self._max_steps}", "dim"),
                    "  checkpoint ",
                    (format_bytes(record.num_bytes), "bold green"),
                    (f"  saved in {record.time_s:.1f} s, training stood still for {record.stall_s:.2f} s", "dim"),
                )
            )
            self._refresh()

    def fp8_coverage(self, record: Fp8CoverageRecord) -> None:
        """Prints how much of the model runs in FP8."""
        if self.is_terminal:
            self._out.print(coverage_sentence(record))
        else:
            self._print_plain(plain_coverage_line(record))

    def fp8(self, record: Fp8Record) -> None:
        """Prints the tensors that FP8 treats worst, and the warnings of the record."""
        if not self.is_terminal:
            for line in plain_fp8_lines(record, self._max_steps):
                self._print_plain(line)
        elif record.tensors:
            self._out.print(fp8_table(record, self._max_steps, self._width))
        for message in record.warnings:
            self.warning(message)

    def note(self, message: str) -> None:
        """Prints a line that is good to know."""
        self._message("note", "cyan", message)

    def warning(self, message: str) -> None:
        """Prints a line that the user should act on."""
        self._message("warning", "bold yellow", message)

    def print_summary(self, summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str]) -> None:
        """Prints what the run reached.

        Args:
            summary: The run's last record.
            metrics: Its history, for the loss curve.
            places: Name → path or command: where things are.
        """
        self.stop_live()
        if self.is_terminal:
            for panel in summary_panels(summary, metrics, places, max_steps=self._max_steps, width=self._width):
                self._out.print(panel)
            return
        for line in plain_summary_lines(summary, metrics, places, max_steps=self._max_steps, width=self._width):
            self._print_plain(line)

    @property
    def _width(self) -> int:
        return min(self._out.width, MAX_WIDTH)

    def _status(self) -> LiveStatus:
        return LiveStatus(self._max_steps, self._step, self._record, self._experts)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._status(), refresh=True)

    def _message(self, label: str, style: str, message: str) -> None:
        if self.is_terminal:
            self._out.print(Text.assemble((f"{label}: ", style), message))
        else:
            self._print_plain(f"{label}: {message}")

    def _print_plain(self, line: str) -> None:
        # Neither wrapped nor interpreted: a record stays one line, and brackets in a path stay brackets.
        self._out.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _bad_step_sentence(record: SkippedStepRecord | LossSpikeRecord) -> str:
    samples = f"samples {record.first_sample} to {record.first_sample + record.num_samples - 1}"
    if isinstance(record, LossSpikeRecord):
        return (
            f"step {record.step}: loss {record.loss:.4f} is a spike, above {record.limit:.4f} "
            f"(median of the last {record.median:.4f}); {samples}"
        )
    return (
        f"step {record.step}: loss {record.loss:.4f}, gradient norm {record.grad_norm:.4f}; nothing was updated "
        f"({record.in_a_row} in a row); {samples}"
    )


def _rewind_sentence(record: RewindRecord) -> str:
    if record.problem is not None:
        return f"step {record.spike_step} is trained on: {record.problem}"
    last_sample = record.first_sample + record.num_samples - 1
    return (
        f"back to step {record.step}, behind the spike of step {record.spike_step}, in {record.time_s:.1f} s; samples "
        f"{record.first_sample} to {last_sample} are passed over; rewinds so far: {record.rewinds}"
    )
