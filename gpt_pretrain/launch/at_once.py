"""The end of a process that has begun nothing: `python -m` imports this first, and it imports next to nothing.

`launch/signals.py` has the other ends.
"""

# A Python that is too old must read this before it is told so.
from __future__ import annotations

import atexit
import os
import signal

# EX_TEMPFAIL of sysexits(3): "the user is invited to retry the operation".
REQUEUE = 75
# 128 + the signal's number, as in shells.
INTERRUPTED = 128 + signal.SIGINT
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE}


class AtOnce:
    """A signal handler that ends the process, with the signal's exit code or the one that is decided already."""

    def __init__(self, code: int | None = None) -> None:
        self._code = code

    def __call__(self, number: int, frame: object) -> None:
        """What Python calls with the signal."""
        os._exit(CODES[signal.Signals(number)] if self._code is None else self._code)


def heard() -> list[signal.Signals]:
    """The signals that end a command: a shell starts background processes with Ctrl-C ignored."""
    return [number for number in CODES if signal.getsignal(number) is not signal.SIG_IGN]


def end_at_once() -> None:
    """From now on, signals end this process at once, until it is about to be gone with an exit code of its own."""
    for number in heard():
        signal.signal(number, AtOnce())
    atexit.register(_ignore)


def _ignore() -> None:
    # Python takes its handlers away before it has ended, and the signal itself would then be the exit code.
    for number in heard():
        signal.signal(number, signal.SIG_IGN)
