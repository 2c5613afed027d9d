"""Imports a checkpoint of torchtitan's Llama 3, as torch's distributed checkpoints have it.

Its names become those of `transformers` (torchtitan/models/llama3/state_dict_adapter.py), and from there it is an
import like any other. Rope rotates neighbouring channels in torchtitan, and halves of a head here: rows of queries and
keys change places.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import UserError, visible
from gpt_pretrain.huggingface.architectures import Architecture, choose_architecture
from gpt_pretrain.huggingface.export import WEIGHT_TYPES, check_new_directory
from gpt_pretrain.huggingface.import_hf import (
    checked_config,
    how_to_continue,
    imported_fields,
    plan_tensors,
    write_imported,
)
from gpt_pretrain.huggingface.tensors import tensor_rules
from gpt_pretrain.rules.jobs import load_config

_INDEX = ".metadata"
# Earlier versions keep the model under a name.
_PREFIXES = ("", "model.")
_STATES = ("train_state", "lr_scheduler", "dataloader", "optimizer")
_OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_ROTATED = ("attention.wq.weight", "attention.wk.weight")
_TYPES = {dtype: name for name, dtype in WEIGHT_TYPES.items()}


class _Slice:
    """A stored tensor by the methods that safetensors' slices have."""

    def __init__(self, tensors: CheckpointTensors, key: str, head_width: int | None) -> None:
        self._tensors, self._key, self._head_width = tensors, key, head_width

    def get_shape(self) -> list[int]:
        return list(self._tensors.shape(self._key))

    def get_dtype(self) -> str:
        dtype = self._tensors.dtype(self._key)
        return _TYPES.get(dtype, str(dtype).removeprefix("torch."))

    def __getitem__(self, _: slice) -> torch.Tensor:
        values = self._tensors.read(self._key)
        return values if self._head_width is None else pairs_to_halves(values, self._head_width)


def pairs_to_halves(weight: torch.Tensor, head_width: int) -> torch.Tensor:
    """Rows [heads · width, in] for a rope of neighbouring channels, in the order for a rope of halves."""
    heads: torch.Tensor = weight.unflatten(0, (-1, head_width // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def import_torchtitan(source: Path, out: Path, overrides: Sequence[str]) -> str:
    """Writes a checkpoint with the weights of torchtitan's, for the model that `overrides` describe.

    Raises:
        UserError: It is no such checkpoint, or does not hold that model.
    """
    source, out = source.absolute(), out.absolute()
    check_new_directory(out)
    if not (source / _INDEX).is_file():
        below = sorted(path.parent for path in source.glob(f"step-*/{_INDEX}"))
        way = f"such as path={below[-1]}" if below else "or use import_hf where torchtitan saved for transformers"
        raise UserError(f"path={source} holds no {_INDEX}, and is no checkpoint of torchtitan; name step-…, {way}")
    config = load_config(overrides)
    tensors = CheckpointTensors(source)
    types = {tensors.dtype(key) for key in tensors if key.endswith("tok_embeddings.weight")}
    config = checked_config(config, out, None, Precision.fp32 if torch.float32 in types else Precision.bf16)
    rules = tensor_rules(config.model, choose_architecture(config.model, Architecture.llama))
    planned = plan_tensors(source, _named(source, tensors, kv_channels(config.model)), rules, "overrides=[…]")
    write_imported(out, planned, config, imported_fields(config), source=source)
    num_parameters = sum(math.prod(tensor.shape) for tensor in planned)
    return (
        f"written: {visible(str(out))}\n"
        f"  {num_parameters:,} parameters; only shapes were compared, and optimizer and schedule were not taken\n"
        f"{how_to_continue(out)}"
        "  it has no tokenizer: give model.tokenizer, or data of token ids\n"
    )


def _named(source: Path, tensors: CheckpointTensors, head_width: int) -> Mapping[str, Any]:
    """The stored tensors by the names of `transformers`; a UserError names those that Llama 3 does not have."""
    prefix = next((each for each in _PREFIXES if f"{each}tok_embeddings.weight" in set(tensors)), None)
    if prefix is None:
        shown = ", ".join(sorted(tensors)[:5]) or "no tensors"
        raise UserError(f"{source} holds no model of torchtitan: it has no tok_embeddings.weight, but {shown}")
    named: dict[str, Any] = {}
    unknown = []
    for key in tensors:
        if key.startswith(_STATES):
            continue
        name = key.removeprefix(prefix)
        _, layer, inside = name.split(".", 2) if name.startswith("layers.") and name.count(".") > 1 else ("", "", "")
        if name in _OUTER:
            named[_OUTER[name]] = _Slice(tensors, key, None)
        elif inside in _IN_LAYER:
            width = head_width if inside in _ROTATED else None
            named[f"model.layers.{layer}.{_IN_LAYER[inside]}"] = _Slice(tensors, key, width)
        else:
            unknown.append(key)
    if unknown:
        shown = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        raise UserError(
            f"{source} holds another model than torchtitan's Llama 3 ({shown}); have torchtitan save it for "
            "transformers (checkpoint.last_save_in_hf), and use import_hf"
        )
    return named
