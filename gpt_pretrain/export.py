"""gpt_pretrain.export: a checkpoint as a directory that transformers loads.

It reads GPT-2, Llama, Mistral, Qwen2.5, Qwen3, Phi-4, Mixtral and Qwen3-MoE
models from checkpoints of any parallel layout, on any machine, with the memory
of one layer. Every file of the checkpoint is checked against its SHA-256 first.

Exit codes: 0 written; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.export checkpoint=outputs/mine/checkpoints/step_00000300 out=mine-hf
    python -m gpt_pretrain.export checkpoint=… out=mine-hf dtype=bf16
"""

import sys
from collections.abc import Sequence

from gpt_pretrain.commands.door import importing_torch, run_with_arguments
from gpt_pretrain.huggingface.arguments import ExportArguments


def export(arguments: ExportArguments) -> None:
    """Exports, and tells what was written."""
    with importing_torch():
        from gpt_pretrain.huggingface.export import export_hf

    done = export_hf(arguments)
    files = "1 file" if done.num_shards == 1 else f"{done.num_shards} files"
    sys.stdout.write(
        f"written: {done.path}\n"
        f"  {done.architecture.value}, {done.num_parameters:,} parameters in {done.dtype}, "
        f"{done.num_bytes:,} bytes in {files}\n"
    )
    if not done.has_tokenizer:
        sys.stdout.write("  no tokenizer: the checkpoint is of a model without one\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, ExportArguments, export, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
