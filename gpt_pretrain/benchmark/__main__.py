r"""gpt_pretrain.benchmark: variants of a run, measured under the same knobs.

It takes every argument of python -m gpt_pretrain and keeps nothing that it
trains. Each of benchmark.variants runs in its own processes (trainer.devices);
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

from gpt_pretrain.benchmark.report import Benchmark, benchmark_markdown, format_step_ms, write_documents
from gpt_pretrain.benchmark.results import (
    Machine,
    MachineSeen,
    Measured,
    Row,
    compute_figures,
    with_ratios,
)
from gpt_pretrain.benchmark.variants import (
    LoadedVariant,
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
from gpt_pretrain.commands.command import refuse_launcher_and_sweep, run_with_config
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir
from gpt_pretrain.report.console import SafeConsole, print_line
from gpt_pretrain.rules.jobs import Job, load_config
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.products import resolve

FAILED = 1


@dataclass(kw_only=True, slots=True)
class _Entry:
    """A variant and its results so far."""

    variant: Variant
    loaded: LoadedVariant
    folder: Path
    measured: list[tuple[Measured, ...]] = field(default_factory=list)
    """By round and rank."""
    problem: str | None = None
    """Why it is no longer measured."""

    @property
    def num_processes(self) -> int:
        return self.loaded.config.trainer.devices or 1

    def row(self, machine: Machine) -> Row:
        """Its row, still without ratios."""
        figures = None
        if self.problem is None:
            figures = compute_figures(self.measured, resolve(self.loaded.config), machine.gemms)
        return Row(
            name=self.variant.name,
            loop=self.variant.loop,
            overrides=self.variant.overrides,
            num_gpus=self.num_processes,
            problem=self.problem,
            figures=figures,
        )


class Campaign:
    """Measures a checked command line: the machine's ceiling, then the variants in turn, round after round.

    Raises `UserError` if a variant has unknown keys, wrong values or keys that the benchmark sets itself, or the run
    directory holds a benchmark.
    """

    def __init__(self, config: Config, request: Request) -> None:
        self._config, self._source, self._overrides = config, request.loader.source, request.overrides
        self._console = SafeConsole(highlight=False, emoji=False)
        variants = read_variants(config, "benchmark")
        own_problems = own_key_problems(self._overrides)
        loaded = load_variants(variants, self._source, self._overrides, variant_problems, own_problems)
        self._run_dir = make_run_dir(config.run_dir, config.name)
        self._machine_folder = self._run_dir / "machine"
        if self._machine_folder.exists():
            raise UserError(f"run_dir={self._run_dir} holds a benchmark already; give another one, or leave it out")
        self._entries = [
            _Entry(variant=variant, loaded=loaded[variant], folder=self._run_dir / f"{number}_{variant.file_name}")
            for number, variant in enumerate(variants, start=1)
        ]

    def run(self, arguments: Sequence[str]) -> bool:
        """Measures everything, prints and writes it; returns whether all variants ran.

        `arguments` is the command line that measures it again.
        """
        write_file(self._run_dir / "config.yaml", config_to_yaml(self._config), wait_for_disk=False)
        self._note("measuring the machine's matrix products")
        (seen,) = run_task("gemm", MachineSeen, self._machine_folder, source=self._source, overrides=self._overrides)
        self._refuse(seen.platform)
        for number in range(1, self._config.benchmark.rounds + 1):
            # There and back, so that a steady drift of the machine favors no variant.
            for entry in self._entries if number % 2 else reversed(self._entries):
                if entry.problem is None:
                    self._measure(entry, number)
        benchmark = Benchmark(
            config=self._config,
            arguments=tuple(arguments),
            date=date.today().isoformat(),
            machine=seen.machine,
            rows=tuple(with_ratios([entry.row(seen.machine) for entry in self._entries])),
        )
        self._note(benchmark_markdown(benchmark))
        for path in write_documents(benchmark, self._run_dir):
            self._note(f"written: {path}")
        return all(entry.problem is None for entry in self._entries)

    def _refuse(self, platform: Platform) -> None:
        """Says first which variants cannot be measured, and why."""
        for entry in self._entries:
            for line in entry.loaded.unread:
                self._note(line)
            overrides = self._run_overrides(entry, entry.folder, profiled=False)
            if problems := variant_refusals(load_config(overrides, self._source), platform):
                entry.problem = str(ConfigError(problems))
                self._note(f"{entry.variant.name} is left out: {entry.problem}")

    def _run_overrides(self, entry: _Entry, folder: Path, *, profiled: bool) -> list[str]:
        own = run_overrides(entry.loaded.config, folder / "run", profiled=profiled)
        return [*entry.loaded.overrides, *own]

    def _measure(self, entry: _Entry, number: int) -> None:
        folder, place = entry.folder / f"round_{number}", f"round {number}, {entry.variant.name}"
        profiled = self._config.benchmark.profile and number == 1
        try:
            results = run_task(
                entry.variant.loop,
                Measured,
                folder,
                source=self._source,
                overrides=self._run_overrides(entry, folder, profiled=profiled),
                num_processes=entry.num_processes,
                profiled=profiled,
            )
        except RunError as error:
            entry.problem = str(error)
            self._note(f"{place}: failed: {entry.problem.partition('\n')[0]}")
            return
        entry.measured.append(results)
        self._note(f"{place}: {', '.join(map(format_step_ms, results[0].step_times_s))} ms")

    def _note(self, line: str) -> None:
        print_line(self._console, line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def measure(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
        check_run_dir(jobs[0].config, "a benchmark")
        return 0 if Campaign(jobs[0].config, request).run(given) else FAILED

    def refuse(request: Request, launch: Launch) -> None:
        refuse_launcher_and_sweep(request, launch, "a benchmark", "benchmark.variants")

    return run_with_config(__doc__, measure, given, rules=benchmark_problems, refuse=refuse, name="benchmark")


if __name__ == "__main__":
    raise SystemExit(main())
