"""Signals that come before there is anything to save. From the first step on, `training/stop.py` hears them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

# EX_TEMPFAIL of sysexits(3): "the user is invited to retry the operation".
REQUEUE = 75


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While a run is prepared SIGTERM and SIGUSR1 end it at once, to be started again.

    Raises:
        SystemExit: One of them came.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(REQUEUE)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
