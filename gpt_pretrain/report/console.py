"""What rank 0 shows: a header, the progress of the run, validations, and a summary with the loss curve.

On a terminal the newest record stays at the bottom above a progress bar; anywhere else (a Slurm log, a pipe) each
record is one plain line that grep and awk can read. Only records are shown, so a finished run can be shown again.
The screen is redrawn when a record arrives and not in between: a redraw timer would wake up the thread that launches
the GPU's kernels.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.config.numbers import format_bytes
from gpt_pretrain.report.chart import VALIDATION_MARKER, draw_loss_chart
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
from gpt_pretrain.report.numbers import UNKNOWN, format_count, format_duration, format_loss
from gpt_pretrain.report.records import (
    CheckpointRecord,
    EndReason,
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

_END_REASONS: dict[EndReason, str] = {
    "max_steps": "all steps done",
    "max_time": "stopped: trainer.max_time is used up",
    "interrupted": "stopped by Ctrl-C",
    "terminated": "stopped by SIGTERM",
    "warned": "stopped by SIGUSR1",
    "not_finite": "stopped: loss or gradient is not finite",
    "loss_spike": "stopped: the loss spikes again and again",
}


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
        done = f"step {summary.step}/{self._max_steps}"
        reason = _END_REASONS[summary.end_reason]
        facts = self._summary_facts(summary)
        chart = draw_loss_chart(metrics.train, metrics.validation, width=self._width - 4)
        if not self.is_terminal:
            self._print_plain(f"end {done}: {reason}")
            for key, value in (facts | dict(places)).items():
                self._print_plain(f"  {key}: {value}")
            if chart is not None:
                self._print_plain(f"loss over steps (line: train, {VALIDATION_MARKER}: validation)\n{chart}")
            if summary.sample_text is not None:
                sample = _printable((summary.sample_prompt or "") + summary.sample_text)
                self._print_plain(f"sample\n{sample}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in (facts | dict(places)).items():
            table.add_row(Text(key), Text(value))
        parts = [table] if chart is None else [_colored(chart), Text(), table]
        title = Text.assemble(("loss  ", "bold"), ("─ train", "cyan"), (f"  {VALIDATION_MARKER} validation", "green"))
        subtitle = Text(f"{done}, {reason}", style="bold green" if summary.end_reason == "max_steps" else "bold yellow")
        panel = Panel(
            Group(*parts),
            title=Text("summary", style="bold") if chart is None else title,
            title_align="left",
            subtitle=subtitle,
            subtitle_align="right",
            width=self._width,
        )
        self._out.print(panel)
        if summary.sample_text is not None:
            sample_text = Text.assemble(
                (_printable(summary.sample_prompt or ""), "bold"), _printable(summary.sample_text), overflow="fold"
            )
            self._out.print(
                Panel(sample_text, title=Text("sample", style="bold"), title_align="left", width=self._width)
            )

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

    def _summary_facts(self, summary: SummaryRecord) -> dict[str, str]:
        facts = {
            "train loss": f"{format_loss(summary.first_loss)} → {format_loss(summary.last_loss)}"
            f"  (best {format_loss(summary.best_loss)})"
        }
        if summary.last_validation_loss is not None:
            facts["validation loss"] = (
                f"{format_loss(summary.first_validation_loss)} → {format_loss(summary.last_validation_loss)}"
                f"  (best {format_loss(summary.best_validation_loss)})"
            )
        per_gpu = summary.tokens_per_s_per_gpu
        rate = format_count(summary.tokens_per_s)
        if rate != UNKNOWN and per_gpu != summary.tokens_per_s:
            rate += f"  ({format_count(per_gpu)} per GPU)"
        facts["tokens/s"] = rate
        facts["tokens"] = format_count(summary.consumed_tokens)
        facts["time"] = format_duration(summary.wall_time_s)
        if summary.skipped_steps:
            facts["skipped steps"] = f"{summary.skipped_steps}, loss or gradient not finite"
        return facts


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


def _printable(text: str) -> str:
    """Text with control characters replaced: a model that writes an escape sequence must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _colored(chart: str) -> Text:
    text = Text(chart, style="dim", no_wrap=True, overflow="crop")
    text.highlight_regex(r"[\u2801-\u28ff]+", "not dim cyan")
    text.highlight_regex(VALIDATION_MARKER, "not dim bold green")
    return text
