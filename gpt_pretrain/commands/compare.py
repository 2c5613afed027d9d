"""`python -m gpt_pretrain.compare`: does one setting train as well as another, and how much sooner does it get there?

runs=[…]   finished runs and logs → records → answers → table, compare.json; no configuration, no torch
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpt_pretrain.commands.arguments import Program
from gpt_pretrain.commands.door import run_with_arguments
from gpt_pretrain.compare.gate import Demands, gate_problems
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import GateConfig
from gpt_pretrain.launch.run_dir import make_directory

GATE_MISSED = 4

PROGRAM = Program(
    about="""\
gpt_pretrain.compare: does one setting train as well as another, and how much
sooner does it reach the same loss?

runs=[…] reads finished or running runs: directories of ours, the output of
Megatron-LM, NeMo or torchtitan, TensorBoard's event files, and tables that W&B
or MLflow exported. The first is the baseline. It prints a table and a verdict
on each other variant, and writes compare.json into run_dir.

Exit codes: 0 compared; 4 compare.max_loss_gap or compare.min_speedup is missed,
or cannot be shown; 2 a mistake in what was given; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.compare runs=[outputs/bf16,outputs/fp8]
python -m gpt_pretrain.compare runs=[outputs/a,megatron.log,wandb-export.csv]
python -m gpt_pretrain.compare runs=[outputs/bf16,outputs/fp8] \\
    compare.max_loss_gap=0.5% compare.min_speedup=1.2""",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRuns:
    """What the command takes where it trains nothing."""

    runs: list[str]
    """Directories of runs, and logs; the first is the baseline."""
    run_dir: str | None = None
    """Where compare.json goes; null: outputs/DATE/TIME_compare."""
    compare: GateConfig = field(default_factory=lambda: GateConfig(max_loss_gap=None, min_speedup=None))


def compare_finished(arguments: FinishedRuns, command: str) -> int:
    """Reads runs and compares them; returns the exit code."""
    from rich.console import Console

    from gpt_pretrain.compare.answers import compare_runs
    from gpt_pretrain.compare.console import WIDTH, print_comparison
    from gpt_pretrain.compare.document import save_comparison
    from gpt_pretrain.compare.sources import read_runs

    problems = [*gate_problems(arguments.compare)]
    if len(arguments.runs) < 1:
        problems.append("runs=[] compares nothing; give directories of runs, or logs: runs=[outputs/a,outputs/b]")
    if problems:
        raise ConfigError(problems)
    comparison = compare_runs(read_runs(arguments.runs), command=command, demands=Demands.read(arguments.compare))
    run_dir = make_directory(arguments.run_dir, "compare")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    print_comparison(comparison, console)
    sys.stdout.write(f"written: {save_comparison(comparison, run_dir)}\n")
    return GATE_MISSED if comparison.gate is not None and comparison.gate.missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "gpt_pretrain.compare", *given])
    return run_with_arguments(PROGRAM, FinishedRuns, lambda each: compare_finished(each, command), given)
