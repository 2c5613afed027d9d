"""How Ctrl-C, SIGTERM and SIGUSR1 end a command until its first step, within a second or two and without a traceback.

    end_at_once           from the first import of `python -m` on (launch/at_once.py): nothing has begun
    ended_at_once         while others' code would misunderstand an exception
    ended_by_signals      while a command works: an exception, so that it can end its children and remove its files
    ended_while_waiting   while C code keeps the main thread: the same exception, and a second later the end
    decided               while it says why it ends: signals change nothing any more

From the first step on, `training/stop.py` handles the signals.
"""

import _thread
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from gpt_pretrain.launch.at_once import CODES, INTERRUPTED, REQUEUE, AtOnce, heard

__all__ = ["INTERRUPTED", "REQUEUE", "decided", "ended_at_once", "ended_by_signals", "ended_while_waiting"]

# For Python code to end after a signal, before C code is taken for the reason that it does not.
_GRACE_S = 1.0
_SHOW_CURSOR = b"\x1b[?25h"

# A handler, or SIG_DFL and SIG_IGN; None: one that Python did not install.
_Handler = Callable[[int, FrameType | None], Any] | int | None


def _handle(handler: _Handler) -> dict[signal.Signals, _Handler]:
    """Sets the handler of all signals that are heard; returns the previous ones."""
    return {number: signal.signal(number, handler) for number in heard()}


def _restore(handlers: Mapping[signal.Signals, _Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """While libraries are imported or a configuration is composed, signals end the process: it has begun nothing.

    Libraries take an exception during an import for a missing extra and continue, or leave modules half made; Hydra and
    OmegaConf raise another one while they put their state back.
    """
    previous = _handle(AtOnce())
    try:
        yield
    finally:
        _restore(previous)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 raise a SystemExit that asks for a restart, and Ctrl-C a KeyboardInterrupt.

    A second signal ends the process at once.
    """
    previous = _handle(_raise)
    try:
        yield
    finally:
        _restore(previous)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    # Launchers repeat signals, and so do people in a hurry.
    _handle(AtOnce(CODES[signal.Signals(number)]))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(REQUEUE)


@contextmanager
def decided(code: int) -> Iterator[None]:
    """Inside, signals are ignored: the process says why it ends with `code`, and afterwards ends so whatever comes."""
    previous = _handle(signal.SIG_IGN)
    try:
        yield
    finally:
        # A call from Python decides nothing about its process.
        is_own = any(isinstance(handler, AtOnce) for handler in previous.values())
        _restore(dict.fromkeys(previous, AtOnce(code)) if is_own else previous)


@contextmanager
def ended_while_waiting() -> Iterator[None]:
    """While C code may keep the main thread, signals end the process a second later, if its handlers have not by then.

    Python calls its handlers only between its own instructions. Torch waits in C++ for other ranks for up to half an
    hour, and a tokenizer is trained in Rust for minutes. But the signal's number is written to a descriptor at once,
    where another thread reads it. What is in progress must survive SIGKILL.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()

    def listen() -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] in CODES and not left.wait(_GRACE_S):
                    if os.isatty(2):
                        # A progress bar hides it.
                        os.write(2, _SHOW_CURSOR)
                    os._exit(CODES[signal.Signals(number[0])])

    # Not a `Thread`: its start waits for the new thread to run, and for ever if memory runs out before it does.
    _thread.start_new_thread(listen, ())
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        writer.close()
