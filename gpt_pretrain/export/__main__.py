"""`python -m gpt_pretrain.export checkpoint=… out=…`: a checkpoint as a directory that other programs load."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parents[1]:
    # Started in this folder: Python would take our megatron/ for megatron-core's.
    sys.stderr.write("error: start python -m gpt_pretrain.export … from outside of the folder gpt_pretrain/\n")
    sys.exit(2)

from gpt_pretrain.config.arguments import run_command
from gpt_pretrain.export.arguments import PROGRAM, ExportArguments


def export(arguments: ExportArguments) -> None:
    """Exports, and tells what was written."""
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    from gpt_pretrain.export.hf import export_hf

    done = export_hf(arguments)
    files = "1 file" if done.num_shards == 1 else f"{done.num_shards} files"
    dtype = str(done.dtype).removeprefix("torch.")
    sys.stdout.write(
        f"written: {done.path}\n"
        f"  {done.architecture.value}, {done.num_parameters:,} parameters in {dtype}, "
        f"{done.num_bytes:,} bytes in {files}\n"
    )
    if not done.has_tokenizer:
        sys.stdout.write("  no tokenizer: the checkpoint is of a model without one\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.export`; `sys.argv` when not given.
    """
    return run_command(export, ExportArguments, sys.argv[1:] if arguments is None else arguments, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
