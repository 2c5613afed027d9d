"""Data-loading processes: how they start, what they ignore, and what ends them. `batches` uses them.

They are forked by a server process that has imported this module, not by the rank: a copy of the rank would hold its
CUDA context and its connections to the other ranks open after the rank is gone, and would copy its imports' memory.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from types import TracebackType

from gpt_pretrain.launch.environment import prepare_libraries

with warnings.catch_warnings():
    # megatron-core warns of optional packages that only the rank would use.
    warnings.simplefilter("ignore")
    import gpt_pretrain.data.datasets  # noqa: F401  # what the server has imported, its processes need not

# The launcher, Slurm and the terminal send these to every process of a run; the rank decides for its data loaders.
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def worker_context() -> BaseContext:
    """The way data-loading processes are started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@contextmanager
def block_rank_signals() -> Iterator[None]:
    """Makes processes that are started inside deaf to the rank's signals, at every moment of their lives."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
    # Processes need the tracker, and starting it unblocks two of the signals here.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def tell_of_defects(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A data-loading process's `sys.excepthook`, which says nothing of a rank that went away while it took a tensor.

    multiprocessing's thread that hands tensors over would print a traceback beside the rank's own.
    """
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def end_with_rank(worker: int) -> None:
    """Ends this data-loading process when its rank is gone, also by SIGKILL; torch's `worker_init_fn`.

    torch watches the parent process, which here is the server, and the server lives as long as its processes.
    """
    prepare_libraries()
    sys.excepthook = tell_of_defects
    rank = multiprocessing.parent_process()
    assert rank is not None, "a data-loading process has a parent"

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name=f"watch-rank-{worker}", daemon=True).start()
