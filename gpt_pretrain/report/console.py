"""What rank 0 shows: a header, the progress of the run, validations, and a summary with the loss curve.

On a terminal the newest record stays at the bottom above a progress bar; elsewhere (a Slurm log, a pipe) each record is
one plain line for grep and awk. `columns` says what is shown of a record and how. The screen is redrawn only when a
record arrives: a redraw timer would wake the thread that launches the GPU's kernels.
"""

import math
import signal
from collections.abc import Iterator, Mapping
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gpt_pretrain.config.errors import visible
from gpt_pretrain.report.columns import log_line, log_pairs, place_of, screen_columns, screen_line
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.records import (
    CheckpointRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Record,
    Fp8Tensor,
    LossSpikeRecord,
    RankTimesRecord,
    Record,
    RewindRecord,
    SkippedStepRecord,
    SummaryRecord,
    TrainRecord,
)
from gpt_pretrain.report.summary import plain_summary_lines, summary_panels

MAX_WIDTH = 100
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


def console_of_width(width: int, *, at_most: int | None = None) -> Console:
    """Standard output: as wide as its terminal, but no more than `at_most`, or `width` columns without one."""
    console = SafeConsole(highlight=False, emoji=False)
    if not console.file.isatty():
        console.width = width
    elif at_most is not None:
        console.width = min(console.width, at_most)
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

    def __exit__(self, *_: object) -> None:
        self.stop_live()

    def start_live(self) -> None:
        """Starts showing the progress, on a terminal only."""
        if self.is_terminal and self._live is None:
            self._live = Live(self._status(), console=self._out, auto_refresh=False)
            self._live.start(refresh=True)

    def stop_live(self) -> None:
        """Releases the terminal, with the newest record left on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print_header(self, title: str, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Prints what the run is: section → name → value, without empty sections."""
        sections = {name: entries for name, entries in sections.items() if entries}
        if not self.is_terminal:
            print_line(self._out, title)
            for name, entries in sections.items():
                print_line(self._out, f"[{name}]")
                for key, value in entries.items():
                    print_line(self._out, f"  {key}: {value}")
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
        """Shows a record."""
        match record:
            case SkippedStepRecord() | LossSpikeRecord():
                self.warning(_bad_step_sentence(record))
            case RewindRecord():
                self._step = record.step
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
            case RankTimesRecord():
                for message in record.warnings:
                    self.warning(message)
            case TrainRecord() if self.is_terminal:
                self._step, self._record = record.step, record
                self.start_live()
            case ExpertsRecord() if self.is_terminal:
                self._experts = record
            case _:
                self._show_line(record)
        self._refresh()

    def _show_line(self, record: Record) -> None:
        if self.is_terminal:
            self._step = max(self._step, record.step)
            self._out.print(screen_line(record, self._max_steps))
        else:
            print_line(self._out, log_line(record, self._max_steps))

    def _show_worst_tensors(self, record: Fp8Record) -> None:
        """The tensors that saturate most, and among equals flush most; then the warnings."""
        worst = sorted(record.tensors, key=lambda tensor: (-(tensor.saturated or 0.0), -tensor.flushed))[:_NUM_TENSORS]
        place = place_of(record, self._max_steps)
        if not self.is_terminal:
            for rank, tensor in enumerate(worst, start=1):
                print_line(self._out, f"{record.kind} {place} worst {rank}/{len(record.tensors)} {log_pairs(tensor)}")
        elif worst:
            title = Text.assemble((place, "dim"), f"  FP8, worst {len(worst)} of {len(record.tensors)} tensors")
            self._out.print(_tensor_table(worst, title, self._width))
        for message in record.warnings:
            self.warning(message)

    def note(self, message: str) -> None:
        """Prints information."""
        self._message("note", "cyan", message)

    def warning(self, message: str) -> None:
        """Prints what the user should act on."""
        self._message("warning", "bold yellow", message)

    def print_summary(self, summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str]) -> None:
        """Prints what the run reached, and places: name → path or command."""
        self.stop_live()
        if self.is_terminal:
            for panel in summary_panels(summary, metrics, places, max_steps=self._max_steps, width=self._width):
                self._out.print(panel)
            return
        for line in plain_summary_lines(summary, metrics, places, max_steps=self._max_steps, width=self._width):
            print_line(self._out, line)

    @property
    def _width(self) -> int:
        return min(self._out.width, MAX_WIDTH)

    def _status(self) -> Group:
        """A progress bar under the newest record, as far as the terminal has room for it."""
        width = self._width
        # Two columns for the "^C" that a terminal echoes after the bar: on a new line it would shift the redraw.
        bar = ProgressBar(total=self._max_steps, completed=self._step, width=min(width, self._out.width - 2))
        place = f"step {self._step}/{self._max_steps}"
        if self._record is None:
            return Group(Text(f"{place}: waiting for the first record", style="dim"), bar)
        return Group(_newest_table(place, [self._record, *filter(None, [self._experts])], width), bar)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._status(), refresh=True)

    def _message(self, label: str, style: str, message: str) -> None:
        if self.is_terminal:
            self._out.print(Text.assemble((f"{label}: ", style), message))
        else:
            print_line(self._out, f"{label}: {message}")


def _newest_table(place: str, records: list[Record], width: int) -> Table:
    """The step, and as many of the records' columns as fit side by side, two spaces apart."""
    title, _, step = place.partition(" ")
    cells = [(-1, title, step, "")]
    for record in records:
        columns = screen_columns(type(record))
        cells += [(column.priority, column.title, column.shown(record), column.style) for column in columns]
    while len(cells) > 1 and sum(max(len(title), len(text)) + 2 for _, title, text, _ in cells) - 2 > width:
        cells.remove(max(cells, key=lambda cell: cell[0]))
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", width=width)
    for index, (_, title, _, style) in enumerate(cells):
        table.add_column(title, justify="right" if index else "left", no_wrap=True, style=style)
    table.add_row(*(text for _, _, text, _ in cells))
    return table


def _tensor_table(tensors: list[Fp8Tensor], title: Text, width: int) -> Table:
    """FP8 tensors, one per line; a column's style highlights positive values."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", width=width)
    table.title, table.title_justify, table.title_style = title, "left", ""
    columns = screen_columns(Fp8Tensor)
    for index, column in enumerate(columns):
        table.add_column(column.title, overflow="fold", ratio=None if index else 1, no_wrap=index > 0)
        table.columns[index].justify = "left" if isinstance(getattr(tensors[0], column.field), str) else "right"
    for tensor in tensors:
        styles = [column.style if getattr(tensor, column.field) else "" for column in columns]
        table.add_row(*(Text(column.shown(tensor), style) for column, style in zip(columns, styles, strict=True)))
    return table


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
