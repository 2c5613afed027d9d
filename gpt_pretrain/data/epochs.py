"""The order of samples: epoch by epoch, whatever number of samples a run asks for.

The documents of all epochs stand end to end, those of each epoch shuffled anew, and a sample is the next
`sequence_length` tokens and one more for the last label. Each epoch's samples are shuffled among themselves; the one
that crosses into the next epoch comes between the two. So every token is read once before any is read twice, and a run
that is made longer goes on in the order that it would have had from the start.

megatron-core's own order (`GPTDataset`) shuffles the documents of several epochs together, as many as the run's samples
need: a run that is made longer reads some documents three times and others never. Checkpoints that were saved in that
order keep it (`corpus.ORDER`).
"""

import os
from pathlib import Path

import numpy
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset

_INDICES = ("document_index", "sample_index", "shuffle_index")


class EpochDataset(GPTDataset):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's data set with the order of this module; its files have this class's name in theirs."""

    def _build_document_sample_shuffle_indices(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Documents in order, the first document and offset of each sample, and the samples in order; memory-mapped.

        As with megatron-core, rank 0 builds them first, and all others find its files.
        """
        cache = self.config.path_to_cache
        paths = [
            Path(cache, f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}-{name}.npy")
            for name in _INDICES
        ]
        builds = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if builds and not all(path.is_file() for path in paths):
            os.makedirs(cache, exist_ok=True)
            for path, index in zip(paths, self._build_indices(), strict=True):
                numpy.save(path, index, allow_pickle=False)
        documents, borders, order = (numpy.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        return documents, borders, order

    def _build_indices(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        num_tokens = self._get_num_tokens_per_epoch()
        num_epochs, length = self._get_num_epochs(num_tokens), self.config.sequence_length
        documents = numpy.tile(self.indices, (num_epochs, 1))
        for epoch, of_epoch in enumerate(documents):
            self._shuffle(of_epoch, epoch, 0)
        documents = documents.reshape(-1)
        borders = helpers.build_sample_idx(self.dataset.sequence_lengths, documents, length, num_epochs, num_tokens)
        order = numpy.arange(len(borders) - 1, dtype=numpy.uint32 if len(borders) < 2**32 else numpy.int64)
        begin = 0
        for epoch in range(num_epochs):
            # The samples that end, with their last label, inside this epoch. The next one crosses its end.
            end = ((epoch + 1) * num_tokens - 1) // length
            self._shuffle(order[begin:end], epoch, 1)
            begin = end + 1
        return documents, borders, order

    def _shuffle(self, values: numpy.ndarray, epoch: int, what: int) -> None:
        """Shuffles documents (0) or samples (1) of an epoch in place."""
        # numpy keeps what this generator draws in all versions; a resumed run may have another one.
        numpy.random.RandomState([self.config.random_seed, epoch, what]).shuffle(values)
