"""From samples to the microbatches of one data-parallel rank, in an order that no layout changes.

Global batch k holds samples [k·gbs, (k+1)·gbs) of the data set at every data-parallel size; within it, microbatch m of
rank r reads the `micro_batch_size` samples from (m·dp + r)·micro on, as megatron-core does. So a run resumed at
`consumed_samples` on another number of ranks trains on the same samples in the same steps.
"""

import atexit
import signal
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler

from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.datasets import SampleDataset

# The launcher, Slurm and the terminal send these to every process of a run; a rank decides for its data loaders.
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch; b = micro_batch_size, s = encoder_seq_length."""

    tokens: torch.Tensor
    """int64 [b, s]"""
    labels: torch.Tensor
    """int64 [b, s]: the token that follows each."""
    loss_mask: torch.Tensor
    """float32 [b, s]: 1 where the loss counts."""
    position_ids: torch.Tensor
    """int64 [b, s]"""


class MicrobatchSampler(Sampler[list[int]]):
    """Sample indices of each microbatch of one rank.

    Args:
        num_samples: Samples [0, num_samples) are read; a last, incomplete global batch is not.
        consumed_samples: Samples that earlier steps have read.
        micro_batch_size: Samples of a microbatch.
        global_batch_size: Samples of a step, over all ranks.
        data_parallel_rank: Of this process.
        data_parallel_size: Ranks that share a global batch.
        repeat: Start over at sample 0 after the last one, without end.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        repeat: bool = False,
    ) -> None:
        samples_per_pass = micro_batch_size * data_parallel_size
        assert global_batch_size % samples_per_pass == 0, (global_batch_size, micro_batch_size, data_parallel_size)
        assert 0 <= data_parallel_rank < data_parallel_size
        assert num_samples >= global_batch_size, (num_samples, global_batch_size)
        self._num_samples = num_samples
        self._consumed_samples = consumed_samples
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._rank_offset = data_parallel_rank * micro_batch_size
        self._samples_per_pass = samples_per_pass
        self._repeat = repeat

    def __iter__(self) -> Iterator[list[int]]:
        start = self._consumed_samples
        while True:
            if start + self._global_batch_size > self._num_samples:
                if not self._repeat:
                    return
                start = 0
            for offset in range(0, self._global_batch_size, self._samples_per_pass):
                first = start + offset + self._rank_offset
                yield list(range(first, first + self._micro_batch_size))
            start += self._global_batch_size


class BatchIterator(Iterator[Batch]):
    """Microbatches on the rank's device. Ends its processes when it is closed, collected, or Python exits."""

    def __init__(self, loader: "DataLoader[dict[str, torch.Tensor]]", device: torch.device) -> None:
        self._device = device
        # Blocked signals stay blocked in what is started here: the processes see none of them at any moment, not even
        # while they start, and end when this one tells them to or is gone.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
        try:
            self._batches: Iterator[dict[str, torch.Tensor]] | None = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        # multiprocessing joins its processes at exit after a SIGTERM, which these do not see.
        atexit.register(_close, weakref.ref(self))

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        fields = next(self._batches)
        if self._device.type == "cuda":
            fields = {name: value.to(self._device, non_blocking=True) for name, value in fields.items()}
        return Batch(**fields)

    def close(self) -> None:
        """Ends the data-loading processes."""
        # torch ends them when its iterator is collected.
        self._batches = None


def _close(reference: "weakref.ref[BatchIterator]") -> None:
    iterator = reference()
    if iterator is not None:
        iterator.close()


def build_batch_iterator(
    dataset: SampleDataset,
    *,
    config: Config,
    consumed_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    device: torch.device,
) -> BatchIterator:
    """Microbatches of training, from `consumed_samples` on; num_microbatches of them make a step."""
    sampler = MicrobatchSampler(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=config.model.micro_batch_size,
        global_batch_size=config.model.global_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    return BatchIterator(_build_loader(dataset, sampler, config.model.data.num_workers, device), device)


def build_validation_iterator(
    dataset: SampleDataset,
    *,
    config: Config,
    data_parallel_rank: int,
    data_parallel_size: int,
    device: torch.device,
) -> BatchIterator:
    """Microbatches of validation, without end: the first limit_val_batches global batches again and again.

    A validation that draws limit_val_batches × num_microbatches sees the same samples as every other, so that losses
    compare over a run.
    """
    sampler = MicrobatchSampler(
        num_samples=config.trainer.limit_val_batches * config.model.global_batch_size,
        consumed_samples=0,
        micro_batch_size=config.model.micro_batch_size,
        global_batch_size=config.model.global_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        repeat=True,
    )
    return BatchIterator(_build_loader(dataset, sampler, config.model.data.num_workers, device), device)


def _build_loader(
    dataset: SampleDataset, sampler: MicrobatchSampler, num_workers: int, device: torch.device
) -> "DataLoader[dict[str, torch.Tensor]]":
    context: Any = None
    if num_workers > 0:
        # Forked from the rank, they would hold its CUDA context and its connections to the other ranks open after it
        # is gone. The server that forks them instead imports once for all of them.
        context = get_context("forkserver")
        context.set_forkserver_preload(["gpt_pretrain.data.workers"])
    return DataLoader(
        cast("Any", dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context=context,
        pin_memory=device.type == "cuda",
    )
