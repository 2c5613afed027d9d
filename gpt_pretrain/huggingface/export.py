"""A checkpoint as a Hugging Face directory: weights in safetensors, config.json, generation_config.json, tokenizer.

    manifest → model's fields → class and config.json
    tensors of the checkpoint, layer by layer → names and layouts of `transformers` → files

Everything that can be refused is refused before the first byte is written, and the directory appears in one piece.

safetensors files are written here for one reason: `safetensors.torch.save_file` and `serialize_file` (0.8) take all
tensors of a file at once, a whole shard in memory, and an export holds one layer. The format can be streamed: eight
bytes with the length of a JSON header, the header with every tensor's type, shape and place, then the bytes
(github.com/huggingface/safetensors, "Format"). The index of several files is `transformers`' own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, SavedModel, open_checkpoint
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from gpt_pretrain.huggingface.architectures import Architecture, choose_architecture, to_hf_config
from gpt_pretrain.huggingface.arguments import ExportArguments, check_disk_space, check_new_directory, out_directory
from gpt_pretrain.huggingface.tensors import Rule, tensor_rules

# Types of weights without scales beside them, by the format's names.
WEIGHT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPE_NAMES = {dtype: name for name, dtype in WEIGHT_TYPES.items()}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The header ends at a multiple of this, so that a memory map of the tensors can be read as their type.
_ALIGNMENT = 8
# Room for config.json, the tokenizer's files and the index.
_SMALL_FILES_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    architecture: Architecture
    dtype: str
    """Of the weights, by torch's name; several where the checkpoint mixes them."""
    num_parameters: int
    num_bytes: int
    """Of the weights."""
    num_shards: int
    has_tokenizer: bool


def export_hf(arguments: ExportArguments) -> Exported:
    """Writes a checkpoint as a Hugging Face directory.

    Raises:
        UserError: The checkpoint is damaged, no class of `transformers` computes what the model does, the directory
            holds something already, the disk has no room, or a weight is too large for the type that is asked for.
    """
    if not arguments.max_shard_gib > 0:
        raise UserError(f"max_shard_gib={arguments.max_shard_gib} leaves no room for a tensor; use more than 0")
    out = Path(arguments.out).absolute()
    check_new_directory(out)
    saved = open_checkpoint(
        Path(arguments.checkpoint), None if arguments.tokenizer is None else Path(arguments.tokenizer)
    )
    architecture = choose_architecture(saved.config.model, arguments.architecture)
    tensors = CheckpointTensors(saved.path)
    rules = tensor_rules(saved.config.model, architecture)
    _check_tensors(saved, tensors, rules)
    asked: torch.dtype | None = None if arguments.dtype is None else getattr(torch, arguments.dtype.value)
    specs = [
        TensorSpec(name=name, shape=shape, dtype=asked or tensors.dtype(rule.key))
        for rule in rules
        for name, shape in rule.parts()
    ]
    num_bytes = sum(spec.num_bytes for spec in specs)
    check_disk_space(out, num_bytes + _SMALL_FILES_BYTES)
    saved.check_files()
    shards = plan_shards(specs, arguments.max_shard_gib * 2**30)
    config = to_hf_config(
        saved.config.model,
        architecture,
        # One for the whole model: the embedding's, where a checkpoint mixes them.
        torch_dtype=_torch_name(specs[0].dtype),
        end_token_id=None if saved.tokenizer is None else saved.tokenizer.eod,
    )

    def hf_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for rule in rules:
            yield from zip(rule.names, rule.conversion.to_hf(tensors.read(rule.key, rule.layer)), strict=True)

    with out_directory(out) as directory:
        write_shards(directory, shards, hf_tensors())
        write_json(directory / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
        if saved.tokenizer is not None:
            _write_tokenizer(directory, saved.tokenizer, saved.config.model.max_position_embeddings)
    return Exported(
        path=out,
        architecture=architecture,
        dtype=", ".join(sorted({_torch_name(spec.dtype) for spec in specs})),
        num_parameters=sum(prod(spec.shape) for spec in specs),
        num_bytes=num_bytes,
        num_shards=len(shards),
        has_tokenizer=saved.tokenizer is not None,
    )


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensors(saved: SavedModel, tensors: CheckpointTensors, rules: Sequence[Rule]) -> None:
    """Refuses a checkpoint that lacks a tensor of its manifest's model, or has one that would be left out."""
    expected = {
        rule.key: rule.shape if rule.layer is None else (saved.config.model.num_layers, *rule.shape) for rule in rules
    }
    problems = [f"lacks {key}" for key in expected if key not in tensors]
    problems += [f"has {key}" for key in tensors if key not in expected]
    problems += [
        f"has {key} as {list(tensors.shape(key))} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in tensors and tensors.shape(key) != shape
    ]
    if problems:
        raise UserError(f"{saved.path} does not hold the model that its manifest states: it {', '.join(problems)}")


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, max_length: int) -> None:
    tokenizer.save(directory / TOKENIZER_FILE)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eod_token,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def plan_shards(specs: Sequence[TensorSpec], max_bytes: float) -> dict[str, list[TensorSpec]]:
    """Which file holds which tensors: in order, each file as full as it may be; a larger tensor has its own file."""
    shards: list[list[TensorSpec]] = []
    room = 0.0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def write_shards(
    directory: Path, shards: Mapping[str, Sequence[TensorSpec]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Writes the files and, if there are several, their index; takes name and values one by one, in the plan's order.

    Raises:
        OSError: The disk does not take them.
        UserError: A finite value would be infinite in the type that it is written in.
    """
    stream = iter(tensors)
    for file_name, specs in shards.items():
        with (directory / file_name).open("wb") as file:
            file.write(_header(specs))
            for spec in specs:
                name, tensor = next(stream)
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), "tensors come in the order of the plan"
                converted = tensor.to(spec.dtype)
                if converted.dtype != tensor.dtype and (converted.isinf() & tensor.isfinite()).any():
                    raise UserError(
                        f"{name} has values up to {tensor.abs().max().item():.3g}, which {_torch_name(spec.dtype)} "
                        "does not reach; use dtype=bf16 or fp32"
                    )
                file.write(converted.contiguous().view(torch.uint8).numpy())
    if len(shards) > 1:
        total = sum(spec.num_bytes for specs in shards.values() for spec in specs)
        weight_map = {spec.name: file_name for file_name, specs in shards.items() for spec in specs}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file in the layout of `transformers`."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.num_bytes
        place = {"dtype": _TYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        entries[spec.name] = place
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
