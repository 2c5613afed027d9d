"""The output of a benchmark: tables on the terminal and in Markdown, and `benchmark.json` for scripts."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt_pretrain.benchmark.results import MFU_FORMULA, Figures, Kernel, Machine, Part, Row
from gpt_pretrain.benchmark.worker import TRACE
from gpt_pretrain.config.derived import FLOPS_FORMULA
from gpt_pretrain.config.errors import UserError, counted, shell_word, show, visible
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config
from gpt_pretrain.report.columns import UNKNOWN, format_gib, format_loss, format_percent, format_rate
from gpt_pretrain.report.console import print_line

VERSION = 1
FILE_NAME, MARKDOWN = "benchmark.json", "benchmark.md"
# Of a kernel's name in a table: CUDA's templates fill pages.
_KERNEL_WIDTH = 70
# Columns of an output that is not a terminal, enough for a whole table.
WIDTH = 160
_DTYPES = {"bfloat16": "BF16", "float32": "FP32", "fp8": "FP8"}

type Cells = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Everything that was measured, and how to measure it again."""

    config: Config
    """Without the variants' overrides."""
    arguments: tuple[str, ...]
    """The command line."""
    date: str
    """YYYY-MM-DD."""
    machine: Machine
    rows: tuple[Row, ...]

    @property
    def num_gpus(self) -> int:
        """Of the variant with the most."""
        return max(row.num_gpus for row in self.rows)

    @property
    def command(self) -> str:
        """The command that measures it again."""
        return f"python -m gpt_pretrain.benchmark {' '.join(map(shell_word, self.arguments))}".rstrip()


def benchmark_document(benchmark: Benchmark) -> dict[str, object]:
    """The benchmark as JSON values; `version` grows when a name changes its meaning or disappears."""
    return {
        "version": VERSION,
        "command": benchmark.command,
        "date": benchmark.date,
        "machine": benchmark.machine.to_json(),
        "flops_formula": FLOPS_FORMULA,
        "mfu_formula": MFU_FORMULA,
        "variants": [row.to_json() for row in benchmark.rows],
        "config": config_to_dict(benchmark.config),
    }


def benchmark_markdown(benchmark: Benchmark) -> str:
    """The benchmark as Markdown: machine, versions, configuration, command, tables."""
    machine, settings, rows = benchmark.machine, benchmark.config.benchmark, benchmark.rows
    parts = [
        f"# {_markdown(benchmark.config.name)}: {', '.join(_markdown(row.name) for row in rows)}, "
        f"{benchmark.num_gpus} × {machine.device}, {benchmark.date}\n",
        _markdown_table(["", ""], [[name, text] for name, text in _facts(benchmark).items()]),
        f"    {benchmark.command}\n",
        f"Each variant in {counted(settings.rounds, 'process', 'es')} of its own; of each the median of "
        f"{settings.rounds * settings.steps // settings.interval} intervals of {settings.interval} steps after "
        f"{settings.warmup_steps}; "
        "spread: fastest and slowest interval; ratios: to the first variant.\n",
        _markdown_table(*table_of_rows(rows)),
        "".join("- " + "\n  ".join(map(_markdown, line.split("\n"))) + "\n" for line in _problem_lines(rows)),
    ]
    added = [f"- {_markdown(row.name)}: {_markdown_code(row.overrides)}\n" for row in rows if row.overrides]
    if added:
        parts.append("".join(["What a variant adds to the command line:\n\n", *added]))
    forecasts = table_of_forecasts(rows)
    if forecasts is not None:
        parts += [f"Forecast by `plan` for {benchmark.config.plan.gpu.name}:\n", _markdown_table(*forecasts)]
    for row in rows:
        if row.figures is not None and row.figures.kernels:
            parts.append(f"## Where a step of {_markdown(row.name)} goes\n\nThe trace: `{TRACE}`.\n")
            if row.figures.parts:
                parts.append(_markdown_table(*table_of_parts(row.figures.parts)))
            parts.append(_markdown_table(*_table_of_kernels(row.figures.kernels)))
    return "\n".join(part for part in parts if part)


def _facts(benchmark: Benchmark) -> dict[str, str]:
    machine, model = benchmark.machine, benchmark.config.model
    memory = "" if machine.memory_gib is None else f" ({machine.memory_gib:.1f} GiB)"
    driver = "" if machine.driver is None else f", driver {machine.driver}"
    ceilings = ", ".join(f"{_DTYPES[ceiling.dtype]} {ceiling.tflops:.4g}" for ceiling in machine.gemms)
    (side,) = {ceiling.side for ceiling in machine.gemms}
    return {
        "machine": f"{benchmark.num_gpus} × {machine.device}{memory}{driver}",
        "versions": ", ".join(machine.versions),
        "ceiling": f"{ceilings} TFLOP/s ({side}³, median)",
        "model": f"{model.num_layers} layers × {model.hidden_size}, sequence {model.encoder_seq_length:,}, micro batch "
        f"{model.micro_batch_size}, global batch {model.global_batch_size}, TP {model.tensor_model_parallel_size}, "
        f"PP {model.pipeline_model_parallel_size}, CP {model.context_parallel_size}; all keys: config.yaml",
        "FLOPs per token": f"{FLOPS_FORMULA}, causal attention halved",
        "MFU": MFU_FORMULA,
    }


def write_documents(benchmark: Benchmark, run_dir: Path) -> list[Path]:
    """Writes both files and returns their paths; raises `UserError` if `benchmark.markdown` cannot be written."""
    json_path = run_dir / FILE_NAME
    document = json.dumps(benchmark_document(benchmark), indent=2, ensure_ascii=False, allow_nan=False)
    write_file(json_path, document + "\n", wait_for_disk=False)
    markdown = benchmark.config.benchmark.markdown
    markdown_path = run_dir / MARKDOWN if markdown is None else Path(markdown)
    try:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        write_file(markdown_path, benchmark_markdown(benchmark), wait_for_disk=False)
    except OSError as error:
        problem = f"benchmark.markdown={show(markdown)}: {markdown_path} cannot be written: {error.strerror or error}"
        raise UserError(f"{problem}; the figures are in {json_path}") from error
    return [json_path, markdown_path]


def format_step_time(seconds: float) -> str:
    """A step's time in milliseconds with four digits."""
    return f"{_step_ms(seconds)} ms"


def _step_ms(seconds: float) -> str:
    # With five digits and more, .4g would write an exponent.
    return f"{seconds * 1e3:.4g}" if seconds < 9.9995 else f"{seconds * 1e3:,.0f}"


def _format_ms(time_ms: float) -> str:
    return f"{time_ms:.3g}" if time_ms < 100 else f"{time_ms:,.0f}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


# Title → cell of a variant that has figures.
_COLUMNS: dict[str, Callable[[Row, Figures], str]] = {
    "step (median)": lambda _, figures: format_step_time(figures.step_time_s),
    "spread (ms)": lambda _, figures: f"{_step_ms(figures.fastest_step_s)}–{_step_ms(figures.slowest_step_s)}",
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
    """Titles, and one line of cells per variant; `problem_lines` says why one failed."""
    lines = []
    for row in rows:
        cells = ["failed", *[UNKNOWN] * (len(_COLUMNS) - 1)]
        if row.figures is not None:
            cells = [cell(row, row.figures) for cell in _COLUMNS.values()]
        lines.append([row.name, str(row.num_gpus), *cells])
    return ["variant", "ranks", *_COLUMNS], lines


def _problem_lines(rows: Sequence[Row]) -> list[str]:
    return [f"{visible(row.name)}: {row.problem}" for row in rows if row.problem is not None]


def table_of_forecasts(rows: Sequence[Row]) -> tuple[Cells, list[Cells]] | None:
    """What was measured beside what was planned; None if nothing was planned."""
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


def _table_of_kernels(kernels: Sequence[Kernel]) -> tuple[Cells, list[Cells]]:
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
    """The kinds of work in a profiled step."""
    total = sum(part.time_ms for part in parts) or 1.0
    lines = [[part.kind, _format_ms(part.time_ms), format_percent(part.time_ms / total)] for part in parts]
    return ["kind", "ms/step", "share"], lines


def _markdown_table(titles: Cells, lines: Sequence[Cells]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "".join("| " + " | ".join(map(_markdown, row)) + " |\n" for row in rows)


def _markdown_code(words: Sequence[str]) -> str:
    """Words of a command line; code ends at as many backticks as began it."""
    code = " ".join(map(shell_word, words))
    fence = "`" * (1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence}{code}{fence}"


def _markdown(text: str) -> str:
    """Text of names and values, which is no Markdown, no HTML and one line."""
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", visible(text))


def print_benchmark(benchmark: Benchmark, console: Console) -> None:
    """Prints facts, tables and problems."""
    for name, text in _facts(benchmark).items():
        print_line(console, f"{name}: {text}")
    print_table(console, "Variants", *table_of_rows(benchmark.rows))
    for line in _problem_lines(benchmark.rows):
        print_line(console, line)
    forecasts = table_of_forecasts(benchmark.rows)
    if forecasts is not None:
        print_table(console, f"Forecast for {benchmark.config.plan.gpu.name}", *forecasts)
    for row in benchmark.rows:
        if row.figures is not None and row.figures.parts:
            print_table(console, f"What a step of {row.name} consists of", *table_of_parts(row.figures.parts))
        if row.figures is not None and row.figures.kernels:
            print_table(console, f"Where a step of {row.name} goes", *_table_of_kernels(row.figures.kernels))


def print_table(console: Console, title: str, titles: Cells, lines: Sequence[Cells]) -> None:
    """A table on the terminal, with cells folded if it is too narrow."""
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
