"""Weights in safetensors files: written one tensor after the other, and read by the library `safetensors`.

Writing is ours for one reason: `safetensors.torch.save_file` and `serialize_file` (0.8) take all tensors of a file at
once, a whole shard in memory, and an export holds one layer. The format can be streamed: eight bytes with the length of
a JSON header, the header with every tensor's type, shape and place, then the bytes (github.com/huggingface/safetensors,
"Format"). The index of several files is `transformers`' own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import safetensors
import torch

from gpt_pretrain.config.errors import UserError

# By the format's names: types that weights have without scales beside them.
WEIGHT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPE_NAMES = {dtype: name for name, dtype in WEIGHT_TYPES.items()}
_SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The header ends here, so that tensors start where a memory map can be read as their type.
_ALIGNMENT = 8


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


def plan_shards(specs: Sequence[TensorSpec], max_bytes: float) -> dict[str, list[TensorSpec]]:
    """Which file holds which tensors: in their order, each file as full as it may be.

    Args:
        specs: All tensors.
        max_bytes: Most bytes of a file's tensors; a single tensor may be larger.
    """
    shards: list[list[TensorSpec]] = []
    room = 0.0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def write_shards(
    directory: Path, shards: Mapping[str, Sequence[TensorSpec]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Writes the files and, if there are several, their index.

    Args:
        directory: Where.
        shards: From `plan_shards`.
        tensors: Name and values of each, in the order of the plan; taken one by one.

    Raises:
        OSError: The disk does not take them.
    """
    stream = iter(tensors)
    for file_name, specs in shards.items():
        with (directory / file_name).open("wb") as file:
            file.write(_header(specs))
            for spec in specs:
                name, tensor = next(stream)
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), "tensors come in the order of the plan"
                file.write(tensor.to(spec.dtype).contiguous().view(torch.uint8).numpy())
    if len(shards) > 1:
        total = sum(spec.num_bytes for specs in shards.values() for spec in specs)
        weight_map = {spec.name: file_name for file_name, specs in shards.items() for spec in specs}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file as `transformers` lays it out.

    Raises:
        OSError: The disk does not take it.
    """
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


class WeightFiles:
    """All safetensors files of a directory, open; a context manager.

    Raises:
        UserError: There are none, or one that the index names cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in _paths(directory):
                try:
                    file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
                except (OSError, safetensors.SafetensorError) as error:
                    raise UserError(f"{path} cannot be read: {error}") from error
                self._files |= dict.fromkeys(file.keys(), file)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def type_name(self, name: str) -> str:
        """A tensor's type as the format names it."""
        return str(self._files[name].get_slice(name).get_dtype())

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor whose `type_name` is one of `WEIGHT_TYPES`."""
        return WEIGHT_TYPES[self.type_name(name)]

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if (directory / _SINGLE).is_file():
            return [directory / _SINGLE]
        raise UserError(
            f"{directory} holds neither {_SINGLE} nor {INDEX}; weights in other files (pytorch_model.bin) become "
            "safetensors by transformers' save_pretrained"
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return [directory / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {error!r}") from error
