r"""gpt_pretrain.compare: does one setting train as well as another, and how much
sooner does it reach the same loss?

It takes every argument of python -m gpt_pretrain, trains each of
compare.variants with compare.seeds seeds, and compares them with the first.
trainer.devices is the number of processes of each run. Started again with the
same run_dir, the command continues: finished runs are not trained again.

runs=[…] trains nothing and reads finished or running runs: our run directories,
or a folder of them such as a sweep's, the output of Megatron-LM or torchtitan,
and TensorBoard's event files. The first is the baseline.

It prints a table and a verdict on each variant, and writes compare.json and
compare.html to run_dir.

Exit codes: 0 compared; 1 a variant failed, and the others are compared;
4 compare.max_loss_gap or compare.min_speedup is missed, or cannot be shown;
2 a mistake in what was given; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.compare experiment=gpt2_124m_1gpu \
        compare.variants=[bf16,fp8_delayed] compare.seeds=3 run_dir=outputs/fp8
    python -m gpt_pretrain.compare runs=[outputs/a,megatron.log,tb_events]
    python -m gpt_pretrain.compare runs=[outputs/bf16,outputs/fp8] \
        compare.max_loss_gap=0.5% compare.min_speedup=1.2
"""  # noqa: D205

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_pretrain.commands.command import refuse_launcher_and_sweep, run_with_arguments, run_with_config
from gpt_pretrain.compare.comparison import Comparison, save_comparison
from gpt_pretrain.compare.gate import gate_problems, read_gate
from gpt_pretrain.config.errors import ConfigError, visible
from gpt_pretrain.config.schema import Config, GateConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_contents, check_run_dir, make_run_dir
from gpt_pretrain.report.console import console_of_width

# These load Hydra, as training does; reading finished runs does without. Help does without numpy, too.
if TYPE_CHECKING:
    from gpt_pretrain.commands.command_line import Request
    from gpt_pretrain.rules.jobs import Job

FAILED, GATE_MISSED = 1, 4
# Of a line in a log; a terminal has its own width.
_WIDTH = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRuns:
    """The command's arguments when it trains nothing."""

    runs: list[str]
    """Directories of runs, folders of such, and logs; the first is the baseline."""
    run_dir: str | None = None
    """Where compare.json and compare.html go; null: outputs/DATE/TIME_compare."""
    compare: GateConfig = field(default_factory=lambda: GateConfig(max_loss_gap=None, min_speedup=None))


def compare_finished(arguments: FinishedRuns, command: str) -> int:
    """Reads runs and compares them; returns the exit code."""
    problems = [*gate_problems(arguments.compare)]
    if not arguments.runs:
        problems.append("runs=[] compares nothing; give directories of runs, or logs: runs=[outputs/a,outputs/b]")
    if problems:
        raise ConfigError(problems)
    if arguments.run_dir is not None:
        check_contents(arguments.run_dir, "a comparison")
    from gpt_pretrain.compare.answers import compare_runs
    from gpt_pretrain.compare.sources import read_runs

    comparison = compare_runs(read_runs(arguments.runs), command=command, gate=read_gate(arguments.compare))
    return _publish(comparison, make_run_dir(arguments.run_dir, "compare"))


def train_and_compare(request: "Request", config: Config, command: str) -> int:
    """Trains the variants and compares what is finished; returns the exit code."""
    from gpt_pretrain.compare.answers import compare_runs
    from gpt_pretrain.compare.sources import read_run_dir
    from gpt_pretrain.compare.training import train_variants

    check_run_dir(config, "a comparison")
    run_dir = make_run_dir(config.run_dir, config.name)
    finished = train_variants(config, request.loader.source, request.overrides, run_dir, console_of_width(_WIDTH))
    variants = config.compare.variants
    code = 0 if len(finished) == len(variants) * config.compare.seeds else FAILED
    names = {run.variant for run in finished}
    if variants[0] not in names or len(names) == 1:
        sys.stdout.write(f"nothing to compare yet: {visible(variants[0])} and another variant have to be finished\n")
        return code
    runs = [replace(read_run_dir(run.run_dir), name=run.name, variant=run.variant, seed=run.seed) for run in finished]
    published = _publish(compare_runs(runs, command=command, gate=read_gate(config.compare)), run_dir)
    return code or published


def _publish(comparison: Comparison, directory: Path) -> int:
    """Prints and writes a comparison; returns 0, or 4 if the gate is missed."""
    from gpt_pretrain.compare.console import print_comparison
    from gpt_pretrain.compare.page import write_page

    print_comparison(comparison, console_of_width(_WIDTH))
    for write in (save_comparison, write_page):
        sys.stdout.write(f"written: {visible(str(write(comparison, directory)))}\n")
    return GATE_MISSED if comparison.gate is not None and comparison.gate.missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "gpt_pretrain.compare", *given])
    keys = {argument.lstrip("+-").partition("=")[0] for argument in given}
    # Also logs and directories without a key, and a slip in it, so that the message tells the key.
    if keys & {"runs", "run"} or (given and not any("=" in word or word.startswith("-") for word in given)):
        return run_with_arguments(__doc__, FinishedRuns, lambda each: compare_finished(each, command), given)
    from gpt_pretrain.compare.training import compare_problems

    def train(request: "Request", jobs: "Sequence[Job]", launch: Launch) -> int:
        return train_and_compare(request, jobs[0].config, command)

    def refuse(request: "Request", launch: Launch) -> None:
        refuse_launcher_and_sweep(request, launch, "a comparison", "compare.variants")
        if launchers := [word for word in request.overrides if word.lstrip("+").startswith("hydra/launcher=")]:
            problem = f"{launchers[0]}: a comparison trains its runs here, one after another"
            raise ConfigError([f"{problem}; train them as a sweep (-m), and compare them by runs=[…]"])

    return run_with_config(__doc__, train, given, rules=compare_problems, refuse=refuse, name="compare")


if __name__ == "__main__":
    raise SystemExit(main())
