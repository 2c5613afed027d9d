r"""gpt_pretrain.benchmark: variants of a run, measured under the same knobs.

It takes every argument of python -m gpt_pretrain and keeps nothing that it
trains. Each of benchmark.variants runs in its own trainer.devices processes;
its overrides win over the command line. It prints step times, tokens/s,
TFLOP/s, MFU against this machine's own matrix products, memory, loss and
ratios, and writes benchmark.json and Markdown to run_dir.

Exit codes: 0 all variants measured; 1 at least one failed, with its reason in
the table; 2 a mistake in what was given; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.benchmark                  the loop against the bare one
    python -m gpt_pretrain.benchmark model=gpt3_1_3b data=mock \
        benchmark.variants=[bf16,fp8_delayed,fp8_tensorwise]
    python -m gpt_pretrain.benchmark model=llama3_8b parallelism=dp \
        trainer.devices=4 benchmark.rounds=2 benchmark.profile=true
    python -m gpt_pretrain.benchmark \
        'benchmark.variants=[app,"model.micro_batch_size=4"]'
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from gpt_pretrain.benchmark.document import (
    WIDTH,
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
    benchmark_problems,
    load_variants,
    own_key_problems,
    read_variants,
    run_overrides,
    variant_problems,
    variant_refusals,
)
from gpt_pretrain.benchmark.worker import run_task
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.commands.door import refuse_launcher_and_sweep, run_with_config
from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir
from gpt_pretrain.plan.machine import GPUS
from gpt_pretrain.report.console import console_of_width, print_line
from gpt_pretrain.rules.gate import Job, load_config
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.products import resolve

FAILED = 1
_MACHINE = "machine"


@dataclass(kw_only=True, slots=True)
class _Entry:
    """A variant and its results so far."""

    variant: Variant
    config: Config
    folder: str
    """In the run directory, with a number that makes it unique."""
    measured: list[tuple[Measured, ...]] = field(default_factory=list)
    """By round and rank."""
    problem: str | None = None
    """Why it is no longer measured."""
    forecast: Forecast | None = None

    @property
    def num_processes(self) -> int:
        return self.config.trainer.devices or 1


class Campaign:
    """Measures a checked command line: the machine's ceiling, then the variants in turn, round after round.

    Raises `ConfigError` if a variant has unknown keys, wrong values, or keys that the benchmark sets itself.
    """

    def __init__(self, config: Config, source: Source, overrides: Sequence[str], arguments: Sequence[str]) -> None:
        self._config = config
        self._overrides = tuple(overrides)
        self._source = source
        self._arguments = tuple(arguments)
        self._console = console_of_width(WIDTH)
        variants = read_variants(config, "benchmark")
        configs = load_variants(variants, source, overrides, variant_problems, own_key_problems(overrides))
        self._entries = [
            _Entry(variant=variant, config=configs[variant], folder=f"{number}_{variant.file_name}")
            for number, variant in enumerate(variants, start=1)
        ]

    def run(self) -> bool:
        """Measures everything, prints and writes it; returns whether all variants ran."""
        run_dir = make_run_dir(self._config)
        # The first folder that a benchmark creates.
        if (run_dir / _MACHINE).exists():
            raise UserError(f"run_dir={run_dir} holds a benchmark already; give another one, or leave it out")
        write_file(run_dir / "config.yaml", config_to_yaml(self._config), wait_for_disk=False)
        self._note("measuring the machine's matrix products")
        outcome = run_task("gemm", MachineSeen, run_dir / _MACHINE, source=self._source, overrides=self._overrides)
        if outcome.problem is not None:
            raise RunError(f"the machine's matrix products could not be measured: {outcome.problem}")
        (seen,) = outcome.results
        self._refuse(seen.platform, run_dir)
        for number in range(self._config.benchmark.rounds):
            # There and back, so that a steady drift of the machine favors no variant.
            for entry in self._entries if number % 2 == 0 else reversed(self._entries):
                if entry.problem is None:
                    self._measure(entry, number, run_dir)
        if self._config.benchmark.forecast:
            self._forecast(seen.machine, run_dir)
        benchmark = Benchmark(
            config=self._config,
            arguments=self._arguments,
            date=date.today().isoformat(),
            machine=seen.machine,
            rows=tuple(self._rows(seen.machine)),
        )
        self._print(benchmark)
        for path in write_documents(benchmark, run_dir):
            self._note(f"written: {path}")
        return all(entry.problem is None for entry in self._entries)

    def _refuse(self, platform: Platform, run_dir: Path) -> None:
        """Says first which variants cannot be measured, and why."""
        for entry in self._entries:
            overrides = self._run_overrides(entry, run_dir / entry.folder, profiled=False)
            if problems := variant_refusals(load_config(overrides, self._source), platform):
                entry.problem = str(ConfigError(problems))
                self._note(f"{entry.variant.name} is left out: {entry.problem}")

    def _run_overrides(self, entry: _Entry, folder: Path, *, profiled: bool) -> list[str]:
        own = run_overrides(entry.config, folder / "run", profiled=profiled)
        return [*self._overrides, *entry.variant.overrides, *own]

    def _measure(self, entry: _Entry, number: int, run_dir: Path) -> None:
        folder = run_dir / entry.folder / f"round_{number + 1}"
        profiled = self._config.benchmark.profile and number == 0
        outcome = run_task(
            entry.variant.loop,
            Measured,
            folder,
            source=self._source,
            overrides=self._run_overrides(entry, folder, profiled=profiled),
            num_processes=entry.num_processes,
            profiled=profiled,
        )
        if outcome.problem is not None:
            entry.problem = outcome.problem
            self._note(f"round {number + 1}, {entry.variant.name}: failed: {outcome.problem.partition('\n')[0]}")
            return
        entry.measured.append(outcome.results)
        times = ", ".join(map(format_step_time, outcome.results[0].step_times_s))
        self._note(f"round {number + 1}, {entry.variant.name}: {times}")

    def _forecast(self, machine: Machine, run_dir: Path) -> None:
        """Plans the variants, if this machine's GPU is `plan.gpu`."""
        gpu = self._config.plan.gpu
        if machine.device != GPUS[gpu].name:
            self._note(f"no forecast: plan.gpu={gpu.name} is {GPUS[gpu].name}, and this machine has {machine.device}")
            return
        for entry in self._entries:
            outcome = run_task(
                "forecast",
                Forecast,
                run_dir / entry.folder / "forecast",
                source=self._source,
                overrides=[*self._overrides, *entry.variant.overrides, f"plan.num_gpus={entry.num_processes}"],
            )
            if outcome.problem is None:
                (entry.forecast,) = outcome.results
            else:
                self._note(f"{entry.variant.name}: no forecast: {outcome.problem}")

    def _rows(self, machine: Machine) -> list[Row]:
        rows = []
        for entry in self._entries:
            figures = None
            if entry.problem is None:
                figures = compute_figures(entry.measured, resolve(entry.config), machine.gemms)
            rows.append(build_row(entry.variant, entry.num_processes, figures, entry.problem, entry.forecast))
        return with_ratios(rows)

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def measure(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
        check_run_dir(jobs[0].config, "a benchmark")
        campaign = Campaign(jobs[0].config, request.loader.source, request.overrides, given)
        return 0 if campaign.run() else FAILED

    def refuse(request: Request, launch: Launch) -> None:
        refuse_launcher_and_sweep(request, launch, "a benchmark", "benchmark.variants")

    return run_with_config(__doc__, measure, given, rules=benchmark_problems, refuse=refuse, name="benchmark")


if __name__ == "__main__":
    raise SystemExit(main())
