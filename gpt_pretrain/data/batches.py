"""From samples to the microbatches of one data-parallel rank, in an order that does not depend on the layout.

A global batch holds the samples that follow the batch before, at every data-parallel size. Within it, microbatch m of
rank r reads the `micro_batch_size` samples from (m·dp + r)·micro on, as megatron-core does. A run that resumes at
`consumed_samples` on another number of ranks thus trains on the same samples in the same steps, and a batch that grows
changes no sample's place.

A server process that has imported this module forks the data-loading processes. The rank itself does not: its copies
would keep its CUDA context and its connections to other ranks open after it is gone, and duplicate its memory.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.environment import prepare_libraries

with warnings.catch_warnings():
    # megatron-core warns of missing optional packages that only the rank would use.
    warnings.simplefilter("ignore")
    from gpt_pretrain.data.datasets import FIELDS, SampleDataset
    from gpt_pretrain.data.documents import collate_documents, document_borders

# The launcher, Slurm and the terminal send these to every process of a run; the rank acts on them for its loaders.
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
    document_borders: torch.Tensor | None = None
    """int32 [documents + 1], of the samples end to end: where each document begins, and b · s; empty ones come last.
    None where documents see each other (`data.documents`)."""

    def sequences(self) -> dict[str, torch.Tensor]:
        """Tokens, labels, loss mask and positions as the model takes them, by name: [b, s], or with borders [1, b · s].

        Attention computes documents of different lengths only from one packed sequence.
        """
        found = {name: getattr(self, name) for name in FIELDS}
        return found if self.document_borders is None else {name: each.view(1, -1) for name, each in found.items()}

    def cut(self, length: int) -> "Batch":
        """The same tokens as samples of so many, [b · s / length, length], which do not see each other."""
        if length == self.tokens.size(1):
            return self
        # In whichever began later: the document or the piece.
        in_piece = torch.arange(self.tokens.size(1), device=self.tokens.device) % length
        positions = torch.minimum(self.position_ids, in_piece).view(-1, length)
        return Batch(
            tokens=self.tokens.view(-1, length),
            labels=self.labels.view(-1, length),
            loss_mask=self.loss_mask.view(-1, length),
            position_ids=positions,
            # It has another size in each microbatch, for which the host waits.
            document_borders=None if self.document_borders is None else document_borders(positions),
        )


def microbatches(
    *,
    num_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    repeat: bool,
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of one rank, after the `consumed_samples` that earlier steps have read.

    Samples [0, num_samples) are read, as far as all ranks have a whole microbatch; with `repeat` again and again.
    """
    assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
    stride = micro_batch_size * data_parallel_size
    assert num_samples >= stride, (num_samples, stride)
    start = consumed_samples
    while True:
        if start + stride > num_samples:
            if not repeat:
                return
            start = 0
        first = start + data_parallel_rank * micro_batch_size
        yield list(range(first, first + micro_batch_size))
        start += stride


class BatchIterator(Iterator[Batch]):
    """Microbatches on the rank's device. Its processes end when it is closed or collected, or when Python exits."""

    def __init__(self, loader: "DataLoader[dict[str, torch.Tensor]]", device: torch.device) -> None:
        self._device = device
        self._ahead: deque[Batch] = deque()
        with _block_rank_signals() if loader.num_workers else nullcontext():
            self._batches: Iterator[dict[str, torch.Tensor]] = iter(loader)
        # At exit multiprocessing sends its processes SIGTERM, which these block, and waits for them.
        atexit.register(_close, weakref.ref(self))

    def __next__(self) -> Batch:
        return self._ahead.popleft() if self._ahead else self._read()

    def peek(self, num_batches: int) -> list[Batch]:
        """The next microbatches, without consuming them; StopIteration if there are fewer, or it is closed."""
        while len(self._ahead) < num_batches:
            self._ahead.append(self._read())
        return list(islice(self._ahead, num_batches))

    def _read(self) -> Batch:
        try:
            fields = next(self._batches)
        except UserError as error:
            # torch puts the traceback of a data-loading process before the message.
            raise UserError(str(error).rpartition(f"{UserError.__name__}: ")[2]) from error
        if self._device.type == "cuda":
            fields = {name: value.to(self._device, non_blocking=True) for name, value in fields.items()}
        return Batch(**fields)

    def close(self) -> None:
        """Ends the data-loading processes."""
        batches, self._batches = self._batches, iter(())
        self._ahead.clear()
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            # Garbage collection would do the same, but the traceback of an error may keep the loader alive until exit.
            batches._shutdown_workers()


def _close(reference: "weakref.ref[BatchIterator]") -> None:
    iterator = reference()
    if iterator is not None:
        iterator.close()


def build_batch_iterator(
    dataset: SampleDataset,
    *,
    config: Config,
    data_parallel_rank: int,
    data_parallel_size: int,
    device: torch.device,
    consumed_samples: int = 0,
    is_validation: bool = False,
) -> BatchIterator:
    """Microbatches from `consumed_samples` on; each step takes as many as its batch has.

    Those of validation never end: they are limit_val_batches global batches of each set again and again. Every
    validation draws all of them and so sees the same samples, which makes its losses comparable.
    """
    indices = microbatches(
        num_samples=dataset.num_samples if is_validation else len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=config.model.micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        repeat=is_validation,
    )
    num_workers = config.model.data.num_workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    loader = DataLoader(
        cast("Any", dataset),
        batch_sampler=indices,
        collate_fn=collate_documents if config.model.data.inter_document_masking else None,
        num_workers=num_workers,
        multiprocessing_context=context if num_workers else None,
        worker_init_fn=_end_with_rank,
        pin_memory=device.type == "cuda",
        # A loader draws a seed for its processes when it starts. Drawing it from the default generator would change
        # the dropout of a resumed run, which starts a loader where an uninterrupted run does not.
        generator=torch.Generator(),
    )
    return BatchIterator(loader, device)


@contextmanager
def _block_rank_signals() -> Iterator[None]:
    """Processes started inside ignore the rank's signals as long as they live."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
    # Processes need the tracker, and starting it unblocks two of the signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def tell_of_defects(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A data-loading process's `sys.excepthook`, silent if the rank ends while it takes a tensor.

    Otherwise multiprocessing's thread that sends tensors would print a traceback beside the rank's own.
    """
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _end_with_rank(worker: int) -> None:
    """Ends this data-loading process once its rank is gone, even by SIGKILL; torch's `worker_init_fn`.

    torch watches the parent process, but that is the server here, which lives as long as its processes.
    """
    prepare_libraries()
    sys.excepthook = tell_of_defects
    rank = multiprocessing.parent_process()
    assert rank is not None, "a data-loading process has a parent"

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name=f"watch-rank-{worker}", daemon=True).start()
