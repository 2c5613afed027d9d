r"""gpt_pretrain.import_megatron: a checkpoint of Megatron-LM or NeMo, for training it on.

It reads the weights of a distributed checkpoint (torch_dist) of a GPT model that
any parallel layout has saved, and writes a checkpoint of ours with an experiment
file that sets the model and checkpoint.init_from. Nothing in the checkpoint runs.
It needs no GPU, and the memory of two tensors.

Megatron-LM keeps its arguments in a checkpoint, and they describe the model. NeMo
does not: there overrides names what describes it, as a run takes it.

Exit codes: 0 written; 2 a mistake in what was given, a damaged checkpoint, or a
model that would not be the same here; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.import_megatron path=checkpoints/iter_0010000 out=start
    python -m gpt_pretrain.import_megatron path=nemo/llama3_8b out=start \
        overrides=[model=llama3_8b]
    python -m gpt_pretrain --config-dir start experiment=imported data=mmap …
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt_pretrain.commands.command import importing_torch, run_with_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """What the command takes."""

    path: str
    """A checkpoint's folder: iter_…, the one above it, or NeMo's with weights/ in it."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""
    overrides: list[str] = field(default_factory=list)
    """What describes the model, as a run takes it: [experiment=mine], [model=llama3_8b,model.vocab_size=128256]; needed
    if the checkpoint has no arguments of Megatron-LM, otherwise compared with them."""


def import_model(arguments: ImportArguments) -> None:
    """Imports, and prints what was written and how to train on."""
    with importing_torch():
        from gpt_pretrain.megatron_lm.import_megatron import import_megatron

    sys.stdout.write(import_megatron(Path(arguments.path), Path(arguments.out), arguments.overrides))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, ImportArguments, import_model, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
