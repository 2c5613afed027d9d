"""The cache directory: where it is, who may write an entry, and how an entry appears in one piece.

What is expensive to make (tokenised corpora, sample indices, scans of token files) is kept here under a key that names
everything it was made from. A process writes an entry under the entry's lock and in one piece (`config.files`): killed
at any moment, it leaves the whole entry, or a hidden directory that the next holder of the lock deletes. The kernel
drops the lock of a dead process.

The holder of an entry's lock publishes its progress, and those that wait for the lock mirror it: rank 0 shows a bar
even where another rank, or another run, does the work.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import fsync_tree, new_directory, write_file
from gpt_pretrain.config.schema import DataConfig
from gpt_pretrain.launch.environment import disk_is_full

_POLL_S = 0.2
_PUBLISH_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0


class Progress:
    """One step after another, each with a total: `with Progress(show=True) as p: p.start("…", 10); p.advance(1)`.

    It draws a bar where standard error is a terminal, otherwise a plain line every few seconds; without `show` nothing,
    but it publishes its state.
    """

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._publish: Callable[[dict[str, Any]], None] | None = None
        self._bar: RichProgress | None = None
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
    def publish_to(self, publish: Callable[[dict[str, Any]], None]) -> Iterator[None]:
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
        """Begins a step of `total` units and ends the one before."""
        self.finish()
        self._stage, self._done, self._total = stage, 0, total
        self._publish_now()
        self._draw()

    def advance(self, amount: int) -> None:
        """Counts more of the current step as done."""
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
        self._bar = None

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
            self._bar.add_task(self._stage, total=self._total)
        self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _print_line(self) -> None:
        line = f"{self._stage}: {min(self._done / self._total, 1.0):.0%}"
        now = time.monotonic()
        if line != self._line and now - self._line_at >= _LINE_INTERVAL_S:
            print(line, file=sys.stderr, flush=True)
            self._line, self._line_at = line, now


def cache_directory(data: DataConfig) -> Path:
    """The cache directory, created if missing; one that holds everything a run needs may be on a read-only disk.

    Raises:
        UserError: It cannot be created.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gpt_pretrain")
    path = (default if data.cache_dir is None else Path(data.cache_dir)).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"the cache {path} cannot be written ({error.strerror or error}), and lacks something that this run needs; "
        "set model.data.cache_dir to a directory that can be written"
    )


def fingerprint(value: Any) -> str:
    """SHA-256 (hex) of a value made of JSON types, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def file_identity(path: Path) -> list[Any]:
    """What tells a changed file from an unchanged one without reading it: path, size, time of modification."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


@contextmanager
def hold_lock(entry: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of a cache entry; while it waits, `progress` shows for whom and how far that process is.

    The lock and the holder's status, which is that of its own `progress`, lie beside the entry.

    Raises:
        UserError: The cache cannot be written.
    """
    status_path = entry.with_name(entry.name + ".status.json")
    lock = FileLock(entry.with_name(entry.name + ".lock"))
    announced = ""
    while True:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            break
        except Timeout:
            holder = _read_status(status_path)
            if holder is not None:
                who = f"process {holder['pid']} on {holder['host']}"
                if who != announced:
                    progress.note(f"waiting for {who}, which writes {entry}")
                    announced = who
                progress.mirror(holder["stage"], holder["done"], holder["total"])
            time.sleep(_POLL_S)
        except OSError as error:
            raise _unwritable(entry.parent, error) from error
    try:
        with progress.publish_to(lambda state: _write_status(status_path, state)):
            yield
    finally:
        status_path.unlink(missing_ok=True)
        lock.release()


def _read_status(path: Path) -> dict[str, Any] | None:
    # The holder may not have written its status yet, or may just have finished.
    try:
        status: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return status


def _write_status(path: Path, state: dict[str, Any]) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **state})
    write_file(path, text, wait_for_disk=False)


def write_entry(entry: Path, fill: Callable[[Path], None]) -> None:
    """Writes a directory that appears under its name complete or not at all. The entry's lock must be held.

    Raises:
        UserError: The disk is full; nothing is left behind.
    """
    with new_directory(entry) as unfinished:
        try:
            fill(unfinished)
            # Here, because the bytes written can still be counted.
            fsync_tree(unfinished)
        except OSError as error:
            if not disk_is_full(error):
                raise
            written = sum(path.stat().st_size for path in unfinished.iterdir())
            free = shutil.disk_usage(entry.parent).free
            raise UserError(
                f"no space left while writing {entry} ({error.strerror or error}): {written:,} bytes were written, "
                f"{free:,} bytes are free; free space there or set model.data.cache_dir to another disk"
            ) from error
