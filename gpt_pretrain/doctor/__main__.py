"""gpt_pretrain.doctor: whether training works here, whether FP8 does, and the
commands that fix what does not.

Exit codes: 0 both work; 3 training alone; 1 neither; 2 a wrong argument;
130 Ctrl-C.

Examples:
    python -m gpt_pretrain.doctor
    python -m gpt_pretrain.doctor --assume-gpu h200
"""  # noqa: D205

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpt_pretrain.commands.command import run_with_arguments
from gpt_pretrain.config.choices import PlanGpu
from gpt_pretrain.config.errors import visible
from gpt_pretrain.doctor.answer import answer_lines
from gpt_pretrain.doctor.facts import Gpu
from gpt_pretrain.doctor.probe import examine
from gpt_pretrain.doctor.verdict import give_verdict
from gpt_pretrain.run.gpus import GPUS


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorArguments:
    """Arguments of the command."""

    assume_gpu: PlanGpu | None = None
    """Judge the libraries as if this GPU were there: on a login node, or while an image is built. null: as it is."""


def diagnose(arguments: DoctorArguments) -> int:
    """Examines this machine, prints the verdict and returns its exit code."""
    gpu = None
    if arguments.assume_gpu is not None:
        sheet = GPUS[arguments.assume_gpu]
        gpu = Gpu(name=sheet.name, compute_capability=sheet.compute_capability, memory_gib=sheet.memory_gib)
    facts = examine(gpu)
    verdict = give_verdict(facts)
    # Libraries' errors must not control the terminal.
    sys.stdout.write("".join(f"{visible(line)}\n" for line in answer_lines(facts, verdict)))
    return verdict.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, DoctorArguments, diagnose, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
