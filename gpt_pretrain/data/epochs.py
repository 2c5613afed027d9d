"""The order of samples of a token file: epoch by epoch, whatever number of samples a run asks for.

The documents of all epochs stand end to end, those of each epoch shuffled anew, and a sample is the next
`sequence_length` tokens and one more for the last label. Each epoch's samples are shuffled among themselves; the one
that crosses into the next epoch comes between the two. So every token is read once before any is read twice, and a run
that is made longer goes on in the order that it would have had from the start.

megatron-core's own order (`GPTDataset`) shuffles the documents of several epochs together, as many as the run's samples
need: a run that is made longer reads some documents three times and others never.
"""

from pathlib import Path

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

_INDICES = ("document_index", "sample_index", "shuffle_index")


def write_indices(
    stem: Path, documents: numpy.ndarray, lengths: numpy.ndarray, *, num_samples: int, sequence_length: int, seed: int
) -> None:
    """Writes the files that an `EpochDataset` of the same stem maps.

    Args:
        stem: Path and first part of the name of each file.
        documents: Numbers of the documents of an epoch, int32.
        lengths: Tokens of all documents of the token file, int32.
        num_samples: Samples that they must have at least; whole epochs are written.
        sequence_length: Tokens of a sample.
        seed: What the order follows from.
    """
    num_tokens = int(lengths[documents].sum(dtype=numpy.int64))
    # One token more for the last label.
    num_epochs = max(1, -(-(num_samples * sequence_length + 1) // num_tokens))
    order_of_documents = numpy.tile(documents, (num_epochs, 1))
    for epoch, of_epoch in enumerate(order_of_documents):
        _shuffle(of_epoch, seed, epoch, 0)
    order_of_documents = order_of_documents.reshape(-1)
    borders = helpers.build_sample_idx(lengths, order_of_documents, sequence_length, num_epochs, num_tokens)
    order = numpy.arange(len(borders) - 1, dtype=numpy.uint32 if len(borders) < 2**32 else numpy.int64)
    begin = 0
    for epoch in range(num_epochs):
        # The samples that end, with their last label, inside this epoch. The next one crosses its end.
        end = ((epoch + 1) * num_tokens - 1) // sequence_length
        _shuffle(order[begin:end], seed, epoch, 1)
        begin = end + 1
    for name, index in zip(_INDICES, (order_of_documents, borders, order), strict=True):
        numpy.save(_path(stem, name), index, allow_pickle=False)


def _path(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{name}.npy")


def _shuffle(values: numpy.ndarray, seed: int, epoch: int, what: int) -> None:
    """Shuffles documents (0) or samples (1) of an epoch in place."""
    # numpy keeps what this generator draws in all versions; a resumed run may have another one.
    numpy.random.RandomState([seed, epoch, what]).shuffle(values)


class EpochDataset(GPTDataset):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's data set of a token file, in the order that `write_indices` has written."""

    def __init__(self, prefix: str, stem: Path, config: GPTDatasetConfig) -> None:
        self._stem = stem
        tokens = self.build_low_level_dataset(prefix, config)
        super().__init__(tokens, prefix, None, None, Split.train, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Documents in order, the first document and offset of each sample, and the samples in order; memory-mapped."""
        documents, borders, order = (
            numpy.load(_path(self._stem, name), mmap_mode="r", allow_pickle=False) for name in _INDICES
        )
        return documents, borders, order

    def documents_ended(self, begin: int, end: int) -> int:
        """How many documents have their last token in the samples from `begin` up to `end`."""
        samples = self.shuffle_index[begin:end].astype(numpy.int64)
        return int((self.sample_index[samples + 1, 0] - self.sample_index[samples, 0]).sum(dtype=numpy.int64))
