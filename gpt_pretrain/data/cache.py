"""The cache directory: where it is, who may write an entry, and how an entry appears in one piece.

It keeps what is expensive to make (tokenized corpora, sample indices, scans of token files) under a key that covers
everything it was made from. A process writes an entry under the entry's lock and in one piece (`config.files`). Killed
at any moment, it leaves the whole entry, or a hidden directory that the next holder of the lock deletes. The kernel
drops the lock of a dead process.

The holder of a lock publishes its progress, and processes that wait for the lock show it: rank 0 draws a bar even if
another rank, or another run, does the work.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from gpt_pretrain.config.errors import UserError, visible
from gpt_pretrain.config.files import expand_user, fsync_tree, new_directory, read_foreign_value, write_file
from gpt_pretrain.config.schema import DataConfig
from gpt_pretrain.launch.environment import disk_is_full

_POLL_S = 0.2
_PUBLISH_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0


class Progress:
    """Shows steps one after another: `with Progress(show=True) as p: p.start("…", 10); p.advance(1)`.

    With `show` it draws a bar on a terminal, and otherwise prints a line every few seconds to standard error.
    """

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._status: Path | None = None
        self._bar: RichProgress | None = None
        self._state: dict[str, Any] = {"stage": "starting", "done": 0, "total": 0, "is_bytes": False}
        self._began: tuple[float, int] | None = None
        self._published_at = 0.0
        self._line_at = time.monotonic()
        self._line = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @contextmanager
    def published(self, status: Path) -> Iterator[None]:
        """Inside, a file tells other processes the state, at most twice a second."""
        self._status = status
        try:
            self._publish()
            yield
        finally:
            self._status = None
            status.unlink(missing_ok=True)

    def note(self, message: str) -> None:
        """Prints a line that stays."""
        if not self._show:
            return
        if self._bar is not None:
            self._bar.console.print(visible(message), highlight=False, markup=False)
        else:
            print(visible(message), file=sys.stderr, flush=True)

    def start(self, stage: str, total: int, *, done: int = 0, is_bytes: bool = False) -> None:
        """Ends the current step and begins one of `total` units, of which an earlier process did `done`."""
        self.finish()
        self._state = {"stage": stage, "done": done, "total": total, "is_bytes": is_bytes}
        self._publish()
        self._draw()

    def advance(self, amount: int) -> None:
        """Counts more of the current step as done."""
        self._state["done"] += amount
        if time.monotonic() - self._published_at >= _PUBLISH_INTERVAL_S:
            self._publish()
        self._draw()

    def mirror(self, status: dict[str, Any]) -> None:
        """Shows the state that another process published."""
        if status["stage"] != self._state["stage"]:
            self.finish()
        self._state = {name: status[name] for name in self._state}
        self._draw()

    def finish(self) -> None:
        """Ends the current step and its bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._began = None

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        if self._status is not None:
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **self._state})
            write_file(self._status, text, wait_for_disk=False)

    def _draw(self) -> None:
        stage, done, total, is_bytes = self._state.values()
        if not self._show or total <= 0:
            return
        now = time.monotonic()
        # Where this process saw the step first: what was done before tells nothing of the speed.
        began_at, at_first = self._began = self._began or (now, done)
        speed = (done - at_first) / max(now - began_at, 1e-6)
        rate = f", {speed / 1e6:.1f} MB/s" if is_bytes and speed else ""
        if not sys.stderr.isatty():
            line = f"{stage}: {min(done / total, 1.0):.0%}"
            if line != self._line and now - self._line_at >= _LINE_INTERVAL_S:
                left = f", {timedelta(seconds=max(0, round((total - done) / speed)))} left" if speed else ""
                print(f"{line}{rate}{left}", file=sys.stderr, flush=True)
                self._line, self._line_at = line, now
            return
        if self._bar is None:
            columns = BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            name = TextColumn("{task.description}")
            self._bar = RichProgress(name, *columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(stage, total=total, completed=done)
        self._bar.update(self._bar.task_ids[0], completed=done, description=f"{stage}{rate}")


def cache_directory(data: DataConfig) -> Path:
    """The cache directory, created if missing. A complete one may be on a read-only disk."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gpt_pretrain")
    path = expand_user(default if data.cache_dir is None else data.cache_dir, "model.data.cache_dir").absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"the cache {path} cannot be written ({error.strerror or error}), and it lacks something that this run needs; "
        "set model.data.cache_dir to a writable directory"
    )


def fingerprint(value: Any) -> str:
    """SHA-256 (hex) of a value of JSON types; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_identity(path: Path) -> list[Any]:
    """Path, size and modification time: tells whether a file has changed without reading it."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


@contextmanager
def hold_lock(entry: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of a cache entry; while it waits, `progress` shows the holder's.

    The lock and the holder's status are files beside the entry.
    """
    status = entry.with_name(entry.name + ".status.json")
    lock = FileLock(entry.with_name(entry.name + ".lock"))
    announced = ""
    while True:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            break
        except Timeout:
            # The holder may not have written its status yet, or may just have finished. Only what it says is shown.
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                holder = read_foreign_value(status)
                who = f"process {holder['pid']} on {holder['host']}"
                if who != announced:
                    progress.note(f"waiting for {who}, which writes {entry}")
                    announced = who
                progress.mirror(holder)
            time.sleep(_POLL_S)
        except OSError as error:
            raise _unwritable(entry.parent, error) from error
    try:
        with progress.published(status):
            yield
    finally:
        lock.release()


@contextmanager
def new_entry(entry: Path, *, goes_on: bool = False) -> Iterator[Path]:
    """Makes a directory in one piece (`config.files.new_directory`); the entry's lock must be held."""
    with new_directory(entry, goes_on=goes_on) as unfinished:
        try:
            yield unfinished
            # While the bytes written can still be counted.
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


def make_once(entry: Path, progress: Progress, fill: Callable[[Path], None], *, goes_on: bool = False) -> None:
    """Makes an entry of what `fill` writes into a directory (`new_entry`), unless somebody has made it."""
    if entry.is_dir():
        return
    with hold_lock(entry, progress):
        # The previous holder of the lock may have made it.
        if not entry.is_dir():
            with new_entry(entry, goes_on=goes_on) as folder:
                fill(folder)
