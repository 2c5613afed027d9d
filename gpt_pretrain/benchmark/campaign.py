"""A benchmark from start to end: the machine's ceiling, the variants in turns, round after round, the tables."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from rich.console import Console

from gpt_pretrain.benchmark.document import (
    Benchmark,
    facts,
    format_step_time,
    print_table,
    problem_lines,
    table_of_forecasts,
    table_of_kernels,
    table_of_parts,
    table_of_rows,
    write_documents,
)
from gpt_pretrain.benchmark.results import (
    Forecast,
    Machine,
    MachineSeen,
    Measured,
    Row,
    build_row,
    compute_figures,
    with_ratios,
)
from gpt_pretrain.benchmark.variants import (
    Variant,
    benchmark_variants,
    load_variants,
    own_key_problems,
    run_overrides,
    variant_problems,
    variant_refusals,
)
from gpt_pretrain.benchmark.worker import run_task
from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.run_dir import make_run_dir
from gpt_pretrain.plan.machine import GPUS
from gpt_pretrain.report.console import print_line
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.products import resolve

_MACHINE = "machine"


class Campaign:
    """Runs the variants of a checked command line.

    Raises:
        ConfigError: A variant adds unknown keys, wrong values, or keys that the benchmark sets itself.
    """

    def __init__(
        self, config: Config, source: Source, overrides: Sequence[str], arguments: Sequence[str], console: Console
    ) -> None:
        self._config = config
        self._overrides = tuple(overrides)
        self._source = source
        self._arguments = tuple(arguments)
        self._console = console
        self._variants = benchmark_variants(config.benchmark)
        problems = own_key_problems(overrides)
        self._configs = load_variants(self._variants, source, overrides, variant_problems, problems)
        self._measured: dict[Variant, list[tuple[Measured, ...]]] = {variant: [] for variant in self._variants}
        self._problems: dict[Variant, str] = {}

    def run(self) -> bool:
        """Measures everything, prints and writes it; returns whether all variants ran.

        Raises:
            UserError: The run directory, or `benchmark.markdown`, cannot be written.
            RunError: The machine's own products could not be measured.
        """
        run_dir = make_run_dir(self._config)
        # The first folder that a benchmark makes.
        if (run_dir / _MACHINE).exists():
            raise UserError(f"run_dir={run_dir} holds a benchmark already; give another one, or leave it out")
        write_file(run_dir / "config.yaml", config_to_yaml(self._config), wait_for_disk=False)
        self._note("measuring the machine's matrix products")
        outcome = run_task("gemm", MachineSeen, run_dir / _MACHINE, source=self._source, overrides=self._overrides)
        if outcome.problem is not None:
            raise RunError(f"the machine's matrix products could not be measured: {outcome.problem}")
        (seen,) = outcome.results
        self._refuse(seen.platform.platform, run_dir)
        for number in range(self._config.benchmark.rounds):
            # There and back, so that a machine that drifts steadily favours no variant.
            for variant in self._variants if number % 2 == 0 else reversed(self._variants):
                if variant not in self._problems:
                    self._measure(variant, number, run_dir)
        forecasts = self._forecasts(seen.machine, run_dir)
        benchmark = Benchmark(
            config=self._config,
            arguments=self._arguments,
            date=date.today().isoformat(),
            machine=seen.machine,
            rows=tuple(self._rows(seen.machine, forecasts)),
        )
        self._print(benchmark)
        for path in write_documents(benchmark, run_dir):
            self._note(f"written: {path}")
        return not self._problems

    def _num_processes(self, variant: Variant) -> int:
        return self._configs[variant].trainer.devices or 1

    def _refuse(self, platform: Platform, run_dir: Path) -> None:
        """Says which variants will not be measured, and why, before the others take their time."""
        for variant in self._variants:
            overrides = self._run_overrides(variant, self._folder(variant, run_dir), profiled=False)
            if problems := variant_refusals(load_config(overrides, self._source), platform):
                self._problems[variant] = str(ConfigError(problems))
                self._note(f"{variant.name} is left out: {self._problems[variant]}")

    def _run_overrides(self, variant: Variant, folder: Path, *, profiled: bool) -> list[str]:
        own = run_overrides(self._configs[variant], folder / "run", profiled=profiled)
        return [*self._overrides, *variant.overrides, *own]

    def _measure(self, variant: Variant, number: int, run_dir: Path) -> None:
        benchmark = self._config.benchmark
        folder = self._folder(variant, run_dir) / f"round_{number + 1}"
        profiled = benchmark.profile and number == 0
        outcome = run_task(
            variant.loop.name,
            Measured,
            folder,
            source=self._source,
            overrides=self._run_overrides(variant, folder, profiled=profiled),
            num_processes=self._num_processes(variant),
            profiled=profiled,
        )
        if outcome.problem is not None:
            self._problems[variant] = outcome.problem
            self._note(f"round {number + 1}, {variant.name}: failed: {outcome.problem.partition('\n')[0]}")
            return
        self._measured[variant].append(outcome.results)
        times = ", ".join(map(format_step_time, outcome.results[0].step_times_s))
        self._note(f"round {number + 1}, {variant.name}: {times}")

    def _rows(self, machine: Machine, forecasts: Mapping[Variant, Forecast]) -> list[Row]:
        rows = []
        for variant in self._variants:
            problem = self._problems.get(variant)
            figures = None
            if problem is None:
                figures = compute_figures(self._measured[variant], resolve(self._configs[variant]), machine.gemms)
            rows.append(build_row(variant, self._num_processes(variant), figures, problem, forecasts.get(variant)))
        return with_ratios(rows)

    def _forecasts(self, machine: Machine, run_dir: Path) -> dict[Variant, Forecast]:
        """What `plan` says of the variants, where it was asked for and knows this machine."""
        if not self._config.benchmark.forecast:
            return {}
        gpu = self._config.plan.gpu
        if machine.device != GPUS[gpu].name:
            self._note(f"no forecast: plan.gpu={gpu.name} is {GPUS[gpu].name}, and this machine has {machine.device}")
            return {}
        forecasts = {}
        for variant in self._variants:
            outcome = run_task(
                "forecast",
                Forecast,
                self._folder(variant, run_dir) / "forecast",
                source=self._source,
                overrides=[*self._overrides, *variant.overrides, f"plan.num_gpus={self._num_processes(variant)}"],
            )
            if outcome.problem is None:
                (forecasts[variant],) = outcome.results
            else:
                self._note(f"{variant.name}: no forecast: {outcome.problem}")
        return forecasts

    def _folder(self, variant: Variant, run_dir: Path) -> Path:
        """A folder whose number tells the variant from the others."""
        return run_dir / f"{self._variants.index(variant) + 1}_{variant.file_name}"

    def _print(self, benchmark: Benchmark) -> None:
        for name, text in facts(benchmark).items():
            self._note(f"{name}: {text}")
        print_table(self._console, "Variants", *table_of_rows(benchmark.rows))
        for line in problem_lines(benchmark.rows):
            self._note(line)
        forecasts = table_of_forecasts(benchmark.rows)
        if forecasts is not None:
            print_table(self._console, f"Forecast for {self._config.plan.gpu.name}", *forecasts)
        for row in benchmark.rows:
            if row.figures is not None and row.figures.parts:
                print_table(self._console, f"What a step of {row.name} consists of", *table_of_parts(row.figures.parts))
            if row.figures is not None and row.figures.kernels:
                print_table(self._console, f"Where a step of {row.name} goes", *table_of_kernels(row.figures.kernels))

    def _note(self, line: str) -> None:
        print_line(self._console, line)
