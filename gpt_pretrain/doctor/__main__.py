"""gpt_pretrain.doctor: whether training works here, whether FP8 does, and the
commands that fix what does not.

Exit codes: 0 both work; 3 training alone; 1 neither; 2 a wrong argument;
130 Ctrl-C.

Examples:
    python -m gpt_pretrain.doctor
    python -m gpt_pretrain.doctor --json
    python -m gpt_pretrain.doctor --assume-gpu h200
"""  # noqa: D205

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpt_pretrain.commands.command import run_with_arguments
from gpt_pretrain.config.choices import PlanGpu
from gpt_pretrain.doctor.facts import Gpu
from gpt_pretrain.doctor.probe import examine
from gpt_pretrain.doctor.verdict import doctor_document, give_verdict
from gpt_pretrain.run.gpus import GPUS


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorArguments:
    """Arguments of the command."""

    json: bool = False
    """Print the facts and the verdict as a JSON object."""
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
    as_json = arguments.json
    if not as_json:
        try:
            from gpt_pretrain.doctor.console import WIDTH, print_verdict
            from gpt_pretrain.report.console import console_of_width
        except ModuleNotFoundError as error:
            # The library that draws the tables may be missing as well.
            sys.stderr.write(f"error: {error}; the verdict as JSON:\n")
            as_json = True
        else:
            print_verdict(facts, verdict, console_of_width(WIDTH, at_most=WIDTH))
    if as_json:
        sys.stdout.write(json.dumps(doctor_document(facts, verdict), indent=2, ensure_ascii=False) + "\n")
    return verdict.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, DoctorArguments, diagnose, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
