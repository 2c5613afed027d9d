"""From the corpus to samples: a megatron-core data set over the token files, or random tokens.

A sample is `encoder_seq_length` tokens of the shuffled documents laid end to end, with the next tokens as labels. Each
split of each file has its own index (document order, sample borders, sample order), built once and kept in the cache.
It covers as many epochs as the run's samples need. The order follows from the seed alone (`data.epochs`), and
`data.mixtures` says from which file each sample comes.
"""

import io
import math
import pickle
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch.utils.data import Dataset

from gpt_pretrain.config.errors import UserError, format_bytes, reason
from gpt_pretrain.config.files import check_regular, remove
from gpt_pretrain.config.mixtures import ConsumedSource, Stage
from gpt_pretrain.config.schedule import last_step
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.data.cache import Progress, cache_directory, fingerprint, hold_lock
from gpt_pretrain.data.corpus import Corpus
from gpt_pretrain.data.epochs import EpochDataset, write_indices
from gpt_pretrain.data.mixtures import Mixture
from gpt_pretrain.data.token_files import check_token_file, split_of_documents
from gpt_pretrain.launch.environment import disk_is_full, host_memory_bytes
from gpt_pretrain.launch.signals import ended_while_waiting

# Of a sample.
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_COMPLETE = "COMPLETE"
# A document, an offset in it, and a place in the order of samples (megatron-core's GPTDataset); of several files also
# the file and a number in it.
_INDEX_BYTES, _DRAWN_BYTES = 16, 10
_INDEX_VERSION = 2
# First parts of the names of an index's files, in the order of the splits.
_STEMS = ("train", "valid")
_COUNTED_AT_ONCE = 2**20


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
    epochs: ClassVar[Mapping[str, float]] = {}

    @property
    def attended(self) -> float:
        """The tokens of a sample, which is one document."""
        return self.sequence_length

    def consumed(self, num_samples: int) -> dict[str, ConsumedSource]:
        """Nothing: random tokens have no source."""
        return {}

    def sequence_length_at(self, sample: int) -> int:
        """Tokens of every sample."""
        return self.sequence_length

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
    """Samples of a mixture of token files, with the fields that training reads.

    Data-loading processes receive it pickled, with the memory-mapped indices of the directory `index` as file names:
    plain pickling would copy gigabytes into each process.
    """

    def __init__(
        self,
        mixture: Mixture,
        num_samples: int,
        index: Path,
        stem: str,
        config: GPTDatasetConfig,
        *,
        masked_label: int | None,
    ) -> None:
        self.mixture = mixture
        self._masked_label = masked_label
        self._index = index
        self.num_samples = num_samples
        self._length = config.sequence_length
        self._masks_documents = config.inter_document_masking
        self._files = [
            EpochDataset(prefix, index / f"{stem}-{number}", config) for number, prefix in enumerate(mixture.prefixes)
        ]
        self._drawn: tuple[numpy.ndarray, numpy.ndarray] | None = None
        if len(self._files) > 1:
            files, numbers = (
                numpy.load(path, mmap_mode="r", allow_pickle=False) for path in _drawn_paths(index / stem)
            )
            self._drawn = files, numbers
        if len(self) < num_samples:
            raise _no_index(index, ValueError(f"{len(self)} samples of {num_samples}"))
        self._restart()

    def _restart(self) -> None:
        """Begins to count what was read."""
        self._num_counted = 0
        self._samples, self._documents = [0] * len(self._files), [0] * len(self._files)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes that the run's samples make over each source; below 1, part of it is never read."""
        return self.mixture.epochs(self.num_samples, self._length)

    @property
    def num_epochs(self) -> float:
        """Passes over the source that is read most often."""
        return max(self.epochs.values())

    @property
    def attended(self) -> float:
        """The length of document or sample that a token of the run is in on average (`Mixture.attended`)."""
        return self.mixture.attended(self.num_samples, self._length, in_documents=self._masks_documents)

    def __len__(self) -> int:
        return len(self._files[0]) if self._drawn is None else len(self._drawn[0])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Raises a UserError where the index points to no tokens."""
        try:
            file, number = (0, index) if self._drawn is None else (int(each[index]) for each in self._drawn)
            sample = self._files[file][number]
        except _NO_INDEX as error:
            raise _no_index(self._index, error) from error
        if self._masked_label is not None:
            sample["loss_mask"][sample["labels"] == self._masked_label] = 0.0
        return {field: sample[field] for field in FIELDS}

    def sequence_length_at(self, sample: int) -> int:
        """The tokens that a step which begins with this sample cuts its samples into."""
        return self.mixture.sequence_length_at(sample, self._length)

    def consumed(self, num_samples: int) -> dict[str, ConsumedSource]:
        """What the first samples hold of each source; quick where the last call asked for a few less."""
        if num_samples < self._num_counted:
            self._restart()
        while self._num_counted < num_samples:
            end = min(num_samples, self._num_counted + _COUNTED_AT_ONCE)
            counts = [end - self._num_counted]
            if self._drawn is not None:
                counts = numpy.bincount(self._drawn[0][self._num_counted : end], minlength=len(self._files)).tolist()
            for number, count in enumerate(counts):
                begin = self._samples[number]
                self._documents[number] += self._files[number].documents_ended(begin, begin + count)
                self._samples[number] += count
            self._num_counted = end
        found, first = {}, 0
        for source in self.mixture.sources:
            of_source = slice(first, first := first + len(source.prefixes))
            num_tokens = sum(self._samples[of_source]) * self._length
            found[source.name] = ConsumedSource(
                tokens=num_tokens,
                epochs=num_tokens / source.size.num_tokens,
                documents=sum(self._documents[of_source]),
            )
        return found

    def __getstate__(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        _MemmapPickler(buffer).dump((self._files, self._drawn))
        return {**self.__dict__, "_files": None, "_drawn": buffer.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = dict(state)
        with warnings.catch_warnings():
            # A data-loading process has no rank that megatron-core could find.
            warnings.simplefilter("ignore")
            self._files, self._drawn = pickle.loads(state["_drawn"])


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

    Each has at least as many samples as are read; that of validation holds as many of each of the corpus's validation
    sets, one set after the other. Rank 0 writes the indices that the cache lacks, and the others wait.

    Raises:
        UserError: The nodes do not share the cache directory, its disk is full, its indices for this run are damaged,
            the index of so many samples does not fit into memory, or a source is read too often.
    """
    model = config.model
    num_valid_samples = config.trainer.limit_val_batches * model.global_batch_size
    if corpus.is_mock:
        length, vocab_size = model.encoder_seq_length, model.vocab_size
        valid = RandomTokens(num_valid_samples, length, vocab_size, (model.seed, 1)) if num_valid_samples else None
        return RandomTokens(num_train_samples, length, vocab_size, (model.seed, 0)), valid
    length = model.encoder_seq_length
    wanted = {"train": (corpus.training, num_train_samples)}
    if num_valid_samples:
        # One set after the other.
        sets = tuple(Stage(num_valid_samples * length, {source.name: 1.0}) for source in corpus.validation)
        wanted["valid"] = Mixture(corpus.validation, sets), num_valid_samples * len(sets)
    _check_max_epochs(config, corpus.training.epochs(num_train_samples, length))
    _check_index_fits(config, corpus, num_train_samples)
    cache = cache_directory(model.data)
    numbers = [num_samples for _, num_samples in wanted.values()]
    made_of = [corpus.files_key, corpus.splits, model.seed, length, numbers, _INDEX_VERSION]
    index = cache / "index" / fingerprint(made_of)[:32]
    # A complete index may be on a read-only disk, where no lock can be made.
    is_complete = (index / _COMPLETE).exists()
    is_parallel = torch.distributed.is_initialized()
    core = _megatron_config(model, corpus)
    with _index_failures_told(index, cache):
        for path in index.glob("*.npy") if is_complete else ():
            check_regular(path)
        if not is_complete and (not is_parallel or torch.distributed.get_rank() == 0):
            with hold_lock(index, Progress(show=True)):
                if not (index / _COMPLETE).exists():
                    # A process that died left it.
                    remove(index)
                    index.mkdir(parents=True)
                    for stem, (mixture, num_samples) in wanted.items():
                        split = None if corpus.splits is None else (corpus.splits, _STEMS.index(stem))
                        _write_index(index / stem, mixture, num_samples, core, split=split)
                    (index / _COMPLETE).touch()
        if is_parallel:
            torch.distributed.barrier()
        masked_label = corpus.tokenizer.eod if corpus.tokenizer is not None and model.data.eod_mask_labels else None
        opened = [
            TokenDataset(mixture, num, index, stem, core, masked_label=masked_label)
            for stem, (mixture, num) in wanted.items()
        ]
    return opened[0], opened[1] if num_valid_samples else None


def _drawn_paths(stem: Path) -> list[Path]:
    return [stem.with_name(f"{stem.name}-{what}.npy") for what in ("files", "samples")]


def _write_index(
    stem: Path, mixture: Mixture, num_samples: int, core: GPTDatasetConfig, *, split: tuple[str, int] | None
) -> None:
    """Draws the samples of a mixture, and writes the order of each of its files.

    `split` is `splits_string` with the number of the split; None: whole files.
    """
    length, counts = core.sequence_length, [num_samples]
    if len(mixture.prefixes) > 1:
        files, numbers = mixture.draw(num_samples, length)
        for path, drawn in zip(_drawn_paths(stem), (files, numbers), strict=True):
            numpy.save(path, drawn, allow_pickle=False)
        counts = numpy.bincount(files, minlength=len(mixture.prefixes)).tolist()

    def write(number: int, prefix: str, count: int) -> None:
        lengths = numpy.ascontiguousarray(check_token_file(prefix).lengths)
        documents = numpy.arange(len(lengths), dtype=numpy.int32)
        if split is not None:
            documents = documents[split_of_documents(len(lengths), split[0]) == split[1]]
        place = stem.with_name(f"{stem.name}-{number}")
        write_indices(place, documents, lengths, num_samples=count, sequence_length=length, seed=core.random_seed)

    with ThreadPoolExecutor(core.num_dataset_builder_threads) as threads:
        # The list raises what a thread has raised.
        list(threads.map(write, range(len(counts)), mixture.prefixes, counts))


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


def _check_max_epochs(config: Config, epochs: Mapping[str, float]) -> None:
    """Refuses a run that would read a source more often than `model.data.max_epochs`."""
    most, steps = config.model.data.max_epochs, last_step(config)
    name = max(epochs, key=lambda each: epochs[each])
    if most is None or epochs[name] <= most:
        return
    others = "" if len(epochs) == 1 else f", a smaller weight of {name}"
    raise UserError(
        f"model.data.max_epochs={most:g}: in {_length(config, steps)} the source {name} is read {epochs[name]:.2f} "
        f"times; use fewer steps, more data{others}, or model.data.max_epochs={math.ceil(epochs[name])}"
    )


def _length(config: Config, steps: int) -> str:
    """The key that says how long a run of so many steps is."""
    most = config.trainer.max_tokens
    return f"trainer.max_steps={steps}" if most is None else f"trainer.max_tokens={most} ({steps} steps)"


def _check_index_fits(config: Config, corpus: Corpus, num_samples: int) -> None:
    """Refuses an index that does not fit into memory; swap does not count, because shuffling touches all of it."""
    epochs = max(corpus.training.epochs(num_samples, config.model.encoder_seq_length).values())
    documents = max(size.num_documents for source in corpus.training.sources for size in source.sizes)
    of_sample = _INDEX_BYTES + (_DRAWN_BYTES if len(corpus.files) > 1 else 0)
    needed = num_samples * of_sample + math.ceil(epochs) * documents * 4
    there, whose = host_memory_bytes()
    if needed > there:
        steps = last_step(config)
        raise UserError(
            f"{_length(config, steps)} with model.global_batch_size={config.model.global_batch_size}: the index of "
            f"{num_samples:,} samples takes {format_bytes(needed)}, and {whose} has {format_bytes(there)}; use "
            f"{steps * there // needed // 2} steps or fewer"
        )


def _megatron_config(model: ModelConfig, corpus: Corpus) -> GPTDatasetConfig:
    tokenizer = corpus.tokenizer
    return GPTDatasetConfig(
        random_seed=model.seed,
        sequence_length=model.encoder_seq_length,
        num_dataset_builder_threads=model.data.num_dataset_builder_threads,
        # Files and splits are not megatron-core's to choose, but its class demands some.
        blend=([], None),
        split="1",
        # All that megatron-core's data sets read of a tokenizer.
        tokenizer=SimpleNamespace(
            vocab_size=model.vocab_size,
            eod=None if tokenizer is None else tokenizer.eod,
            unique_identifiers=OrderedDict(fingerprint="none" if tokenizer is None else tokenizer.fingerprint),
        ),
        # These go by the end-of-document token. By the index's borders megatron-core also restarts positions.
        reset_position_ids=False,
        reset_attention_mask=False,
        inter_document_masking=model.data.inter_document_masking,
        eod_mask_loss=model.data.eod_mask_loss,
        # Attention layers are causal by themselves; a mask of s² entries per sample would only cost time.
        create_attention_mask=False,
    )
