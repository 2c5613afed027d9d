"""Exports a checkpoint as a Hugging Face directory: weights in safetensors, config.json, tokenizer.

    manifest → model's fields → class and config.json
    tensors of the checkpoint, layer by layer → names and layouts of `transformers` → files

Everything that can be refused is refused before the first byte is written, and the directory appears in one piece.

safetensors files are written here because `safetensors.torch.save_file` and `serialize_file` (0.8) need all tensors of
a file in memory, and an export holds one layer. The format can be streamed: eight bytes with the length of a JSON
header, the header with the type, shape and place of every tensor, then the bytes (github.com/huggingface/safetensors,
"Format"). The index of several files is that of `transformers`.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, SavedModel, open_checkpoint
from gpt_pretrain.checkpoint.state import describe_weights
from gpt_pretrain.config.errors import UserError, counted, visible
from gpt_pretrain.config.files import new_directory
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE
from gpt_pretrain.features.mup import without_multipliers
from gpt_pretrain.huggingface.architectures import Architecture, choose_architecture
from gpt_pretrain.huggingface.config_json import to_hf_config
from gpt_pretrain.huggingface.tensors import differences, tensor_rules
from gpt_pretrain.launch.run_dir import nearest_existing

# Types of weights without scales beside them, by the format's names.
WEIGHT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPE_NAMES = {dtype: name for name, dtype in WEIGHT_TYPES.items()}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The header ends at a multiple of this, so that a memory map of the tensors can be read as their type.
_ALIGNMENT = 8
# Space for config.json, the tokenizer's files and the index.
_SMALL_FILES_BYTES = 64 * 1024 * 1024

# A file's tensors by name, as meta tensors.
type _Shard = dict[str, torch.Tensor]


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    average: Sequence[Path] = (),
    averaged: bool = False,
    dtype: str | None = None,
    architecture: Architecture | None = None,
    tokenizer: Path | None = None,
    max_shard_gib: float,
) -> str:
    """Writes a checkpoint as a Hugging Face directory, and returns what the command prints of it.

    `python -m gpt_pretrain.export --help` explains the arguments; `dtype` is torch's name, and `averaged` asks for the
    weights averaged over steps.

    Raises:
        UserError: A checkpoint is damaged, no class of `transformers` computes what the model does, checkpoints to
            average are not of one model, the directory is not empty, the disk has no space, or a weight is too large
            for the requested type.
    """
    if not max_shard_gib > 0:
        raise UserError(f"max_shard_gib={max_shard_gib} leaves no room for a tensor; use more than 0")
    out = out.absolute()
    check_new_directory(out)
    saved = open_checkpoint(checkpoint, tokenizer)
    model = saved.config.model
    architecture = choose_architecture(model, architecture)
    all_saved = [saved, *(open_checkpoint(path, tokenizer) for path in average)]
    check_average(all_saved)
    read = [CheckpointTensors(each.path, averaged=averaged) for each in all_saved]
    rules = tensor_rules(model, architecture)
    expected = {rule.key: rule.shape if rule.layer is None else (model.num_layers, *rule.shape) for rule in rules}
    check_shapes(all_saved, read, expected)
    parts: _Shard = {}
    for rule in rules:
        parts |= rule.parts(read[0].dtype(rule.key) if dtype is None else getattr(torch, dtype))
    num_bytes = sum(part.nbytes for part in parts.values())
    check_disk_space(out, num_bytes + _SMALL_FILES_BYTES)
    for each in all_saved:
        each.check_files()
    shards = _plan_shards(parts, max_shard_gib * 2**30)
    config = to_hf_config(
        model,
        architecture,
        # The file has one type for the whole model: the embedding's, where a checkpoint mixes types.
        torch_dtype=_torch_name(next(iter(parts.values()))),
        end_token_id=None if saved.tokenizer is None else saved.tokenizer.eod,
    )

    def hf_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for rule in rules:
            values = read_mean(read, model, rule.key, rule.layer)
            yield from zip(rule.names, rule.conversion.to_hf(values), strict=True)

    with out_directory(out) as directory:
        _write_shards(directory, shards, hf_tensors())
        _write_json(directory / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        _write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
        if saved.tokenizer is not None:
            saved.tokenizer.save(directory / TOKENIZER_FILE)
            tokenizer_config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": saved.tokenizer.eod_token,
                "model_max_length": model.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
            }
            _write_json(directory / "tokenizer_config.json", tokenizer_config)
    types = ", ".join(sorted({_torch_name(part) for part in parts.values()}))
    num_parameters = sum(part.numel() for part in parts.values())
    return (
        f"written: {visible(str(out))}\n"
        f"  {architecture.value}, {num_parameters:,} parameters in {types}, {num_bytes:,} bytes in "
        f"{counted(len(shards), 'file')}\n"
        + describe_weights_written(len(read), averaged=averaged)
        + ("  no tokenizer: the checkpoint's model has none\n" if saved.tokenizer is None else "")
    )


def check_shapes(
    saved: Sequence[SavedModel], read: Sequence[CheckpointTensors], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses checkpoints whose tensors are not those of their model, by key."""
    for each, tensors in zip(saved, read, strict=True):
        if problems := differences(expected, {key: tensors.shape(key) for key in tensors}):
            raise UserError(f"{each.path} does not hold the model that its manifest states: it {', '.join(problems)}")


def describe_weights_written(num_checkpoints: int, *, averaged: bool) -> str:
    """Lines that say which weights were written, if not those of one checkpoint."""
    return ("  weights: averaged over steps\n" if averaged else "") + (
        f"  weights: the mean of {num_checkpoints} checkpoints\n" if num_checkpoints > 1 else ""
    )


def check_average(saved: Sequence[SavedModel]) -> None:
    """Raises a UserError unless checkpoints are different ones of the same model and tokenizer."""
    first, *others = saved
    paths = [each.path.resolve() for each in saved]
    by_schema = [path for path, key in schema_keys().items() if key.facts.identity == "model"]
    of_model = sorted({*by_schema}.union(*(describe_weights(each.config.model) for each in saved)))
    for each in others:
        if paths.count(each.path.resolve()) > 1:
            raise UserError(f"average=[…]: {each.path} is named twice, or is the checkpoint itself; name others")
        if each.manifest.data.get("tokenizer") != first.manifest.data.get("tokenizer"):
            raise UserError(f"average=[…]: {each.path} has another tokenizer than {first.path}; give those of one run")
        if differing := [key for key in of_model if value_of(each.config, key) != value_of(first.config, key)]:
            raise UserError(
                f"average=[…]: {each.path} has another {', '.join(differing)} than {first.path}; give checkpoints of "
                "one model"
            )


def read_mean(
    checkpoints: Sequence[CheckpointTensors], model: ModelConfig, key: str, layer: int | None
) -> torch.Tensor:
    """The mean of a tensor, or of one layer of it, for a model without muP's multipliers; two are in memory."""
    values = checkpoints[0].read(key, layer)
    if len(checkpoints) > 1:
        values = sum((each.read(key, layer).double() for each in checkpoints[1:]), values.double())
        values = (values / len(checkpoints)).float()
    return without_multipliers(model, key, values)


def convert(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in another type; a UserError if a value is beyond it."""
    converted = tensor.to(dtype)
    if converted.dtype != tensor.dtype and (converted.isinf() & tensor.isfinite()).any():
        raise UserError(
            f"{name} has values up to {tensor.abs().max().item():.3g}, which {_torch_name(converted)} cannot "
            "represent; use dtype=bf16 or fp32"
        )
    return converted


def _torch_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plan_shards(parts: _Shard, max_bytes: float) -> dict[str, _Shard]:
    """Assigns tensors to files in order, and fills each file; a tensor larger than a file gets its own."""
    shards: list[_Shard] = []
    space = 0.0
    for name, part in parts.items():
        if not shards or part.nbytes > space:
            shards.append({})
            space = max_bytes
        shards[-1][name] = part
        space -= part.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _write_shards(directory: Path, shards: Mapping[str, _Shard], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes the files, and their index if there are several; `tensors` come one by one in the order of the shards."""
    stream = iter(tensors)
    for file_name, shard in shards.items():
        with (directory / file_name).open("wb") as file:
            file.write(_header(shard))
            for planned_name, planned in shard.items():
                name, tensor = next(stream)
                assert (name, tensor.shape) == (planned_name, planned.shape), "tensors come in the order of the plan"
                file.write(convert(name, tensor, planned.dtype).contiguous().view(torch.uint8).numpy())
    if len(shards) > 1:
        total = sum(part.nbytes for shard in shards.values() for part in shard.values())
        weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _header(shard: _Shard) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, part in shard.items():
        begin, end = end, end + part.nbytes
        entries[name] = {"dtype": _TYPE_NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_new_directory(path: Path) -> None:
    """Raises a UserError where the command cannot make a new directory."""
    if path.is_symlink():
        raise UserError(f"out={path} is a link, which the finished directory would replace; give its target")
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"out={path} exists and is not empty; nothing is overwritten: give another directory")
    elif os.path.lexists(path):
        raise UserError(f"out={path} is a file; give a directory that does not exist yet")
    parent = nearest_existing(path.parent)
    if not parent.is_dir():
        raise UserError(f"out={path} cannot be made: {parent} is a file")


def check_disk_space(path: Path, num_bytes: int) -> None:
    """Raises a UserError if the disk has less space than needed."""
    free = shutil.disk_usage(nearest_existing(path.parent)).free
    if free < num_bytes:
        raise UserError(f"out={path} needs {num_bytes:,} bytes, and its disk has {free:,} free; give another place")


@contextmanager
def out_directory(path: Path) -> Iterator[Path]:
    """Makes a directory in one piece (`config.files.new_directory`), or raises a UserError."""
    try:
        with new_directory(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror or error}; nothing is left there") from error
