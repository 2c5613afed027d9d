"""Tokenizing on all cores: one process for each, `encode_process.py`, and a thread that feeds it.

Processes, because threads would share the interpreter's lock and the tokenizer's cache of words: beyond a few cores
they slow each other down.
"""

import marshal
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.tokenizer import Tokenizer

_PROGRAM = Path(__file__).with_name("encode_process.py")


@dataclass(frozen=True, slots=True)
class Part:
    """Text of one document, or of a part of it."""

    context: str
    """The last characters before it in its document; empty at the beginning of one."""
    text: str
    ends_document: bool
    num_source_bytes: int
    """Bytes read for it, for the progress bar."""
    place: tuple[int, int]
    """Number of its file, and documents of the file up to its end."""


type Batch = Sequence[Part]
type Encoded = tuple[bytes, Sequence[int]]
"""Token ids of a batch one after another, and the number of them in each part."""


def num_cores() -> int:
    """Cores that this process may use: those it is bound to, or fewer where its control group has a share of time."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        # Another version of control groups, or no bound ("max").
        return cores


class Encoders:
    """Processes that tokenize; each starts when there is work for it, and all end with the `with` block."""

    def __init__(self, tokenizer: Tokenizer, dtype: type[numpy.number]) -> None:
        self._greeting = marshal.dumps((tokenizer.to_json(), numpy.dtype(dtype).char, tokenizer.eod))
        self._num_cores = num_cores()
        self._threads = ThreadPoolExecutor(self._num_cores)
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        # A batch may take a second, and a signal must not wait for it.
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.communicate()

    def encode_all(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch with its token ids, in order; batches are read ahead, two for each core.

        Raises:
            UserError: The tokenizer cannot encode the text, or a process was killed.
        """
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            waiting.append((batch, self._threads.submit(self._encode, batch)))
            while waiting and (waiting[0][1].done() or len(waiting) > 2 * self._num_cores):
                first, encoded = waiting.popleft()
                yield first, encoded.result()
        for rest, encoded in waiting:
            yield rest, encoded.result()

    def _encode(self, batch: Batch) -> Encoded:
        process = self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            marshal.dump([(part.context, part.text, part.ends_document) for part in batch], process.stdin)
            process.stdin.flush()
            found: str | Encoded = marshal.load(process.stdout)
        except (OSError, EOFError) as error:
            raise UserError(
                f"a process that tokenizes has ended with {process.wait()}; -9 means killed, mostly because memory was "
                f"short: there is one for each of {self._num_cores} cores, and `taskset` gives fewer"
            ) from error
        if isinstance(found, str):
            raise UserError(f"the tokenizer cannot encode the text: {found}")
        return found

    def _process(self) -> subprocess.Popen[bytes]:
        """The process of this thread."""
        if not hasattr(self._of_thread, "process"):
            # -P: beside the program are our modules, and none of them must stand in for one that it imports.
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Its batches are the parallel work.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                # Ctrl-C in a terminal is for the process that started it.
                start_new_session=True,
            )
            self._processes.append(process)
            self._of_thread.process = process
            assert process.stdin is not None
            process.stdin.write(self._greeting)
        found: subprocess.Popen[bytes] = self._of_thread.process
        return found
