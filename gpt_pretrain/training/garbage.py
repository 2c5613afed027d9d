"""Garbage collection between steps, on all ranks after the same one: Python would pause each at a different moment.

After the first step everything is collected, then what is new. Modules, the model and compiled kernels are more than
400,000 objects, which live to the end. Visiting them took an H200's host 0.3 s: with one collection in 100 steps, 1.4%
of the time of GPT-2 124M.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """Collects every `interval` steps; 0: as Python does."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._has_frozen = False

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Inside, only `after_step` collects."""
        if self._interval == 0:
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collects if it is time."""
        if self._interval and (not self._has_frozen or step % self._interval == 0):
            gc.collect()
            if not self._has_frozen:
                gc.freeze()
                self._has_frozen = True
