r"""gpt_pretrain.compare: does one setting train as well as another, and how much
sooner does it reach the same loss?

runs=[…] names finished or running runs: our run directories, or a folder of
them such as a sweep's, the output of Megatron-LM or torchtitan, and
TensorBoard's event files. The first is the baseline. Our runs that differ only
in model.seed are one variant.

It prints a table and a verdict on each variant, and writes compare.json and
compare.html to run_dir.

Exit codes: 0 compared; 4 compare.max_loss_gap or compare.min_speedup is missed,
or cannot be shown; 2 a mistake in what was given; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain -m experiment=gpt2_124m_1gpu fp8=none,delayed \
        model.seed=1,2,3 hydra.sweep.dir=outputs/fp8
    python -m gpt_pretrain.compare runs=[outputs/fp8]
    python -m gpt_pretrain.compare runs=[outputs/a,megatron.log,tb_events]
    python -m gpt_pretrain.compare runs=[outputs/bf16,outputs/fp8] \
        compare.max_loss_gap=0.5% compare.min_speedup=1.2
"""  # noqa: D205

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpt_pretrain.commands.command import run_with_arguments
from gpt_pretrain.compare.answers import Demands, compare_runs, gate_problems, read_gate
from gpt_pretrain.compare.comparison import save_comparison
from gpt_pretrain.compare.console import print_comparison
from gpt_pretrain.compare.page import write_page
from gpt_pretrain.compare.sources import read_runs
from gpt_pretrain.config.errors import ConfigError, visible
from gpt_pretrain.launch.run_dir import check_contents, make_run_dir
from gpt_pretrain.report.console import console_of_width

GATE_MISSED = 4
# Of a line in a log; a terminal has its own width.
_WIDTH = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRuns:
    """The command's arguments."""

    runs: list[str]
    """Directories of runs, folders of such, and logs; the first is the baseline."""
    run_dir: str | None = None
    """Where compare.json and compare.html go; null: outputs/DATE/TIME_compare."""
    compare: Demands = field(default_factory=Demands)


def compare_finished(arguments: FinishedRuns, command: str) -> int:
    """Reads runs, compares them, prints and writes it; returns the exit code."""
    problems = [*gate_problems(arguments.compare)]
    if not arguments.runs:
        problems.append("runs=[] compares nothing; give directories of runs, or logs: runs=[outputs/a,outputs/b]")
    if problems:
        raise ConfigError(problems)
    if arguments.run_dir is not None:
        check_contents(arguments.run_dir, "a comparison")
    comparison = compare_runs(read_runs(arguments.runs), command=command, gate=read_gate(arguments.compare))
    directory = make_run_dir(arguments.run_dir, "compare")
    print_comparison(comparison, console_of_width(_WIDTH))
    for write in (save_comparison, write_page):
        sys.stdout.write(f"written: {visible(str(write(comparison, directory)))}\n")
    return GATE_MISSED if comparison.gate is not None and comparison.gate.missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "gpt_pretrain.compare", *given])
    return run_with_arguments(__doc__, FinishedRuns, lambda each: compare_finished(each, command), given)


if __name__ == "__main__":
    raise SystemExit(main())
