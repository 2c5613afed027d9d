"""The two forms of a training record on the screen: the status area of a terminal and the line of a log file."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpt_pretrain.report.numbers import (
    UNKNOWN,
    format_count,
    format_duration,
    format_gib,
    format_loss,
    format_percent,
    format_rate,
)
from gpt_pretrain.report.records import CheckpointRecord, ExpertsRecord, TrainRecord, ValidationRecord

MAX_WIDTH = 100


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    show: Callable[[TrainRecord], str]
    priority: int
    """The columns with the highest numbers are the first to go where the terminal is too narrow for all."""
    style: str = ""


_COLUMNS = (
    _Column("loss", lambda record: format_loss(record.loss), 0, "bold cyan"),
    _Column("lr", lambda record: f"{record.lr:.2e}", 4),
    _Column("grad norm", lambda record: UNKNOWN if record.grad_norm is None else f"{record.grad_norm:.3f}", 3),
    _Column("tok/s", lambda record: format_count(record.tokens_per_s), 1),
    _Column("TFLOP/s", lambda record: format_rate(record.tflops_per_gpu), 5),
    _Column("MFU", lambda record: format_percent(record.mfu), 7),
    _Column("memory", lambda record: format_gib(record.memory_gib), 6),
    _Column("ETA", lambda record: format_duration(record.eta_s), 2),
)


@dataclass(frozen=True, slots=True)
class _Cell:
    header: str
    value: str
    priority: int
    style: str

    @property
    def width(self) -> int:
        return max(len(self.header), len(self.value))


class LiveStatus:
    """A progress bar under the newest record; leaves out what a narrow terminal has no room for.

    Args:
        max_steps: Steps of the whole run.
        step: Steps done.
        record: The newest record; None before the first.
        experts: The newest record of a mixture of experts; None without one.
    """

    def __init__(
        self, max_steps: int, step: int, record: TrainRecord | None, experts: ExpertsRecord | None = None
    ) -> None:
        self.max_steps = max_steps
        self.step = step
        self.record = record
        self.experts = experts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        # Room for the "^C" that a terminal echoes behind the bar: on a line of its own it would shift the redraw.
        bar = ProgressBar(total=self.max_steps, completed=self.step, width=min(width, options.max_width - 2))
        if self.record is None:
            first = Text(f"step {self.step}/{self.max_steps}: waiting for the first record", style="dim")
            yield Group(first, bar)
            return
        cells = self._cells(self.record, width)
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", width=width)
        for index, cell in enumerate(cells):
            table.add_column(cell.header, justify="right" if index else "left", no_wrap=True, style=cell.style)
        table.add_row(*(cell.value for cell in cells))
        yield Group(table, bar)

    def _cells(self, record: TrainRecord, width: int) -> list[_Cell]:
        """The step and as many measurements as fit beside each other with two spaces between them."""
        cells = [_Cell("step", f"{self.step}/{self.max_steps}", -1, "")]
        cells += [_Cell(column.header, column.show(record), column.priority, column.style) for column in _COLUMNS]
        if self.experts is not None:
            cells.append(_Cell("busiest expert", f"{self.experts.busiest_expert:.2f}×", 4, ""))
        while len(cells) > 1 and sum(cell.width for cell in cells) + 2 * (len(cells) - 1) > width:
            cells.remove(max(cells, key=lambda cell: cell.priority))
        return cells


def plain_train_line(record: TrainRecord, max_steps: int) -> str:
    """A record as one line of `name value` pairs, always the same ones in the same order, `-` where not measured."""

    def value(number: float | None, form: str) -> str:
        return "-" if number is None else format(number, form)

    pairs = (
        ("step", f"{record.step}/{max_steps}"),
        ("loss", value(record.loss, ".4f")),
        ("lr", value(record.lr, ".3e")),
        ("grad_norm", value(record.grad_norm, ".3f")),
        ("step_time_s", value(record.step_time_s, ".4f")),
        ("tokens_per_s", value(record.tokens_per_s, ".0f")),
        ("tflops_per_gpu", value(record.tflops_per_gpu, ".2f")),
        ("mfu", value(record.mfu, ".4f")),
        ("memory_gib", value(record.memory_gib, ".2f")),
        ("eta", "-" if record.eta_s is None else format_duration(record.eta_s).replace(" ", "")),
    )
    return " ".join(f"{name} {text}" for name, text in pairs)


def plain_validation_line(record: ValidationRecord, max_steps: int) -> str:
    """A validation as one line of `name value` pairs."""
    return (
        f"validation step {record.step}/{max_steps} loss {record.loss:.4f} perplexity {record.perplexity:.2f} "
        f"num_samples {record.num_samples} time_s {record.time_s:.2f}"
    )


def plain_experts_line(record: ExpertsRecord, max_steps: int) -> str:
    """The state of a mixture of experts as one line of `name value` pairs; losses that it has not are left out."""
    losses = (("load_balancing_loss", record.load_balancing_loss), ("z_loss", record.z_loss))
    shown = "".join(f" {name} {value:.4f}" for name, value in losses if value is not None)
    return (
        f"experts step {record.step}/{max_steps}{shown} busiest_expert {record.busiest_expert:.2f} "
        f"idlest_expert {record.idlest_expert:.2f}"
    )


def plain_checkpoint_line(record: CheckpointRecord, max_steps: int) -> str:
    """A complete checkpoint as one line of `name value` pairs."""
    return (
        f"checkpoint step {record.saved_step}/{max_steps} bytes {record.num_bytes} stall_s {record.stall_s:.3f} "
        f"time_s {record.time_s:.2f}"
    )
