r"""gpt_pretrain.import_torchtitan: a Llama 3 of torchtitan, for training it on.

It reads the weights of a distributed checkpoint that any layout has saved, and
writes a checkpoint of ours with an experiment file that sets the model and
checkpoint.init_from. Nothing in the checkpoint runs. It needs no GPU, and the
memory of two tensors. Other models come in as torchtitan saves them for
transformers, by import_hf.

Exit codes: 0 written; 2 a mistake in what was given, a damaged checkpoint, or
another model; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.import_torchtitan path=outputs/checkpoint/step-1000 \
        out=start overrides=[model=llama3_8b]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.commands.command import importing_torch, run_with_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """What the command takes."""

    path: str
    """A checkpoint's folder, step-…."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""
    overrides: list[str]
    """What describes the model, as a run takes it: [experiment=mine], [model=llama3_8b]."""


def import_model(arguments: ImportArguments) -> None:
    """Imports, and prints what was written and how to train on."""
    with importing_torch():
        from gpt_pretrain.huggingface.torchtitan import import_torchtitan

    sys.stdout.write(import_torchtitan(Path(arguments.path), Path(arguments.out), arguments.overrides))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, ImportArguments, import_model, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
