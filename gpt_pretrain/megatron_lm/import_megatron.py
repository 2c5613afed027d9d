"""Imports a distributed checkpoint of Megatron-LM or NeMo as a checkpoint of weights, like `huggingface.import_hf`."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.errors import visible
from gpt_pretrain.huggingface.export import check_new_directory
from gpt_pretrain.huggingface.import_hf import checked_config, how_to_continue, imported_fields, write_imported
from gpt_pretrain.megatron_lm.arguments import configure, fields_of
from gpt_pretrain.megatron_lm.folder import find_checkpoint, read_arguments
from gpt_pretrain.megatron_lm.stored import MegatronTensors


def import_megatron(source: Path, out: Path, overrides: Sequence[str]) -> str:
    """Writes a checkpoint with the same weights to the bit, and returns what the command prints.

    Raises:
        UserError: It is no such checkpoint, is damaged, or does not hold the model that its arguments or `overrides`
            describe.
    """
    source, out = source.absolute(), out.absolute()
    check_new_directory(out)
    folder = find_checkpoint(source)
    tensors = MegatronTensors(folder)
    # NeMo keeps no arguments, and what it keeps instead is not opened.
    arguments = None if tensors.prefix else read_arguments(folder, in_index=tensors.has_common_state)
    fields = None if arguments is None else fields_of(arguments, str(folder))
    config = configure(fields, overrides, tensors.num_rows, str(folder))
    config = checked_config(config, out, None, Precision.fp32 if torch.float32 in tensors.types else Precision.bf16)
    planned = tensors.plan(config.model)
    write_imported(out, planned, config, imported_fields(config), source=source)
    num_parameters = sum(math.prod(tensor.shape) for tensor in planned)
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in tensors.types))
    left = "".join(f"  not taken, {each}\n" for each in tensors.not_taken)
    unchecked = "  without Megatron-LM's arguments only shapes were compared\n" if fields is None else ""
    return (
        f"written: {visible(str(out))}\n"
        f"  {num_parameters:,} parameters in {names}, of {visible(str(folder))}\n"
        f"{left}{unchecked}{how_to_continue(out)}"
        "  it has no tokenizer: give model.tokenizer, or data of token ids\n"
    )
