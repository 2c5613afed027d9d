"""A checkpoint as a Hugging Face directory: weights in safetensors, config.json, generation_config.json, tokenizer.

    manifest → model's fields → class and config.json
    tensors of the checkpoint, layer by layer → names and layouts of `transformers` → files

Everything that can be refused is refused before the first byte is written, and the directory appears in one piece.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, SavedModel, open_checkpoint
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from gpt_pretrain.huggingface.architectures import Architecture, choose_architecture, to_hf_config
from gpt_pretrain.huggingface.arguments import (
    ExportArguments,
    check_disk_space,
    check_new_directory,
    out_directory,
)
from gpt_pretrain.huggingface.tensors import Rule, tensor_rules
from gpt_pretrain.huggingface.weight_files import TensorSpec, plan_shards, write_json, write_shards

# What config.json, the tokenizer's files and the index may take beside the weights.
_SMALL_FILES_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    architecture: Architecture
    dtype: torch.dtype
    num_parameters: int
    num_bytes: int
    """Of the weights."""
    num_shards: int
    has_tokenizer: bool


def export_hf(arguments: ExportArguments) -> Exported:
    """Writes a checkpoint as a Hugging Face directory.

    Raises:
        UserError: The checkpoint is damaged, no class of `transformers` computes what the model does, the directory
            holds something already, or the disk has no room.
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
    dtype = tensors.dtype(rules[0].key) if arguments.dtype is None else getattr(torch, arguments.dtype.value)
    specs = [spec for rule in rules for spec in _specs(rule, dtype)]
    num_bytes = sum(spec.num_bytes for spec in specs)
    check_disk_space(out, num_bytes + _SMALL_FILES_BYTES)
    saved.check_files()
    shards = plan_shards(specs, arguments.max_shard_gib * 2**30)
    config = to_hf_config(
        saved.config.model,
        architecture,
        torch_dtype=str(dtype).removeprefix("torch."),
        end_token_id=None if saved.tokenizer is None else saved.tokenizer.eod,
    )
    with out_directory(out) as directory:
        write_shards(directory, shards, _hf_tensors(rules, tensors))
        write_json(directory / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
        if saved.tokenizer is not None:
            _write_tokenizer(directory, saved.tokenizer, saved.config.model.max_position_embeddings)
    return Exported(
        path=out,
        architecture=architecture,
        dtype=dtype,
        num_parameters=sum(math.prod(spec.shape) for spec in specs),
        num_bytes=num_bytes,
        num_shards=len(shards),
        has_tokenizer=saved.tokenizer is not None,
    )


def _check_tensors(saved: SavedModel, tensors: CheckpointTensors, rules: Sequence[Rule]) -> None:
    """Whether the checkpoint holds the model of its manifest: no tensor less, and none that would be left out."""
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


def _specs(rule: Rule, dtype: torch.dtype) -> Iterator[TensorSpec]:
    """Names and shapes of what a tensor becomes."""
    for name, part in zip(rule.names, rule.to_hf(torch.empty(rule.shape, device="meta")), strict=True):
        yield TensorSpec(name=name, shape=tuple(part.shape), dtype=dtype)


def _hf_tensors(rules: Sequence[Rule], tensors: CheckpointTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """What the files hold, read one tensor of the checkpoint after the other."""
    for rule in rules:
        yield from zip(rule.names, rule.to_hf(tensors.read(rule.key, rule.layer)), strict=True)


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
