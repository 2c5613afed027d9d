"""The output of a benchmark: Markdown, on the terminal too, and `benchmark.json` for scripts."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.benchmark.results import MFU_FORMULA, Figures, Machine, Row
from gpt_pretrain.config.derived import FLOPS_FORMULA
from gpt_pretrain.config.errors import counted, format_digits, shell_word, visible
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config
from gpt_pretrain.report.columns import UNKNOWN, format_gib, format_loss, format_percent

VERSION = 3
FILE_NAME, MARKDOWN = "benchmark.json", "benchmark.md"
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
        "".join(
            f"- {_markdown(row.name)}: {'\n  '.join(map(_markdown, row.problem.split('\n')))}\n"
            for row in rows
            if row.problem is not None
        ),
    ]
    added = [
        f"- {_markdown(row.name)}: {_markdown(' '.join(map(shell_word, row.overrides)))}\n"
        for row in rows
        if row.overrides
    ]
    if added:
        parts.append("".join(["What a variant adds to the command line:\n\n", *added]))
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
    """Writes both files and returns their paths."""
    document = json.dumps(benchmark_document(benchmark), indent=2, ensure_ascii=False, allow_nan=False)
    contents = {run_dir / FILE_NAME: document + "\n", run_dir / MARKDOWN: benchmark_markdown(benchmark)}
    for path, content in contents.items():
        write_file(path, content, wait_for_disk=False)
    return list(contents)


def format_step_ms(seconds: float) -> str:
    """A step's time in milliseconds with four digits."""
    # With five digits and more, .4g would write an exponent.
    return f"{seconds * 1e3:.4g}" if seconds < 9.9995 else f"{seconds * 1e3:,.0f}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


# Title → cell of a variant that has figures.
_COLUMNS: dict[str, Callable[[Row, Figures], str]] = {
    "step (median)": lambda _, figures: f"{format_step_ms(figures.step_time_s)} ms",
    "spread (ms)": lambda _, figures: "–".join(format_step_ms(end(figures.step_times_s)) for end in (min, max)),
    "tokens/s/GPU": lambda _, figures: f"{figures.tokens_per_s_per_gpu:,.0f}",
    "TFLOP/s": lambda _, figures: format_digits(figures.tflops_per_gpu),
    "MFU": lambda _, figures: format_percent(figures.mfu),
    "peak memory": lambda _, figures: format_gib(figures.memory_gib),
    "first step": lambda _, figures: f"{figures.first_step_s:.1f} s",
    "loss": lambda _, figures: format_loss(figures.loss),
    "speed ratio": lambda row, _: _ratio(row.speed_ratio),
    "memory ratio": lambda row, _: _ratio(row.memory_ratio),
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


def _markdown_table(titles: Cells, lines: Sequence[Cells]) -> str:
    rows = [[_markdown(cell) for cell in row] for row in (titles, *lines)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def _markdown(text: str) -> str:
    """Text of names and values, which is no Markdown, no HTML and one line."""
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", visible(text))
