"""The figures as tables, on the terminal and in Markdown: the same columns, the same words."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt_pretrain.benchmark.figures import Figures, Row
from gpt_pretrain.benchmark.results import GemmCeiling, Kernel, Part
from gpt_pretrain.report.numbers import UNKNOWN, format_gib, format_loss, format_percent, format_rate

# Longest name of a kernel on the terminal: templates of CUDA fill pages.
_KERNEL_WIDTH = 70
# Of tables where the output is no terminal: all columns stand side by side.
WIDTH = 160
_DTYPES = {"bfloat16": "BF16", "float32": "FP32", "fp8": "FP8"}

type Cells = list[str]


def format_step_time(seconds: float) -> str:
    """A step's time in milliseconds with four digits."""
    return f"{seconds * 1e3:.4g} ms" if seconds < 10 else f"{seconds * 1e3:,.0f} ms"


def _format_ms(time_ms: float) -> str:
    return f"{time_ms:.3g}" if time_ms < 100 else f"{time_ms:,.0f}"


def _spread(figures: Figures) -> str:
    return f"{figures.fastest_step_s * 1e3:.4g}–{figures.slowest_step_s * 1e3:.4g}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


# Title to the cell of a variant that has figures.
_COLUMNS: dict[str, Callable[[Row, Figures], str]] = {
    "step (median)": lambda _, figures: format_step_time(figures.step_time_s),
    "spread (ms)": lambda _, figures: _spread(figures),
    "tokens/s/GPU": lambda _, figures: f"{figures.tokens_per_s_per_gpu:,.0f}",
    "TFLOP/s": lambda _, figures: format_rate(figures.tflops_per_gpu),
    "MFU": lambda _, figures: format_percent(figures.mfu),
    "peak memory": lambda _, figures: format_gib(figures.memory_gib),
    "first step": lambda _, figures: f"{figures.first_step_s:.1f} s",
    "loss": lambda _, figures: format_loss(figures.loss),
    "speed ratio": lambda row, _: _ratio(row.speed_ratio),
    "memory ratio": lambda row, _: _ratio(row.memory_ratio),
    "loss apart": lambda row, _: UNKNOWN if row.loss_difference is None else f"{row.loss_difference:.2%}",
}


def table_of_rows(rows: Sequence[Row]) -> tuple[Cells, list[Cells]]:
    """Titles, and one line of cells for each variant; one that failed has its reason in `table_of_problems`."""
    lines = []
    for row in rows:
        figures = row.figures
        cells = ["failed", *[UNKNOWN] * (len(_COLUMNS) - 1)]
        if figures is not None:
            cells = [cell(row, figures) for cell in _COLUMNS.values()]
        lines.append([row.name, str(row.num_gpus), *cells])
    return ["variant", "ranks", *_COLUMNS], lines


def problem_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each variant that failed, with the reason."""
    return [f"{row.name}: {row.problem}" for row in rows if row.problem is not None]


def table_of_forecasts(rows: Sequence[Row]) -> tuple[Cells, list[Cells]] | None:
    """Measured against planned; None where nothing was planned."""
    if all(row.forecast is None for row in rows):
        return None
    titles = ["variant", "peak memory", "forecast", "off by", "tokens/s/GPU", "forecast", "off by"]
    lines = []
    for row in rows:
        forecast, figures = row.forecast, row.figures
        if forecast is None or figures is None:
            lines.append([row.name, *[UNKNOWN] * (len(titles) - 1)])
            continue
        speed = forecast.tokens_per_s_per_gpu
        lines.append(
            [
                row.name,
                format_gib(figures.memory_gib),
                format_gib(forecast.memory_gib),
                f"{forecast.memory_gib / figures.memory_gib - 1:+.1%}",
                f"{figures.tokens_per_s_per_gpu:,.0f}",
                UNKNOWN if speed is None else f"{speed:,.0f}",
                UNKNOWN if speed is None else f"{speed / figures.tokens_per_s_per_gpu - 1:+.1%}",
            ]
        )
    return titles, lines


def table_of_kernels(kernels: Sequence[Kernel]) -> tuple[Cells, list[Cells]]:
    """What the time of a profiled step went to."""
    lines = [
        [
            kernel.name if len(kernel.name) <= _KERNEL_WIDTH else f"{kernel.name[: _KERNEL_WIDTH - 1]}…",
            f"{kernel.calls:g}",
            _format_ms(kernel.time_ms),
            format_percent(kernel.share),
        ]
        for kernel in kernels
    ]
    return ["kernel", "calls/step", "ms/step", "share"], lines


def table_of_parts(parts: Sequence[Part]) -> tuple[Cells, list[Cells]]:
    """What kinds of work a profiled step consists of."""
    total = sum(part.time_ms for part in parts) or 1.0
    lines = [[part.kind, _format_ms(part.time_ms), format_percent(part.time_ms / total)] for part in parts]
    return ["kind", "ms/step", "share"], lines


def ceilings_sentence(ceilings: Sequence[GemmCeiling]) -> str:
    """The machine's products in a line."""
    (side,) = {ceiling.side for ceiling in ceilings}
    shown = ", ".join(f"{_DTYPES[ceiling.dtype]} {ceiling.tflops:.4g}" for ceiling in ceilings)
    return f"{shown} TFLOP/s ({side}³, median)"


def markdown_table(titles: Cells, lines: Sequence[Cells]) -> str:
    """A table in Markdown, bars in its cells escaped."""
    rows = [titles, ["---"] * len(titles), *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def print_table(console: Console, title: str, titles: Cells, lines: Sequence[Cells]) -> None:
    """A table on the terminal; where it is too narrow, cells are folded and none is lost."""
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for number, name in enumerate(titles):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
