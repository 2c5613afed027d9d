"""`python -m gpt_pretrain.generate checkpoint=… prompt=…`: text from a checkpoint."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parents[1]:
    # Started in this folder: Python would take our megatron/ for megatron-core's.
    sys.stderr.write("error: start python -m gpt_pretrain.generate … from outside of the folder gpt_pretrain/\n")
    sys.exit(2)

from gpt_pretrain.config.arguments import run_command
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.generate.arguments import PROGRAM, GenerateArguments, check_values


def generate(arguments: GenerateArguments) -> None:
    """Prints the prompt with each of its continuations, as soon as it is there."""
    check_values(arguments)
    launch = read_launch()
    if launch.world_size > 1:
        raise UserError(f"{launch.launcher} started {launch.world_size} processes, and generating takes one")
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    from gpt_pretrain.generate.text import continuations

    for number, text in enumerate(continuations(arguments)):
        if arguments.num_samples > 1:
            sys.stdout.write(f"--- sample {number + 1} of {arguments.num_samples}\n")
        sys.stdout.write(f"{arguments.prompt}{text}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.generate`; `sys.argv` when not given.
    """
    return run_command(generate, GenerateArguments, sys.argv[1:] if arguments is None else arguments, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
