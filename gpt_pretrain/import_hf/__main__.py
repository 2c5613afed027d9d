"""`python -m gpt_pretrain.import_hf path=… out=…`: a published model as a checkpoint that training starts from."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parents[1]:
    # Started in this folder: Python would take our megatron/ for megatron-core's.
    sys.stderr.write("error: start python -m gpt_pretrain.import_hf … from outside of the folder gpt_pretrain/\n")
    sys.exit(2)

from gpt_pretrain.config.arguments import run_command
from gpt_pretrain.import_hf.arguments import PROGRAM, ImportArguments


def import_model(arguments: ImportArguments) -> None:
    """Imports, and tells what was written and how to go on."""
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    from gpt_pretrain.import_hf.hf import EXPERIMENT, import_hf

    done = import_hf(arguments)
    sys.stdout.write(
        f"written: {done.path}\n"
        f"  {done.architecture.value}, {done.num_parameters:,} parameters in {done.dtype}\n"
        f"go on with: python -m gpt_pretrain --config-dir {done.path} experiment={EXPERIMENT} data=…\n"
    )
    if not done.has_tokenizer:
        sys.stdout.write("  no tokenizer.json was there: give model.tokenizer, or data of token ids\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.import_hf`; `sys.argv` when not given.
    """
    return run_command(import_model, ImportArguments, sys.argv[1:] if arguments is None else arguments, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
