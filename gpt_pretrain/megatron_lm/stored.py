"""The weights in a distributed checkpoint of Megatron-LM or NeMo, as tensors of a checkpoint of ours.

Our keys (`tensors`) are megatron-core's. Others store the same values otherwise:

    module.embedding.word_embeddings.weight              a prefix (NeMo)
    decoder.layers.3.mlp.linear_fc2.weight               one by one (non_homogeneous_layers, moe_layer_freq)
    decoder.layers.input_layernorm.weight                norms as modules of their own (older local layers)
    decoder.layers.3.mlp.linear_fc1.weight_w, …weight_v  a gated MLP's halves (singleton_local_shards)
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.…  experts one by one, likewise
    embedding.word_embeddings.weight                     padded to other numbers of rows
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, PlannedTensor
from gpt_pretrain.checkpoint.state import COMMON_STATE, EXTRA_STATE
from gpt_pretrain.config.errors import UserError, counted
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.huggingface.export import WEIGHT_TYPES
from gpt_pretrain.huggingface.tensors import pad_vocabulary
from gpt_pretrain.megatron_lm.tensors import EMBEDDING, HEAD, ModelTensor, model_tensors

_COMMON_KEY = ShardedObject(COMMON_STATE, None, (1,), (0,)).unique_key
_PREFIXES = ("", "module.", "model.")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(\d+)\.(.+)")
_HALVES = ("w", "v")
_HALF = re.compile(r"(.+\.(?:weight|bias))_([wv])")
_PROBLEMS_SHOWN = 20

# The stored keys of one tensor of ours, by expert and half where these are apart.
type _Parts = dict[tuple[int | None, str | None], str]
# By our key, and the layer if layers are stored one by one.
type _Groups = Mapping[tuple[str, int | None], _Parts]


def _place(name: str, *, has_experts: bool) -> tuple[tuple[str, int | None], tuple[int | None, str | None]]:
    """Where a stored tensor belongs (its group, and its part of that), by its name without a prefix."""
    layer = expert = half = None
    if match := _HALF.fullmatch(name):
        name, half = match.groups()
    if match := _LAYER.fullmatch(name):
        layer, inside = match.groups()
        if found := _EXPERT.fullmatch(inside):
            expert, rest = found.groups()
            inside = f"mlp.experts.experts.{rest}"
        inside = re.sub(r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_", inside)
        # megatron-core's local layers have the first name before experts, too.
        norms = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        other, ours = norms if has_experts else norms[::-1]
        name = f"decoder.layers.{re.sub(rf'^{re.escape(other)}', ours, inside)}"
    return (name, None if layer is None else int(layer)), (None if expert is None else int(expert), half)


class MegatronTensors:
    """The model's tensors in a checkpoint of Megatron-LM or NeMo.

    Raises:
        UserError: The index cannot be read, or holds no GPT model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored = CheckpointTensors(folder)
        keys = set(self._stored)
        prefixes = [prefix for prefix in _PREFIXES if f"{prefix}{EMBEDDING}" in keys]
        if not prefixes:
            shown = ", ".join(sorted(keys)[:5]) or "no tensors"
            raise UserError(
                f"{folder} holds no GPT model: it has no {EMBEDDING}, with or without module. or model. before it, but "
                f"{shown}"
            )
        self.prefix = prefixes[0]
        """What stands before every name: nothing in Megatron-LM's."""
        self.has_common_state = _COMMON_KEY in self._stored.others
        self.num_rows = self._stored.shape(f"{self.prefix}{EMBEDDING}")[0]
        """Of the embedding: the padded vocabulary."""
        self.types = {self._stored.dtype(key) for key in keys}

    @property
    def not_taken(self) -> list[str]:
        """What is left behind, for the user."""
        others = self._stored.others - {_COMMON_KEY}
        scales = {key for key in others if EXTRA_STATE in key}
        kinds = {"FP8 state (_extra_state)": scales, "states of optimizer, schedule and generators": others - scales}
        return [f"{what}: {counted(len(keys), 'key')}" for what, keys in kinds.items() if keys]

    def plan(self, model: ModelConfig) -> list[PlannedTensor]:
        """The tensors of a model as a checkpoint of ours has them, each to be read when it is written.

        Raises:
            UserError: Tensors are missing, are left over, or have another shape or a type that weights do not have.
        """
        groups = self._groups(has_experts=model.num_moe_experts is not None)
        planned, problems, used = list[PlannedTensor](), list[str](), set[tuple[str, int | None]]()
        for tensor in model_tensors(model):
            group = (tensor.key, tensor.layer)
            is_stacked = group not in groups and tensor.layer is not None
            group = (tensor.key, None) if is_stacked else group
            if group not in groups:
                problems.append(f"lacks {tensor.key}")
                continue
            used.add(group)
            unfit = list(self._unfit(groups[group], tensor, model, is_stacked=is_stacked))
            problems += unfit
            if not unfit:
                planned.append(self._planned(groups[group], tensor, model.vocab_size, is_stacked=is_stacked))
        problems += [
            f"has {key}, which the model does not" for at in groups if at not in used for key in groups[at].values()
        ]
        problems = list(dict.fromkeys([*problems, *_mixed_types(planned)]))
        if problems:
            shown = ", ".join(problems[:_PROBLEMS_SHOWN]) + (", …" if len(problems) > _PROBLEMS_SHOWN else "")
            raise UserError(f"{self._folder} does not hold the configured model: it {shown}")
        return planned

    def _groups(self, *, has_experts: bool) -> _Groups:
        groups: dict[tuple[str, int | None], _Parts] = defaultdict(dict)
        for key in self._stored:
            group, part = _place(key.removeprefix(self.prefix), has_experts=has_experts)
            groups[group][part] = key
        return groups

    def _unfit(self, parts: _Parts, tensor: ModelTensor, model: ModelConfig, *, is_stacked: bool) -> Iterator[str]:
        """What is wrong with a stored tensor, as ends of a sentence."""
        first, wanted = next(iter(parts.values())), tensor.shape
        layers = self._stored.shape(first)[0]
        if is_stacked and layers != model.num_layers:
            yield f"has {first} of {layers} layers instead of model.num_layers={model.num_layers}"
            return
        for key in parts.values():
            if (dtype := self._stored.dtype(key)) not in WEIGHT_TYPES.values():
                kind = str(dtype).removeprefix("torch.")
                yield f"has {key} in {kind}, which needs scales beside it; import the unquantized checkpoint of it"
        found = tuple(self._read(parts, tensor.layer if is_stacked else None, on_meta=True).shape)
        if tensor.key in (EMBEDDING, HEAD) and found[1:] == wanted[1:]:
            if found[0] < model.vocab_size:
                yield f"has {first} of {found[0]:,} rows, fewer than model.vocab_size={model.vocab_size}"
        elif found != wanted:
            yield f"has {first} as {list(found)} instead of {list(wanted)}"

    def _planned(self, parts: _Parts, tensor: ModelTensor, num_tokens: int, *, is_stacked: bool) -> PlannedTensor:
        read = partial(self._read, parts, tensor.layer if is_stacked else None)
        is_vocabulary = tensor.key in (EMBEDDING, HEAD)
        return PlannedTensor(
            key=tensor.key,
            layer=tensor.layer,
            shape=tensor.shape,
            dtype=self._stored.dtype(next(iter(parts.values()))),
            load=(lambda: _with_rows(read(), tensor.shape[0], num_tokens)) if is_vocabulary else read,
        )

    def _read(self, parts: _Parts, layer: int | None, *, on_meta: bool = False) -> torch.Tensor:
        """A tensor from what it is stored in: experts, each of two halves, if they are apart."""

        def read(key: str) -> torch.Tensor:
            if not on_meta:
                return self._stored.read(key, layer)
            shape = self._stored.shape(key)
            return torch.empty(shape if layer is None else shape[1:], dtype=self._stored.dtype(key), device="meta")

        def joined(expert: int | None) -> torch.Tensor:
            if (expert, None) in parts:
                return read(parts[expert, None])
            return torch.cat([read(parts[expert, half]) for half in _HALVES if (expert, half) in parts])

        experts = sorted({expert for expert, _ in parts if expert is not None})
        return torch.stack([joined(expert) for expert in experts]) if experts else joined(None)


def _mixed_types(planned: list[PlannedTensor]) -> Iterator[str]:
    """Tensors of ours whose layers are stored in several types."""
    types: dict[str, set[str]] = defaultdict(set)
    for tensor in planned:
        types[tensor.key].add(str(tensor.dtype).removeprefix("torch."))
    yield from (f"has {key} in {' and '.join(sorted(kinds))}" for key, kinds in types.items() if len(kinds) > 1)


def _with_rows(values: torch.Tensor, num_rows: int, num_tokens: int) -> torch.Tensor:
    """An embedding [rows, hidden] with other rows of padding: cut off, or the mean of all tokens' added."""
    if values.size(0) >= num_rows:
        return values[:num_rows]
    padded = pad_vocabulary([values[:num_tokens]], num_rows=num_rows)
    padded[num_tokens : values.size(0)] = values[num_tokens:]
    return padded
