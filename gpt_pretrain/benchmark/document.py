"""What a benchmark leaves: `benchmark.json` for scripts, and a Markdown file for people, fit for `benchmarks/`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.benchmark.figures import MFU_FORMULA, Row
from gpt_pretrain.benchmark.results import Machine
from gpt_pretrain.benchmark.table import (
    ceilings_sentence,
    markdown_table,
    problem_lines,
    table_of_forecasts,
    table_of_kernels,
    table_of_parts,
    table_of_rows,
)
from gpt_pretrain.benchmark.worker import TRACE
from gpt_pretrain.config.derived import FLOPS_FORMULA
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config

VERSION = 1
FILE_NAME, MARKDOWN = "benchmark.json", "benchmark.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Everything that was measured, and what it takes to measure it again."""

    config: Config
    """Of the command line, before the variants."""
    arguments: tuple[str, ...]
    """The command line itself."""
    date: str
    """YYYY-MM-DD."""
    machine: Machine
    rows: tuple[Row, ...]

    @property
    def num_gpus(self) -> int:
        """Of the variant with most."""
        return max(row.num_gpus for row in self.rows)

    @property
    def command(self) -> str:
        """As one would type it again."""
        return f"python -m gpt_pretrain.benchmark {shlex.join(self.arguments)}".rstrip()


def benchmark_document(benchmark: Benchmark) -> dict[str, object]:
    """The benchmark as JSON values; `version` grows when a name changes its meaning or goes away."""
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
        f"# {benchmark.config.name}: {', '.join(row.name for row in rows)}, "
        f"{benchmark.num_gpus} × {machine.device}, {benchmark.date}\n",
        markdown_table(["", ""], [[name, text] for name, text in facts(benchmark).items()]),
        f"    {benchmark.command}\n",
        f"Each variant in {settings.rounds} process(es) of its own; of each the median of "
        f"{settings.rounds * settings.steps // settings.interval} intervals of {settings.interval} steps after "
        f"{settings.warmup_steps}; "
        "spread: fastest and slowest interval; ratios: to the first variant.\n",
        markdown_table(*table_of_rows(rows)),
        "".join("- " + line.replace("\n", "\n  ") + "\n" for line in problem_lines(rows)),
        _added(rows),
    ]
    forecasts = table_of_forecasts(rows)
    if forecasts is not None:
        parts += [f"Forecast by `plan` for {benchmark.config.plan.gpu.name}:\n", markdown_table(*forecasts)]
    for row in rows:
        if row.figures is not None and row.figures.kernels:
            parts.append(f"## Where a step of {row.name} goes\n\nThe trace: `{TRACE}`.\n")
            if row.figures.parts:
                parts.append(markdown_table(*table_of_parts(row.figures.parts)))
            parts.append(markdown_table(*table_of_kernels(row.figures.kernels)))
    return "\n".join(part for part in parts if part)


def facts(benchmark: Benchmark) -> dict[str, str]:
    """Machine, configuration and formulas: name to a line."""
    machine, model = benchmark.machine, benchmark.config.model
    memory = "" if machine.memory_gib is None else f" ({machine.memory_gib:.1f} GiB)"
    driver = "" if machine.driver is None else f", driver {machine.driver}"
    return {
        "machine": f"{benchmark.num_gpus} × {machine.device}{memory}{driver}",
        "versions": ", ".join(machine.versions),
        "ceiling": ceilings_sentence(machine.gemms),
        "model": f"{model.num_layers} layers × {model.hidden_size}, sequence {model.encoder_seq_length:,}, micro batch "
        f"{model.micro_batch_size}, global batch {model.global_batch_size}, TP {model.tensor_model_parallel_size}, "
        f"PP {model.pipeline_model_parallel_size}, CP {model.context_parallel_size}; all keys: config.yaml",
        "FLOPs per token": f"{FLOPS_FORMULA}, causal attention halved",
        "MFU": MFU_FORMULA,
    }


def _added(rows: Sequence[Row]) -> str:
    """Which overrides each variant adds, where it adds any."""
    lines = [f"- {row.name}: `{shlex.join(row.overrides)}`\n" for row in rows if row.overrides]
    return "".join(["What a variant adds to the command line:\n\n", *lines]) if lines else ""


def write_documents(benchmark: Benchmark, run_dir: Path) -> list[Path]:
    """Writes both files and returns their paths.

    Raises:
        UserError: `benchmark.markdown` cannot be written.
    """
    json_path = run_dir / FILE_NAME
    document = json.dumps(benchmark_document(benchmark), indent=2, ensure_ascii=False, allow_nan=False)
    json_path.write_text(document + "\n", encoding="utf-8")
    markdown = benchmark.config.benchmark.markdown
    markdown_path = run_dir / MARKDOWN if markdown is None else Path(markdown)
    try:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text(benchmark_markdown(benchmark), encoding="utf-8")
    except OSError as error:
        problem = f"benchmark.markdown={markdown} cannot be written: {error.strerror or error}"
        raise UserError(f"{problem}; the figures are in {json_path}") from error
    return [json_path, markdown_path]
