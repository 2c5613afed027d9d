"""What rank 0 prints: a header, a line for each record (`columns`), warnings, and a summary.

A terminal also has a progress bar below the newest line. It is redrawn only when a record arrives: a redraw timer would
wake the thread that launches the GPU's kernels.
"""

import math
import signal
from collections.abc import Iterator, Mapping
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment
from rich.text import Text

from gpt_pretrain.config.errors import visible
from gpt_pretrain.report.columns import log_line, log_pairs, place_of
from gpt_pretrain.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    Fp8CoverageRecord,
    Fp8Record,
    LossSpikeRecord,
    RankTimesRecord,
    Record,
    RewindRecord,
    SkippedStepRecord,
    SummaryRecord,
    TrainRecord,
)
from gpt_pretrain.report.summary import summary_lines

# Of the tensors that FP8 treats worst, shown at every interval.
_NUM_TENSORS = 3


class SafeConsole(Console):
    """A console on which no text steers the terminal, whatever is in names, logs and samples; styles still do."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """As rich's, with control characters as escapes."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text, keep="\n\t"), segment.style)


def console_of_width(width: int) -> Console:
    """Standard output: as wide as its terminal but no more than `width` columns; `width` without a terminal."""
    console = SafeConsole(highlight=False, emoji=False)
    console.width = min(console.width, width) if console.file.isatty() else width
    return console


def print_line(out: Console, line: str) -> None:
    """Prints a line neither wrapped nor interpreted: a path may hold brackets."""
    out.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


class _Output(SafeConsole):
    """Standard output; when its reader is gone, the run stops as it does when its terminal closes."""

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader is gone: Ctrl-C, for example, also ends the `tee` behind a run."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            # rich prints nothing from here on. Exiting now would lose what was trained, if anything was.
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                raise
            signal.raise_signal(signal.SIGHUP)


class RunConsole:
    """Everything that a run prints; a context manager, so that it always restores the terminal."""

    def __init__(self, *, max_steps: int, start_step: int = 0, output: Console | None = None) -> None:
        self._out = _Output(highlight=False, emoji=False) if output is None else output
        self._max_steps = max_steps
        bar = TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn()
        self._progress = Progress(*bar, console=self._out, auto_refresh=False)
        self._task = self._progress.add_task("", total=max_steps, completed=start_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_live()

    def start_live(self) -> None:
        """Starts showing the progress, on a terminal only."""
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            self._progress.start()

    def stop_live(self) -> None:
        """Releases the terminal."""
        if self._progress.live.is_started:
            self._progress.stop()

    def print_header(self, title: str, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Prints what the run is: section → name → value, without empty sections."""
        print_line(self._out, title)
        for name, entries in sections.items():
            if entries:
                print_line(self._out, f"[{name}]")
            for key, value in entries.items():
                print_line(self._out, f"  {key}: {value}")

    def show(self, record: Record) -> None:
        """Shows a record."""
        match record:
            case SkippedStepRecord() | LossSpikeRecord():
                self.warning(_bad_step_sentence(record))
            case RewindRecord():
                self._advance(record.step)
                for text in (*record.warnings, _rewind_sentence(record)):
                    self.warning(text)
            case CheckpointRecord(problem=str() as problem):
                self.warning(problem)
            case Fp8Record():
                self._show_worst_tensors(record)
            case Fp8CoverageRecord():
                self._show_line(record)
                for text in record.warnings:
                    self.warning(f"FP8 at step {record.step}: {text}")
            case EvaluationRecord():
                self._show_line(record)
                for text in record.warnings:
                    self.warning(text)
            case RankTimesRecord():
                for message in record.warnings:
                    self.warning(message)
            case _:
                self._show_line(record)

    def _show_line(self, record: Record) -> None:
        print_line(self._out, log_line(record, self._max_steps))
        if isinstance(record, TrainRecord):
            self._advance(record.step)

    def _advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step, refresh=self._progress.live.is_started)

    def _show_worst_tensors(self, record: Fp8Record) -> None:
        """The tensors that saturate most, and among equals flush most; then the warnings."""
        worst = sorted(record.tensors, key=lambda tensor: (-(tensor.saturated or 0.0), -tensor.flushed))[:_NUM_TENSORS]
        place = place_of(record, self._max_steps)
        for rank, tensor in enumerate(worst, start=1):
            print_line(self._out, f"{record.kind} {place} worst {rank}/{len(record.tensors)} {log_pairs(tensor)}")
        for message in record.warnings:
            self.warning(message)

    def note(self, message: str) -> None:
        """Prints information."""
        self._message("note", "cyan", message)

    def warning(self, message: str) -> None:
        """Prints what the user should act on."""
        self._message("warning", "bold yellow", message)

    def print_summary(self, summary: SummaryRecord, places: Mapping[str, str]) -> None:
        """Prints what the run reached, and places: name → path or command."""
        self.stop_live()
        for line in summary_lines(summary, places, max_steps=self._max_steps):
            print_line(self._out, line)

    def _message(self, label: str, style: str, message: str) -> None:
        self._out.print(Text.assemble((f"{label}: ", style), message), soft_wrap=True)


def _bad_step_sentence(record: SkippedStepRecord | LossSpikeRecord) -> str:
    samples = f"samples {record.first_sample} to {record.first_sample + record.num_samples - 1}"
    if isinstance(record, LossSpikeRecord):
        return (
            f"step {record.step}: loss {record.loss:.4f} is a spike, above {record.limit:.4f} "
            f"(median of the last {record.median:.4f}); {samples}"
        )
    finite = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
    return (
        f"step {record.step}: loss {record.loss:.4f}, gradient norm {record.grad_norm:.4f}"
        f"{', but a cast to FP8 met an infinity' if finite else ''}; nothing was updated "
        f"({record.in_a_row} in a row); {samples}"
    )


def _rewind_sentence(record: RewindRecord) -> str:
    if record.problem is not None:
        return f"step {record.spike_step} is trained on: {record.problem}"
    last_sample = record.first_sample + record.num_samples - 1
    return (
        f"back to step {record.step}, before the spike of step {record.spike_step}, in {record.time_s:.1f} s; samples "
        f"{record.first_sample} to {last_sample} are skipped; rewinds so far: {record.rewinds}"
    )
