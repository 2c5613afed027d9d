"""From the corpus to samples: a megatron-core data set over the token files, or random tokens.

A sample is `encoder_seq_length` tokens of the shuffled documents laid end to end, with the next tokens as labels. Each
split of each file has its own index (document order, sample borders, sample order), built once and kept in the cache.
It covers as many epochs as the run's samples need. The order follows from the seed alone (`data.epochs`), and samples
of several files are drawn by weight, each time from the file that is furthest behind its share.
"""

import io
import math
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from gpt_pretrain.config.errors import UserError, format_bytes, reason
from gpt_pretrain.config.files import check_regular, remove
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.data.cache import Progress, cache_directory, fingerprint, hold_lock
from gpt_pretrain.data.corpus import Corpus
from gpt_pretrain.data.epochs import EpochDataset
from gpt_pretrain.launch.environment import disk_is_full, host_memory_bytes
from gpt_pretrain.launch.signals import ended_while_waiting

# Of a sample.
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_COMPLETE = "COMPLETE"
# A document, an offset in it, and a place in the order of samples (megatron-core's GPTDataset).
_INDEX_BYTES = 16
# megatron-core's own default.
_MIN_SURPLUS = 0.005


@dataclass(eq=False)
class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Uniformly random tokens, the same for the same seed and index.

    megatron-core's MockGPTDataset takes seconds to build its index, and its documents all count upwards from 1: a model
    learns that in minutes.
    """

    num_samples: int
    sequence_length: int
    vocab_size: int
    seed: tuple[int, ...]
    num_epochs = 0.0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = numpy.random.default_rng((*self.seed, index))
        text = torch.from_numpy(generator.integers(self.vocab_size, size=self.sequence_length + 1, dtype=numpy.int64))
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.sequence_length),
            "position_ids": torch.arange(self.sequence_length),
        }


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """One split of the corpus: megatron-core's data set, reduced to the fields that training reads.

    Data-loading processes receive it pickled, with the memory-mapped indices of the directory `index` as file names:
    plain pickling would copy gigabytes into each process.
    """

    def __init__(self, dataset: Dataset[dict[str, torch.Tensor]], num_epochs: float, index: Path) -> None:
        self._dataset = dataset
        self.num_epochs = num_epochs
        """Passes that the run's samples make over the split; below 1, part of it is never read."""
        self._index = index

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Raises a UserError where the index points to no tokens."""
        try:
            sample = self._dataset[index]
        except _NO_INDEX as error:
            raise _no_index(self._index, error) from error
        return {field: sample[field] for field in FIELDS}

    def __getstate__(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        _MemmapPickler(buffer).dump(self._dataset)
        return {**self.__dict__, "_dataset": buffer.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_dataset": pickle.loads(state["_dataset"])}


type SampleDataset = RandomTokens | TokenDataset
"""Samples by index: tokens, labels, position_ids (int64 [s]) and loss_mask (float32 [s])."""

# What megatron-core raises if its files hold other numbers, or none; no checksum protects them.
_NO_INDEX = (pickle.UnpicklingError, ValueError, EOFError, LookupError, TypeError, AssertionError, OverflowError)


def _no_index(index: Path, error: BaseException) -> UserError:
    return UserError(f"{index} holds no indices of samples ({reason(error)}); remove it to have it built again")


class _MemmapPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, numpy.memmap) and obj.filename is not None:
            return numpy.memmap, (obj.filename, obj.dtype, "r", obj.offset, obj.shape)
        return NotImplemented


@ended_while_waiting()
def build_datasets(
    config: Config, corpus: Corpus, *, num_train_samples: int
) -> tuple[SampleDataset, SampleDataset | None]:
    """Builds the data sets of training and of one validation, None without samples. All ranks call it.

    Each has at least as many samples as are read. Rank 0 writes the indices that the cache lacks, and the others wait.

    Raises:
        UserError: The nodes do not share the cache directory, its disk is full, its indices for this run are damaged,
            or the index of so many samples does not fit into memory.
    """
    model = config.model
    num_valid_samples = config.trainer.limit_val_batches * model.global_batch_size
    if corpus.is_mock:
        length, vocab_size = model.encoder_seq_length, model.vocab_size
        valid = RandomTokens(num_valid_samples, length, vocab_size, (model.seed, 1)) if num_valid_samples else None
        return RandomTokens(num_train_samples, length, vocab_size, (model.seed, 0)), valid
    sizes = [num_train_samples, num_valid_samples, 0]
    _check_index_fits(config, corpus, num_train_samples)
    cache = cache_directory(model.data)
    length = model.encoder_seq_length
    split: Any = model.data.splits_string if corpus.validation is None else corpus.validation.prefixes
    made_of = [corpus.files_key, corpus.prefixes, split, model.seed, length, sizes, version("megatron-core")]
    kind = EpochDataset if corpus.is_epoch_by_epoch else GPTDataset
    if kind is EpochDataset:
        made_of.append(kind.__name__)
    index = cache / "index" / fingerprint(made_of)[:32]
    builder = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, _megatron_config(model, corpus, sizes, index))
    # A complete index may be on a read-only disk, where no lock can be made.
    is_complete = (index / _COMPLETE).exists()
    writes = not is_complete and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)
    lock: AbstractContextManager[None] = hold_lock(index, Progress(show=True)) if writes else nullcontext()
    with _index_failures_told(index, cache):
        for path in index.glob("*.npy") if is_complete else ():
            check_regular(path)
            # megatron-core would also load a pickle.
            numpy.load(path, mmap_mode="r", allow_pickle=False)
        with lock:
            if writes and not (index / _COMPLETE).exists():
                # A process that died left it; megatron-core would take half a file for a complete one.
                remove(index)
            builder.build()
            if writes:
                (index / _COMPLETE).touch()
        # A rank keeps what it has just written in memory; the second pass maps the files instead.
        train_dataset, valid_dataset, _ = builder.build()
    train = TokenDataset(train_dataset, _plan_epochs(model, corpus, num_train_samples, split=0), index)
    if valid_dataset is None:
        return train, None
    return train, TokenDataset(valid_dataset, _plan_epochs(model, corpus, num_valid_samples, split=1), index)


@contextmanager
def _index_failures_told(index: Path, cache: Path) -> Iterator[None]:
    """Turns errors of megatron-core that writes or opens the indices of samples into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"this rank does not see the sample index that rank 0 wrote ({error.filename}): model.data.cache_dir "
            f"(now {cache}) must be a directory that all nodes share"
        ) from error
    except UserError:
        raise
    except Exception as error:
        # megatron-core may have wrapped it in another error.
        if disk_is_full(error):
            free = format_bytes(shutil.disk_usage(cache).free)
            raise UserError(
                f"no space left while writing {index}: {free} are free; free space there or set model.data.cache_dir "
                "to another disk"
            ) from error
        if isinstance(error, _NO_INDEX):
            raise _no_index(index, error) from error
        raise


def _check_index_fits(config: Config, corpus: Corpus, num_samples: int) -> None:
    """Refuses an index that does not fit into memory; swap does not count, because shuffling touches all of it."""
    epochs = _plan_epochs(config.model, corpus, num_samples, split=0)
    documents = max(splits[0].num_documents for splits in corpus.splits)
    needed = num_samples * _INDEX_BYTES + math.ceil(epochs) * documents * 4
    there, whose = host_memory_bytes()
    if needed > there:
        steps = config.trainer.max_steps
        raise UserError(
            f"trainer.max_steps={steps} with model.global_batch_size={config.model.global_batch_size}: the index of "
            f"{num_samples:,} samples takes {format_bytes(needed)}, and {whose} has {format_bytes(there)}; use "
            f"{steps * there // needed // 2} or fewer"
        )


def _plan_epochs(model: ModelConfig, corpus: Corpus, num_samples: int, *, split: int) -> float:
    """Passes of `num_samples` over a split (0: training, 1: validation); for a blend, the most over any file."""
    num_tokens = num_samples * model.encoder_seq_length
    return max(
        weight * num_tokens / size.num_tokens
        for weight, size in zip(corpus.blend(split).weights or (), corpus.sizes(split), strict=True)
    )


def plan_surplus(weights: tuple[float, ...], sizes: list[int]) -> float:
    """Share of samples that each file of a blend must hold beyond its weight.

    megatron-core rounds each file's samples up, so that a blend of k files has up to k samples too many, and then draws
    them by weight: a heavy file may be drawn `weight·k + 1` times beyond its own rounding. The default of 0.5% does not
    cover that for the few samples of a validation.
    """
    surplus = _MIN_SURPLUS
    for size in sizes:
        built = [-int(-size * weight // 1) for weight in weights]
        for weight, count in zip(weights, built, strict=True):
            if count:
                surplus = max(surplus, (weight * sum(built) + 1) / count - 1)
    return surplus


def _megatron_config(model: ModelConfig, corpus: Corpus, sizes: list[int], index: Path) -> GPTDatasetConfig:
    tokenizer = corpus.tokenizer
    blends = [corpus.blend(split) for split in range(2)]
    named = [(list(blend.prefixes), list(blend.weights or ()) if len(blend.prefixes) > 1 else None) for blend in blends]
    of_files: dict[str, Any] = {"blend": named[0], "split": model.data.splits_string}
    if corpus.validation is not None:
        of_files = {"blend_per_split": [named[0], named[1] if sizes[1] else None, None]}
    config = GPTDatasetConfig(
        random_seed=model.seed,
        sequence_length=model.encoder_seq_length,
        **of_files,
        num_dataset_builder_threads=model.data.num_dataset_builder_threads,
        path_to_cache=str(index),
        # All that megatron-core's data sets read of a tokenizer.
        tokenizer=SimpleNamespace(
            vocab_size=model.vocab_size,
            eod=None if tokenizer is None else tokenizer.eod,
            unique_identifiers=OrderedDict(fingerprint="none" if tokenizer is None else tokenizer.fingerprint),
        ),
        mid_level_dataset_surplus=max(
            plan_surplus(blend.weights or (), [size]) for blend, size in zip(blends, sizes, strict=False)
        ),
        # These go by the end-of-document token. By the index's borders megatron-core also restarts positions.
        reset_position_ids=False,
        reset_attention_mask=False,
        inter_document_masking=model.data.inter_document_masking,
        eod_mask_loss=model.data.eod_mask_loss,
        # Attention layers are causal by themselves; a mask of s² entries per sample would only cost time.
        create_attention_mask=False,
    )
    # megatron-core would also build the index of a split that nothing reads, and never finish that of an empty one.
    if config.split_matrix is not None:
        config.split_matrix = [
            bounds if size else None for bounds, size in zip(config.split_matrix, sizes, strict=True)
        ]
    return config
