"""`python -m gpt_pretrain.doctor`: would training work here, would FP8, and what mends what does not.

    probes, a process each → facts → findings and verdict → tables, or JSON

Exit codes, for scripts and images:

      0  training works, and in FP8, too
      3  training works (on a GPU, or without one on the CPU), FP8 does not; it can be emulated
      1  training does not work
      2  a mistake in what was given
    130  Ctrl-C

`--assume-gpu h200` judges the libraries as if that GPU were there: on a login node, or while an image is built.
"""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  the doctor is asked by those who did not install it
    sys.stderr.write(
        f"error: this is Python {sys.version.split()[0]}, and gpt_pretrain needs 3.12 or newer; "
        "make install PYTHON=/path/to/python3.12\n"
    )
    sys.exit(1)

import argparse
import json
from collections.abc import Sequence

from gpt_pretrain.commands.door import INTERRUPTED
from gpt_pretrain.config.choices import PlanGpu
from gpt_pretrain.doctor.examination import examine
from gpt_pretrain.doctor.verdict import doctor_document, give_verdict
from gpt_pretrain.plan.hardware import GPUS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt_pretrain.doctor",
        description="Says whether training, and training in FP8, would work here, and what mends what does not.",
        epilog="Exit codes: 0 both work; 3 training alone; 1 neither; 2 a wrong argument; 130 Ctrl-C.",
    )
    parser.add_argument("--json", action="store_true", help="print the facts and the verdict as a JSON object")
    parser.add_argument(
        "--assume-gpu",
        choices=[gpu.name for gpu in PlanGpu],
        help="judge the libraries as if this GPU were there: on a login node, or while an image is built",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.doctor`; `sys.argv` when not given.
    """
    chosen = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        facts = examine(None if chosen.assume_gpu is None else GPUS[PlanGpu[chosen.assume_gpu]])
    except KeyboardInterrupt:
        return INTERRUPTED
    verdict = give_verdict(facts)
    if not chosen.json:
        try:
            from gpt_pretrain.doctor.console import print_verdict
        except ModuleNotFoundError as error:
            # What draws the tables is one of the things that may be missing.
            sys.stderr.write(f"error: {error}; the verdict as JSON:\n")
            chosen.json = True
        else:
            print_verdict(facts, verdict)
    if chosen.json:
        sys.stdout.write(json.dumps(doctor_document(facts, verdict), indent=2, ensure_ascii=False) + "\n")
    return verdict.exit_code
