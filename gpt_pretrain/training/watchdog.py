"""The watchdog: a rank that dies or hangs ends the run on all ranks within a minute, with every rank's stack traces.

Without it the others wait in a collective for a rank that will not come, until its timeout of half an hour, and a
scheduler bills them. Two threads run beside each rank's loop. One hears and tells how the ranks are (`peers.Peers`).
The other judges whether they live and whether this rank makes progress: the loop marks each step, and says when it does
something longer. When the run must end, each rank writes the stacks of all its threads to RUN_DIR/stacks/rank_N.txt and
to the terminal and leaves with exit code 71, without a checkpoint: what hangs could not be saved, and a signal
handler's polite stop would never be reached.

A mark is an attribute that is set: the loop waits neither for a thread nor for the GPU. C code that keeps Python's
interpreter to itself stops the threads, too. Then the others hear nothing of this rank, and those on its host send it
SIGUSR2: faulthandler's handler, which needs no interpreter, writes its stacks. To read the stacks of threads that run
may end the process with a segmentation fault, so only a rank that is known to be stuck is asked. faulthandler's own
timer knows nothing: it also fires when a suspended process goes on.
"""

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from gpt_pretrain.config.errors import RunError, UserError
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import this_process
from gpt_pretrain.training.peers import STACKS_SIGNAL, Peers

EXIT_CODE = 71
TICK_S = 1.0
# A step counts as hung after this many times the longest one so far, though not before so many seconds …
STEP_FACTOR = 10
STEP_FLOOR_S = 40.0
# … once this many steps have shown how long one takes.
LEARNING_STEPS = 20
# Between the stack traces and the end: for the other ranks' traces, and for an error that is just being raised.
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the loop does, since this object was made."""

    doing: str
    is_step: bool
    at: float = field(default_factory=time.monotonic)


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
        self._name = f"rank {launch.rank} on {this_process().host}"
        self._path = run_dir / "stacks" / f"rank_{launch.rank}.txt"
        self._mark = _Mark("building model and data", is_step=False)
        self._num_steps = 0
        self._longest_step_s = 0.0
        self._leaving = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._hang_timeout_s is None:
            return self
        self._peers = Peers(self._launch)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened now, for faulthandler's handler opens nothing. An earlier start's traces stay.
            self._file: TextIO = self._path.open("a", encoding="utf-8")
        except OSError as error:
            problem = f"{self._path}: {error.strerror or error}; the watchdog writes stack traces there"
            self._peers.leave(problem)
            raise UserError(
                f"{problem}. Make run_dir writable on every node, or use trainer.hang_timeout=null"
            ) from error
        faulthandler.register(STACKS_SIGNAL, file=self._file)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._leaving.set()
        self._thread.join(timeout=GRACE_S)
        if self._ending.is_set():
            # The thread ends the process, and has its files open until then.
            return
        # What was asked for, or is told without a traceback, needs none here.
        if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
            why = self._peers.news()
            if why is not None:
                error.add_note(f"watchdog: {why}")
            # A full disk may be that error.
            with suppress(OSError):
                self._file.write(self._header("it ended with an error"))
                traceback.print_exception(error, file=self._file)
                self._file.flush()
            if why is not None and not self._peers.failure:
                # This rank's own error is no more than a broken connection.
                traceback.print_exception(error)
                self._end(why)
        self._peers.leave(None if error is None else f"{type(error).__name__}: {error}")
        faulthandler.unregister(STACKS_SIGNAL)
        with suppress(OSError):
            self._file.close()
        # Somebody may have removed them; and of the ranks the last removes the directory.
        with suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()

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
        seen, idle_s, looked_at = self._mark, 0.0, time.monotonic()
        while not self._leaving.is_set():
            self._leaving.wait(TICK_S)
            # Time in which this process was stopped (a suspended job, a laptop's lid) does not count: the others were
            # stopped with it.
            now = time.monotonic()
            passed_s, looked_at = min(now - looked_at, 2 * TICK_S), now
            mark = self._mark
            idle_s = idle_s + passed_s if mark is seen else 0.0
            seen = mark
            why = self._peers.check(passed_s, idle_s)
            if why is None and idle_s > self._limit_s(mark):
                why = (
                    f"{self._name} has made no progress for {self._limit_s(mark):.0f} s in {mark.doing} "
                    f"(trainer.hang_timeout={self._hang_timeout_s:g})"
                )
            if why is not None and not self._leaving.is_set():
                self._end(why)

    def _end(self, why: str) -> None:
        """Ends this process, and tells the others why they must end."""
        self._ending.set()
        try:
            self._peers.end_run(why)
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
