"""Exports a checkpoint in Megatron-LM's distributed format, for its own loader in any layout of either kind of layers.

    out/latest_checkpointed_iteration.txt   "release": weights alone, from which iteration 0 starts
    out/release/                            .metadata, metadata.json, *.distcp, and common.pt for older versions

Tensors have the names of Transformer Engine's layers, which local ones share, but for the norm before experts. Layers
are stacked, as Megatron-LM stores them unless they differ from each other.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, PlannedTensor, open_checkpoint, write_weights
from gpt_pretrain.config.errors import ConfigError, shell_word, visible
from gpt_pretrain.extend.registry import registered_choice
from gpt_pretrain.huggingface.export import (
    check_average,
    check_disk_space,
    check_new_directory,
    check_shapes,
    convert,
    describe_weights_written,
    out_directory,
    read_mean,
)
from gpt_pretrain.megatron_lm.arguments import arguments_of, options_beside
from gpt_pretrain.megatron_lm.folder import COMMON, TRACKER
from gpt_pretrain.megatron_lm.tensors import ModelTensor, empty_extra_states, model_tensors

_FOLDER = "release"
# The index, and an object for each module.
_SMALL_BYTES = 64 * 1024 * 1024


def export_megatron(
    checkpoint: Path,
    out: Path,
    *,
    average: Sequence[Path],
    averaged: bool,
    dtype: str | None,
    tokenizer: Path | None,
) -> str:
    """Writes a checkpoint for Megatron-LM, and returns what the command prints of it; arguments as for `export_hf`.

    Raises:
        UserError: A checkpoint is damaged, Megatron-LM has no arguments for its model, checkpoints to average are not
            of one model, the directory is not empty, the disk has no space, or a weight is too large for the type.
    """
    out = out.absolute()
    check_new_directory(out)
    all_saved = [open_checkpoint(path, tokenizer) for path in (checkpoint, *average)]
    check_average(all_saved)
    saved, model = all_saved[0], all_saved[0].config.model
    if (own := registered_choice("layer", model.layer)) is not None:
        raise ConfigError([f"model.layer={model.layer.name}: Megatron-LM does not compute {own}"])
    if model.value_embedding_freq is not None:
        raise ConfigError([f"model.value_embedding_freq={model.value_embedding_freq}: Megatron-LM has none"])
    read = [CheckpointTensors(each.path, averaged=averaged) for each in all_saved]
    tensors = model_tensors(model)
    shapes = {each.key: each.shape if each.layer is None else (model.num_layers, *each.shape) for each in tensors}
    check_shapes(all_saved, read, shapes)
    types = {key: read[0].dtype(key) if dtype is None else getattr(torch, dtype) for key in shapes}

    def values(tensor: ModelTensor) -> torch.Tensor:
        return convert(tensor.key, read_mean(read, model, tensor.key, tensor.layer), types[tensor.key])

    planned = [
        PlannedTensor(
            key=each.key, layer=each.layer, shape=each.shape, dtype=types[each.key], load=partial(values, each)
        )
        for each in tensors
    ]
    num_bytes = sum(torch.Size(shape).numel() * types[key].itemsize for key, shape in shapes.items())
    check_disk_space(out, num_bytes + _SMALL_BYTES)
    for each in all_saved:
        each.check_files()
    main_type = types[tensors[0].key]
    common = {
        "args": arguments_of(model, main_type, str(saved.path)),
        "checkpoint_version": 3.0,
        "iteration": saved.manifest.step,
    }
    with out_directory(out) as directory:
        folder = directory / _FOLDER
        folder.mkdir()
        objects = empty_extra_states(model)
        write_weights(folder, planned, num_layers=model.num_layers, common=common, objects=objects)
        torch.save(common, folder / COMMON)
        (directory / TRACKER).write_text(_FOLDER, encoding="utf-8")
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    names = ", ".join(sorted({str(each).removeprefix("torch.") for each in types.values()}))
    return (
        f"written: {visible(str(out))}\n"
        f"  {num_parameters:,} parameters in {names}, {num_bytes:,} bytes\n"
        + describe_weights_written(len(read), averaged=averaged)
        + f"load with: --load {shell_word(str(out))} {' '.join(options_beside(model))}\n"
    )
