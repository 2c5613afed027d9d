"""The watchdog: a rank that dies or hangs ends the run on all ranks within a minute, with every rank's stack traces.

Without it the others wait in a collective for a rank that will not come, until its timeout of half an hour, and a
scheduler bills them. A thread on each rank hears whether the others live (`peers`) and whether this one gets on: the
loop marks each step, and says when it does something longer. When the run must end, each rank writes the stacks of
all its threads to RUN_DIR/stacks/rank_N.txt and to the terminal and leaves with exit code 71, without a checkpoint:
what hangs could not be saved, and a signal handler's polite stop would never be reached.

A mark is an attribute that is set: the loop waits neither for the thread nor for the GPU. C code that keeps Python's
interpreter to itself stops the thread, too; the others then hear nothing of this rank, and faulthandler's own timer,
which needs no interpreter, has written its stack.
"""

import faulthandler
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from gpt_pretrain.config.errors import RunError, UserError
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.training.peers import SILENT_S, Peers

EXIT_CODE = 71
TICK_S = 1.0
# A step counts as hung after this many times the longest one so far, though not before so many seconds …
STEP_FACTOR = 10
STEP_FLOOR_S = 40.0
# … once this many steps have shown how long one takes.
LEARNING_STEPS = 20
# Between the stack traces and the end: for the other ranks' traces, and for an error that is just being raised.
GRACE_S = 5.0


class _Mark:
    """What the loop does, since this object was made."""

    __slots__ = ("at", "doing", "is_step")

    def __init__(self, doing: str, *, is_step: bool) -> None:
        self.doing = doing
        self.is_step = is_step
        self.at = time.monotonic()


class Watchdog:
    """Watches this rank and the others while it is entered; every rank enters it.

    Args:
        hang_timeout_s: Seconds without progress after which a rank counts as hung; None: nothing is watched.
        learning_steps: Steps that show how long a step takes: from then on a step has less time.
        launch: This process's place in the run.
        run_dir: Receives `stacks/rank_N.txt`.
    """

    def __init__(self, hang_timeout_s: float | None, *, learning_steps: int, launch: Launch, run_dir: Path) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._learning_steps = learning_steps
        self._launch = launch
        self._name = f"rank {launch.rank} on {socket.gethostname()}"
        self._path = run_dir / "stacks" / f"rank_{launch.rank}.txt"
        self._mark = _Mark("building model and data", is_step=False)
        self._num_steps = 0
        self._longest_step_s = 0.0
        self._leaving = threading.Event()
        self._ending = threading.Event()
        self._heard_last: str | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._hang_timeout_s is None:
            return self
        self._peers = Peers(self._launch)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened now, for faulthandler's timer opens nothing. An earlier start's traces stay.
            self._file: TextIO = self._path.open("a", encoding="utf-8")
        except OSError as error:
            problem = f"{self._path}: {error.strerror or error}; the watchdog writes stack traces there"
            self._peers.leave(problem)
            raise UserError(
                f"{problem}. Make run_dir writable on every node, or use trainer.hang_timeout=null"
            ) from error
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._leaving.set()
        self._peers.wake()
        self._thread.join(timeout=GRACE_S)
        if self._ending.is_set():
            # The thread ends the process, and has its files open until then.
            return
        faulthandler.cancel_dump_traceback_later()
        # What was asked for, or is told without a traceback, needs none here.
        if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
            cause = self._news_of_others()
            if cause is not None:
                # This rank's own error may be no more than a broken connection.
                error.add_note(f"watchdog: {cause}")
            self._file.write(self._header("it ended with an error"))
            traceback.print_exception(error, file=self._file)
        self._peers.leave(None if error is None else f"{type(error).__name__}: {error}")
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()
            # The last of the ranks succeeds.
            with suppress(OSError):
                self._path.parent.rmdir()

    def _news_of_others(self) -> str | None:
        """What has happened to another rank, if anything has: what is on its way has a moment to arrive."""
        why, until = self._heard_last, time.monotonic() + TICK_S
        # What woke the thread may still be there, and end the first wait at once.
        while why is None and self._peers.first_failure() is None and (left_s := until - time.monotonic()) > 0:
            why, _ = self._peers.listen(left_s)
        return self._peers.first_failure() or why

    def step_begins(self, step: int) -> None:
        """Marks the beginning of a step, which is the end of the last one."""
        self._learn()
        self._mark = _Mark(f"step {step}", is_step=True)

    def progress(self, doing: str) -> None:
        """Marks that something gets on which is no step."""
        self._learn()
        self._mark = _Mark(doing, is_step=False)

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Around something that may take longer than a step."""
        self.progress(doing)
        yield
        self.progress(f"what follows {doing}")

    def _learn(self) -> None:
        mark = self._mark
        if mark.is_step:
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - mark.at)
            self._num_steps += 1

    def _limit_s(self, mark: _Mark) -> float:
        assert self._hang_timeout_s is not None
        if not mark.is_step or self._num_steps < self._learning_steps:
            return self._hang_timeout_s
        return min(self._hang_timeout_s, max(STEP_FLOOR_S, STEP_FACTOR * self._longest_step_s))

    def _watch(self) -> None:
        seen, idle_s = self._mark, 0.0
        while not self._leaving.is_set():
            # Fires if this thread gets no turn any more.
            faulthandler.dump_traceback_later(SILENT_S, file=self._file)
            why, passed_s = self._peers.listen(TICK_S)
            mark = self._mark
            idle_s = idle_s + passed_s if mark is seen else 0.0
            seen = mark
            if why is None and idle_s > self._limit_s(mark):
                why = (
                    f"{self._name} has made no progress for {self._limit_s(mark):.0f} s in {mark.doing} "
                    f"(trainer.hang_timeout={self._hang_timeout_s:g})"
                )
            if why is not None and not self._leaving.is_set():
                self._end(why)
            # Told once: what this rank hears while it leaves is why it does.
            self._heard_last = why

    def _end(self, why: str) -> None:
        """Ends this process, and says to the others why they must end."""
        self._ending.set()
        try:
            self._peers.end_run(why)
            faulthandler.cancel_dump_traceback_later()
            header = self._header(why).encode()
            # Straight to the descriptors: the thread that hangs may hold the lock of sys.stderr.
            for descriptor in (self._file.fileno(), 2):
                # A full disk or a terminal that is gone: the other one may do.
                with suppress(OSError):
                    os.write(descriptor, header)
                    faulthandler.dump_traceback(file=descriptor, all_threads=True)
            time.sleep(GRACE_S)
        finally:
            os._exit(EXIT_CODE)

    def _header(self, why: str) -> str:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"\nwatchdog: {why}\n{now}, {self._name}, process {os.getpid()}; all stacks: {self._path.parent}\n"
