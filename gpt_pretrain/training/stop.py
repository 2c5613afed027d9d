"""What signals and clocks ask of a run, answered on all ranks after the same step: to end early, or to save.

Ctrl-C, SIGTERM, SIGHUP (the terminal has closed, or nobody reads the output any more), SIGUSR1 (which Slurm sends ahead
of a time limit: `sbatch --signal=USR1@300`) and `trainer.max_time` reach the ranks at different moments. At each step's
end every rank tells the others what it knows through an asynchronous all-reduce of two numbers between the CPUs (gloo),
and reads the answer one step later: all ranks see the same answer at the same step, and no rank waits for its GPU. The
second number is rank 0's alone: whether `checkpoint.save_interval_minutes` have passed by its clock.

An end has an exit code that says what to do next. A checkpoint follows, so at most the present step, the next one and
the save lie between a signal and the checkpoint. Later signals change nothing, in whatever order: launchers repeat
them, and they must not break off the save.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Self

import torch

from gpt_pretrain.launch.environment import INTERRUPTED, REQUEUE
from gpt_pretrain.report.records import EndReason

EXIT_CODES: Mapping[EndReason, int] = {
    "max_steps": 0,
    "max_time": REQUEUE,
    "terminated": REQUEUE,
    "warned": REQUEUE,
    "interrupted": INTERRUPTED,
    "not_finite": 1,
    "loss_spike": 1,
}
# If ranks disagree, the last of these stands.
_REASONS: tuple[EndReason | None, ...] = (None, "max_time", "interrupted", "warned", "terminated")
_SIGNALS: Mapping[int, EndReason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",
    signal.SIGUSR1: "warned",
}
# Ends that somebody asked for end a whole sweep, not only the present run.
ASKED_FOR = frozenset(_SIGNALS.values())


class StopRequest:
    """Collects reasons to stop, and knows when to save; a context manager that owns the signal handlers meanwhile.

    The run stops `max_time_s` from now, and saves `save_interval_s` from now and from each save; None: never.
    """

    def __init__(self, max_time_s: float | None, save_interval_s: float | None = None) -> None:
        self._deadline = None if max_time_s is None else time.monotonic() + max_time_s
        self._save_interval_s = save_interval_s
        self._saved_at = time.monotonic()
        self.save_is_due = False
        """Whether it is time to save, the same answer on all ranks; `poll` sets it, `saved` clears it."""
        self._signalled: EndReason | None = None
        self._announces = torch.distributed.get_rank() == 0
        self._several_ranks = torch.distributed.get_world_size() > 1
        self._group = torch.distributed.new_group(backend="gloo") if self._several_ranks else None
        # A reason's number, and whether to save.
        self._asked = torch.zeros(2, dtype=torch.int32)
        self._pending: torch.distributed.Work | None = None
        self._saved_since_asked = False

    def __enter__(self) -> Self:
        # nohup asks that it be ignored.
        heard = [each for each in _SIGNALS if (each, signal.getsignal(each)) != (signal.SIGHUP, signal.SIG_IGN)]
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._signalled is None and self._announces:
            # Ctrl-C may have ended the reader of a pipe, too.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step\n")
        self._signalled = self._signalled or _SIGNALS[number]

    def _leave_terminal(self) -> None:
        """Writing to a closed terminal would be an error, and would end the run before its save."""
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            for descriptor in self._terminals:
                os.dup2(nowhere.fileno(), descriptor)

    def _own_reason(self) -> EndReason | None:
        if self._signalled is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "max_time"
        return self._signalled

    def _save_time_has_come(self) -> bool:
        return self._save_interval_s is not None and time.monotonic() >= self._saved_at + self._save_interval_s

    def saved(self) -> None:
        """Starts the interval anew: a save has begun, for whatever reason. Every rank calls it after the same step."""
        self._saved_at = time.monotonic()
        self.save_is_due = False
        self._saved_since_asked = True

    def poll(self) -> EndReason | None:
        """Why to stop after this step, the same answer on all ranks; call it once a step, on every rank."""
        if not self._several_ranks:
            self.save_is_due = self._save_time_has_come()
            return self._own_reason()
        agreed: EndReason | None = None
        if self._pending is not None:
            self._pending.wait()
            reason, save = self._asked.tolist()
            agreed = _REASONS[reason]
            # Rank 0 may have asked before a save that began for another reason.
            self.save_is_due = self.save_is_due or (bool(save) and not self._saved_since_asked)
        if agreed is None:
            self._saved_since_asked = False
            self._asked[0] = _REASONS.index(self._own_reason())
            self._asked[1] = self._announces and not self.save_is_due and self._save_time_has_come()
            self._pending = torch.distributed.all_reduce(
                self._asked, op=torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )
        return agreed
