"""The watchdog: a rank that dies or hangs ends the run on all ranks within a minute, with every rank's stack traces.

Without it the others would wait in a collective until its timeout of half an hour, and a scheduler would bill them. Two
threads run beside each rank's loop. One tells the other ranks that this one is alive, and hears the same of them
(`Peers`). The other judges whether they live and whether this rank makes progress: the loop marks each step, and says
when it does something longer. When the run must end, each rank writes the stacks of all its threads to
RUN_DIR/stacks/rank_N.txt and to the terminal and leaves with exit code 71, without a checkpoint: what hangs could not
be saved, and would never reach a signal handler's polite stop.

A mark is an attribute that is set, so the loop waits neither for a thread nor for the GPU. C code that keeps Python's
interpreter to itself also stops the threads. Then the others hear nothing from this rank, and those on its host send
it SIGUSR2: faulthandler's handler, which needs no interpreter, writes its stacks. Reading the stacks of running threads
can end the process with a segmentation fault, so only a rank known to be stuck is asked. faulthandler's own timer would
also fire when a suspended process continues.
"""

import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Self

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from gpt_pretrain.config.errors import RunError, UserError
from gpt_pretrain.config.files import ForeignFileError, open_to_append
from gpt_pretrain.launch.process import Process, this_process
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.told import tell_torchrun
from gpt_pretrain.megatron.parallel import on_rank_zero

EXIT_CODE = 71
TICK_S = 1.0
# A step counts as hung after this many times the longest one after the first, but not before so many seconds …
STEP_FACTOR = 10
STEP_FLOOR_S = 40.0
# … once this many steps have shown how long one takes.
LEARNING_STEPS = 20
# Between the stack traces and the end: for the other ranks' traces, and for an error that is just being raised.
GRACE_S = 5.0
# A rank beats this often …
BEAT_S = 1.0
# … and counts as hung after this long without a beat: C code may hold the interpreter while it loads a library.
SILENT_S = 40.0
# After one rank's error the others have this long to meet the same error; those that do not would wait forever.
FOLLOW_S = 15.0
# Makes a rank that cannot run Python write its stacks.
STACKS_SIGNAL = signal.SIGUSR2
# The last beat of a rank that has ended, with or without an error.
_LEFT = "left"


class Peers:
    """Which other ranks live, and so why all must end; each rank builds one once torch.distributed is open.

    Rank 0 watches all ranks, the others watch rank 0 and those on their own host. A thread writes this rank's beats to
    torch's store, which the launcher serves, and reads the others' there, round after round. Silence is counted in
    rounds: there are none while this process is suspended, or the store does not answer (Ctrl-Z stops torchrun with its
    store, but not the ranks).
    """

    def __init__(self, launch: Launch) -> None:
        self._rank = launch.rank
        self._me = this_process()
        self.why = ""
        """Why the run must end; empty while all is well."""
        self.failure = ""
        """Which rank was the first to end with an error, and with which one; empty if none has."""
        self._own_end = self._own_failure = ""
        self._leave_by: float | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if launch.world_size == 1:
            return
        self._processes: list[Process] = [self._me] * launch.world_size
        torch.distributed.all_gather_object(self._processes, self._me)
        self._watched = [
            rank
            for rank, process in enumerate(self._processes)
            if rank != launch.rank and (0 in (rank, launch.rank) or self._me.can_see(process))
        ]
        self._beats = dict.fromkeys(self._watched, "")
        self._silent_rounds = dict.fromkeys(self._watched, 0)
        self._rounds = self._rounds_after_failure = 0
        # The store may have served an earlier start by torchrun, or an earlier job of a sweep.
        token = on_rank_zero(lambda: token_hex(8))
        store = TCPStore(launch.master_addr, launch.master_port, is_master=False, wait_for_workers=False)
        self._store = PrefixStore(f"watchdog/{token}", store)
        self._thread = threading.Thread(target=self._talk, name="peers", daemon=True)
        self._thread.start()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._processes[rank].host}"

    def _talk(self) -> None:
        try:
            while not self._beat():
                self._wake.wait(BEAT_S if self._leave_by is None else BEAT_S / 10)
                self._wake.clear()
        except DistError:
            self.why = self.why or f"{self._name(0)} died, or its launcher: the store that connects the ranks is gone"

    def _beat(self) -> bool:
        """Writes this rank's news to the store, and reads and judges the others'; true after the last round."""
        self._rounds += 1
        leave_by = self._leave_by
        # Before beats are read: a rank that left in order has written so by then.
        ended = [rank for rank in self._watched if self._can_see(rank) and self._processes[rank].has_ended()]
        self._store.set(f"beat/{self._rank}", str(self._rounds) if leave_by is None else _LEFT)
        # The first one to write is heard. An empty string changes nothing and returns what is there.
        self.failure = self._store.compare_set("failure", "", self._own_failure).decode()
        end = self._store.compare_set("end", "", self._own_end).decode()
        beats = [beat.decode() for beat in self._store.multi_get([f"beat/{rank}" for rank in self._watched])]
        for rank, beat in zip(self._watched, beats, strict=True):
            is_silent = beat == self._beats[rank] and beat != _LEFT
            self._silent_rounds[rank] = self._silent_rounds[rank] + 1 if is_silent else 0
            self._beats[rank] = beat
        if leave_by is None:
            self.why = self.why or end or self._judge(ended)
            return False
        # The store may live in rank 0, whose end would cut off the others before they have left.
        return self._rank != 0 or set(beats) == {_LEFT} or time.monotonic() > leave_by

    def _judge(self, ended: Sequence[int]) -> str:
        """Why the run must end by this round's beats, if at all."""
        for rank, beat in self._beats.items():
            if rank in ended and beat != _LEFT:
                return f"{self._name(rank)} died"
            if self._silent_rounds[rank] * BEAT_S > SILENT_S:
                if self._can_see(rank):
                    # It may end at this moment.
                    with suppress(ProcessLookupError):
                        os.kill(self._processes[rank].process, STACKS_SIGNAL)
                return f"{self._name(rank)} has given no sign of life for {SILENT_S:.0f} s"
        self._rounds_after_failure += bool(self.failure)
        return f"{self.failure}, and other ranks did not" if self._rounds_after_failure * BEAT_S > FOLLOW_S else ""

    def _can_see(self, rank: int) -> bool:
        return self._me.can_see(self._processes[rank])

    def news(self) -> str:
        """What has happened to another rank, if anything; waits a moment for news."""
        until = time.monotonic() + 2 * BEAT_S
        while not (self.failure or self.why) and self._thread is not None and time.monotonic() < until:
            time.sleep(BEAT_S / 20)
        return self.failure or self.why

    def end_run(self, why: str) -> None:
        """Tells all ranks why the run ends."""
        self._own_end = " ".join(why.split())
        self._wake.set()

    def leave(self, failure: str | None) -> None:
        """Tells that this rank has ended, with a failure or without; rank 0 waits a little for the others to end."""
        if self._thread is None:
            return
        if failure is not None:
            self._own_failure = f"rank {self._rank} on {self._me.host} ended with {' '.join(failure.split())[:500]}"
        self._leave_by = time.monotonic() + (FOLLOW_S if failure is None else 2 * BEAT_S)
        self._wake.set()
        self._thread.join(FOLLOW_S + 5 * BEAT_S)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the loop has been doing since this was made."""

    doing: str
    is_step: bool
    at: float = field(default_factory=time.monotonic)


class Watchdog:
    """Watches this rank and the others while it is entered; every rank enters it.

    A rank counts as hung after `hang_timeout_s` without progress; None: nothing is watched. After `learning_steps` a
    step has less time.
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
            # Opened now, because faulthandler's handler opens nothing. An earlier start's traces stay. A pipe or a link
            # in their place is no reason not to train.
            self._file = open_to_append(self._path, replaces=True)
        except (OSError, ForeignFileError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"{self._path}: {reason}; the watchdog writes stack traces there"
            self._peers.leave(problem)
            raise UserError(
                f"{problem}. Make run_dir writable on every node, or use trainer.hang_timeout=null"
            ) from error
        faulthandler.register(STACKS_SIGNAL, file=self._file)
        # PYTHONFAULTHANDLER=1 sends the stacks of a crash to the terminal instead.
        self._reports_crashes = not faulthandler.is_enabled()
        if self._reports_crashes:
            faulthandler.enable(file=self._file)
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
            # The thread ends the process and needs its files until then.
            return
        # No traceback for an end that was asked for, or for an error shown without one.
        if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
            why = self._peers.news()
            if why:
                error.add_note(f"watchdog: {why}")
            # The disk may be full.
            with suppress(OSError):
                self._file.write(self._header("it ended with an error"))
                traceback.print_exception(error, file=self._file)
                self._file.flush()
            if why and not self._peers.failure:
                # This rank's own error is only a broken connection.
                traceback.print_exception(error)
                self._end(why)
        self._peers.leave(None if error is None else f"{type(error).__name__}: {error}")
        faulthandler.unregister(STACKS_SIGNAL)
        if self._reports_crashes:
            faulthandler.disable()
        with suppress(OSError):
            self._file.close()
        # Somebody may have removed them. The last rank removes the directory.
        with suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()

    def step_begins(self, step: int) -> None:
        """Marks the beginning of a step, which is the end of the last one."""
        self._begin(_Mark(f"step {step}", is_step=True))

    def steps_grow(self) -> None:
        """This step and those after it take longer: they have the whole timeout until some have shown how long."""
        self._num_steps = 0

    def progress(self, doing: str) -> None:
        """Marks progress in something that is not a step."""
        self._begin(_Mark(doing, is_step=False))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Encloses what may take longer than a step."""
        self.progress(doing)
        yield
        self.progress(f"what follows {doing}")

    def _begin(self, mark: _Mark) -> None:
        ended, self._mark = self._mark, mark
        if ended.is_step:
            # The first one, which loads kernels and proves FP8, shows nothing of the others.
            if self._num_steps > 0:
                self._longest_step_s = max(self._longest_step_s, mark.at - ended.at)
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
            # Time in which this process was stopped (a suspended job, a closed laptop) does not count: the others were
            # stopped with it.
            now = time.monotonic()
            passed_s, looked_at = min(now - looked_at, 2 * TICK_S), now
            mark = self._mark
            idle_s = idle_s + passed_s if mark is seen else 0.0
            seen = mark
            why = self._peers.why
            if not why and idle_s > self._limit_s(mark):
                why = (
                    f"{self._name} has made no progress for {self._limit_s(mark):.0f} s in {mark.doing} "
                    f"(trainer.hang_timeout={self._hang_timeout_s:g})"
                )
            if why and not self._leaving.is_set():
                self._end(why)

    def _end(self, why: str) -> None:
        """Ends this process, and tells the others why they must end."""
        self._ending.set()
        try:
            self._peers.end_run(why)
            tell_torchrun(f"watchdog: {why}")
            header = self._header(why).encode()
            # Straight to the descriptors: the thread that hangs may hold the lock of sys.stderr.
            for descriptor in (self._file.fileno(), 2):
                # If the disk is full or the terminal gone, the other one may work.
                with suppress(OSError):
                    os.write(descriptor, header)
                    faulthandler.dump_traceback(file=descriptor, all_threads=True)
            time.sleep(GRACE_S)
        finally:
            os._exit(EXIT_CODE)

    def _header(self, why: str) -> str:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"\nwatchdog: {why}\n{now}, {self._name}, process {os.getpid()}; all stacks: {self._path.parent}\n"
