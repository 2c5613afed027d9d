r"""gpt_pretrain.import_hf: a published model, for training it on.

It reads GPT-2, Llama, Mistral, Qwen2.5, Qwen3, Phi-4, Mixtral, Qwen3-MoE,
SmolLM 3, StarCoder 2 and GPT-NeoX models from a directory of transformers, and
writes a checkpoint of their weights with an experiment file that sets the model,
its tokenizer and checkpoint.init_from. It needs no GPU, and the memory of two tensors.

Exit codes: 0 written; 2 a mistake in what was given, or a model that would not
be the same here; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.import_hf path=mistral-7b-v0.3 out=start
    python -m gpt_pretrain --config-dir start experiment=imported data=text \
        'model.data.text_files=["corpus/*.jsonl"]'
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
    """A Hugging Face directory: config.json and safetensors, with or without a tokenizer.json."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""


def import_model(arguments: ImportArguments) -> None:
    """Imports, and prints what was written and how to train on."""
    with importing_torch():
        from gpt_pretrain.huggingface.import_hf import import_hf

    sys.stdout.write(import_hf(Path(arguments.path), Path(arguments.out)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, ImportArguments, import_model, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
