"""Progress of the long steps of data preparation, for the person at the terminal and for processes that wait.

A bar where standard error is a terminal, otherwise a plain line every few seconds. Whoever holds a cache entry's lock
publishes its state, and whoever waits for the lock mirrors it: so rank 0 shows a bar also where another rank, or
another run, does the work.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_PUBLISH_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0

Publish = Callable[[dict[str, Any]], None]


class Progress:
    """One step after another, each with a total: `with Progress(show=True) as p: p.start("…", 10); p.advance(1)`.

    Args:
        show: Whether this process draws anything; it publishes its state in any case.
    """

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._publish: Publish | None = None
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._stage = "starting"
        self._done = 0
        self._total = 0
        self._published_at = 0.0
        self._line_at = time.monotonic()
        self._line = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @contextmanager
    def publish_to(self, publish: Publish) -> Iterator[None]:
        """Hands the state (stage, done, total) to `publish`, at once and then at most twice a second."""
        self._publish = publish
        self._publish_now()
        try:
            yield
        finally:
            self._publish = None

    def note(self, message: str) -> None:
        """Prints a line that stays."""
        if not self._show:
            return
        if self._bar is not None:
            self._bar.console.print(message, highlight=False, markup=False)
        else:
            print(message, file=sys.stderr, flush=True)

    def start(self, stage: str, total: int) -> None:
        """Begins a step of `total` units; the step before it is over."""
        self.finish()
        self._stage, self._done, self._total = stage, 0, total
        self._publish_now()
        self._draw()

    def advance(self, amount: int) -> None:
        """Adds to what is done of the current step."""
        self._done += amount
        if time.monotonic() - self._published_at >= _PUBLISH_INTERVAL_S:
            self._publish_now()
        self._draw()

    def mirror(self, stage: str, done: int, total: int) -> None:
        """Shows the state that another process published."""
        if stage != self._stage:
            self.finish()
        self._stage, self._done, self._total = stage, done, total
        self._draw()

    def finish(self) -> None:
        """Ends the current step and its bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task = None, None

    def _publish_now(self) -> None:
        self._published_at = time.monotonic()
        if self._publish is not None:
            self._publish({"stage": self._stage, "done": self._done, "total": self._total})

    def _draw(self) -> None:
        if not self._show or self._total <= 0:
            return
        if not sys.stderr.isatty():
            self._print_line()
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
            self._bar = RichProgress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task(self._stage, total=self._total)
        assert self._task is not None
        self._bar.update(self._task, completed=self._done)

    def _print_line(self) -> None:
        line = f"{self._stage}: {min(self._done / self._total, 1.0):.0%}"
        now = time.monotonic()
        if line != self._line and now - self._line_at >= _LINE_INTERVAL_S:
            print(line, file=sys.stderr, flush=True)
            self._line, self._line_at = line, now
