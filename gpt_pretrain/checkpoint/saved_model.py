"""A checkpoint in one plain process: reads its model's description and its tensors one by one, and writes weights.

This needs no process group, GPU or model. The checkpoint may have any parallel layout: it names tensors by the whole
model, whichever ranks wrote them, and each may lie in pieces in many files. Reading assembles only the pieces asked
for, so one layer of a stacked tensor takes the memory of one layer. Writing makes each tensor when its turn comes.
torch's default planners do the work; they are told which tensors there are.

The configuration is the manifest's. The tokenizer lies beside the tensors of an imported model, or in the run's
directory two levels up; its fingerprint must match.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from omegaconf import OmegaConf
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from gpt_pretrain.checkpoint.manifest import Manifest, check_files, read_manifest
from gpt_pretrain.checkpoint.state import COMMON_STATE, FORMAT, METADATA
from gpt_pretrain.config import own
from gpt_pretrain.config.choices import LayerName
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.config.load import read_saved_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import NO_TOKENIZER
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from gpt_pretrain.megatron.optimizer_state import STATES
from gpt_pretrain.megatron.pickles import restricted, unreadable_told
from gpt_pretrain.megatron.weight_average import AVERAGE

_COMMON_KEY = ShardedObject(COMMON_STATE, None, (1,), (0,)).unique_key
# Optimizer states lie beside the model's tensors and have their names after this prefix.
# Megatron-LM numbers several optimizers.
_OF_OPTIMIZER = ("optimizer.", "chained_")
_AVERAGE = f"{STATES}{AVERAGE}."
# Files written side by side, and tensors in memory.
_NUM_FILES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What a checkpoint says of its model."""

    path: Path
    manifest: Manifest
    config: Config
    """Of the run that saved it; names of extensions that it does not need, and that are not loaded, are replaced."""
    tokenizer: Tokenizer | None
    """None if the data were token ids (`model.tokenizer.library=none`), or an imported model had none."""

    def check_files(self) -> None:
        """Reads every byte; a UserError names each file that is missing or not what was written."""
        problems = check_files(self.path, self.manifest)
        if problems:
            raise UserError("\n".join([*problems, "use another checkpoint of the run"]))


def open_checkpoint(path: Path, tokenizer: Path | None = None) -> SavedModel:
    """Reads what a checkpoint says of itself; no tensor yet.

    `tokenizer` is the tokenizer's file if it is neither in the checkpoint nor in the run's directory.

    Raises:
        UserError: There is no checkpoint, another version wrote its configuration, or the tokenizer is not found.
    """
    path = path.absolute()
    manifest = read_manifest(path)
    config, problems = read_saved_config(OmegaConf.create(_of_the_model(path, manifest.config)))
    if config is None:
        listed = "; ".join(problems)
        raise UserError(
            f"{path} was saved with another version's configuration: {listed}; use the version that wrote it: "
            f"{manifest.versions.get('gpt_pretrain')}"
        )
    return SavedModel(
        path=path, manifest=manifest, config=config, tokenizer=_find_tokenizer(path, manifest, config, tokenizer)
    )


def _of_the_model(path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with the program's own names in place of what extensions that are not loaded have named.

    Of what extensions register, weights and their use depend on the layer alone; the tokenizer is a file.
    """
    dropped = own.dropped_modules(saved.get("extensions"))
    if not dropped:
        return dict(saved)
    values = own.without_extensions(deepcopy(saved))
    model = values.get("model")
    if isinstance(model, dict) and model.get("layer") not in (None, *LayerName.__members__):
        raise UserError(
            f"{path} has model.layer={show(model['layer'])}, which is not loaded, and was saved with "
            f"extensions=[{','.join(saved['extensions'])}]; if you trust the code, name the one that registers it"
        )
    values["extensions"] = [name for name in values["extensions"] if name not in dropped]
    for (*sections, name), key in ((path.split("."), key) for path, key in schema_keys().items()):
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and key.is_open and inner.get(name) not in (None, *key.choices):
            inner[name] = key.choices[0]
    return values


def _find_tokenizer(path: Path, manifest: Manifest, config: Config, given: Path | None) -> Tokenizer | None:
    expected = manifest.data.get("tokenizer")
    if expected == NO_TOKENIZER:
        return None
    if expected is None:
        # The model was imported without a tokenizer: only the user knows it.
        return None if given is None else load_tokenizer(given, "tokenizer")
    in_config, eod_token = config.model.tokenizer.model, config.model.tokenizer.eod_token
    beside = [path / TOKENIZER_FILE, path.parent.parent / TOKENIZER_FILE]
    places = [given] if given is not None else [*beside, *([Path(in_config)] if in_config else [])]
    for place in places:
        if place == given or place.is_file():
            tokenizer = load_tokenizer(place, "tokenizer", eod_token=eod_token)
            if tokenizer.fingerprint == expected:
                return tokenizer
    looked_at = ", ".join(map(str, places))
    raise UserError(
        f"{path} was trained with another tokenizer than {looked_at}; give its file with tokenizer=…/tokenizer.json"
    )


class CheckpointTensors:
    """The model's tensors in a checkpoint, by key; a UserError if the index, or later a tensor, cannot be read.

    With `averaged`, the values are those of the weights averaged over steps, fp32; a UserError if there are none.
    """

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        self._path, self._prefix = path, _AVERAGE if averaged else ""
        self._reader = FileSystemReader(path)
        with restricted(path):
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._tensors = {key: entry for key, entry in stored.items() if not key.startswith(_OF_OPTIMIZER)}
        if averaged and any(f"{_AVERAGE}{key}" not in stored for key in self._tensors):
            raise UserError(
                f"weights=ema: {path} has no averaged weights; use weights=raw, or a checkpoint of a run with "
                "model.optim.ema_decay"
            )
        self._stored = {key: stored[f"{self._prefix}{key}"] for key in self._tensors}
        self.others = metadata.state_dict_metadata.keys() - self._tensors.keys()
        """Keys of everything else: optimizer states, and objects that are not tensors."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor; in a layer's tensor the number of layers comes first."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """The type in which a tensor was saved."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, layer: int | None = None) -> torch.Tensor:
        """A tensor on the CPU: all of it, or one layer of it, without the axis of layers."""
        entry, stored_key = self._stored[key], f"{self._prefix}{key}"
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        part = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        with unreadable_told(self._path):
            target = torch.empty(sizes, dtype=entry.properties.dtype)
            items = create_read_items_for_chunk_list(stored_key, entry, [part])
            assert sum(item.lengths.numel() for item in items) == target.numel(), f"the pieces of {key} make the whole"
            self._reader.read_data(LoadPlan(items), _IntoOneTensor(target)).wait()
        return target if layer is None else target[0]


class _IntoOneTensor(DefaultLoadPlanner):
    """Puts every piece into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor to be written, or one layer of a stacked one."""

    key: str
    """Its key in the checkpoint."""
    layer: int | None
    """None: all of it."""
    shape: tuple[int, ...]
    """Without the axis of layers."""
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    """Makes its values, on the CPU, when they are needed."""

    def place(self, num_layers: int) -> WriteItem:
        """Which part of which tensor it is, as torch describes it."""
        layers = [] if self.layer is None else [num_layers]
        offsets = torch.Size([self.layer or 0] * len(layers) + [0] * len(self.shape))
        return WriteItem(
            index=MetadataIndex(self.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([*([1] * len(layers)), *self.shape])),
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size([*layers, *self.shape]),
            ),
        )


def write_weights(
    directory: Path,
    tensors: Sequence[PlannedTensor],
    *,
    num_layers: int,
    common: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> None:
    """Writes all tensors of a model, but no manifest, into an empty directory, and waits until the disk has them.

    A run of any layout takes the weights with `checkpoint.init_from`. Stacked tensors have `num_layers` layers.
    megatron-core's reader finds `common` as the state that all ranks share, and `objects` by their unique keys.
    """
    writer = FileSystemWriter(directory, thread_count=_NUM_FILES)
    shared = {"content_metadata": METADATA, **(common or {})}
    planner = _OneByOne(tensors, num_layers, {_COMMON_KEY: [shared], **(objects or {})})
    save({}, storage_writer=writer, planner=planner, no_dist=True)
    save_config(FORMAT, str(directory))


class _OneByOne(DefaultSavePlanner):
    """Tells torch's writer which tensors there are, and makes each when its turn comes."""

    def __init__(self, tensors: Sequence[PlannedTensor], num_layers: int, objects: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        placed = [(tensor.place(num_layers), tensor) for tensor in tensors]
        self._by_index = {item.index: tensor for item, tensor in placed}
        self._objects = objects
        written = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in objects]
        self._items = [*written, *(item for item, _ in placed)]

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A tensor's values, or an object that megatron-core's reader looks for."""
        if write_item.type is WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[write_item.index.fqn], stream)
            return stream
        planned = self._by_index[write_item.index]
        values = planned.load()
        assert (tuple(values.shape), values.dtype) == (planned.shape, planned.dtype), "a tensor is what was planned"
        return (values if planned.layer is None else values[None]).contiguous()
