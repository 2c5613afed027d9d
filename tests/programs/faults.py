"""What goes wrong in runs that tests start: each function makes its own process die, hang or fail at a certain point.

`tests/programs/forked_runs.py` calls them before the run begins.
"""

import ctypes
import os
import signal
import time

import torch

from gpt_pretrain.training import peers, trainer, watchdog


def hurry():
    """The watchdog's times, shortened."""
    peers.BEAT_S, peers.SILENT_S, peers.FOLLOW_S = 0.5, 4.0, 3.0
    watchdog.SILENT_S, watchdog.TICK_S, watchdog.GRACE_S, watchdog.STEP_FLOOR_S = 4.0, 0.2, 1.5, 2.0


def _at_step(number, fault):
    train_step, steps = trainer.train_step, []

    def faulty_step(*arguments):
        steps.append(None)
        if len(steps) == number:
            fault()
        return train_step(*arguments)

    trainer.train_step = faulty_step


def die_at_step(number):
    _at_step(number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleep_at_step(number):
    def hang_in_python():
        while True:
            time.sleep(3600)

    _at_step(number, hang_in_python)


def stop_at_step(number):
    _at_step(number, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def pause_at_step(number, seconds):
    """Stopped, as a suspended job is, and continued."""

    def pause():
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)

    _at_step(number, pause)


def hold_interpreter_at_step(number):
    def hang_in_c():
        # Unlike CDLL, PyDLL does not let other threads run meanwhile.
        ctypes.PyDLL(None).sleep(3600)

    _at_step(number, hang_in_c)


def fail_at_step(number):
    def fail():
        raise RuntimeError("a fault of the test")

    _at_step(number, fail)


def run_out_of_memory_at_step(number):
    def run_out():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    _at_step(number, run_out)
