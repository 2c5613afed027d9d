"""The run directory: the one that the user gave, or one named by the time of the start; one run at a time holds it.

`RUN_DIR/lock` is a small JSON file that names the process that writes there. Whoever judges or changes it holds
`filelock`'s lock on `RUN_DIR/.lock` for that moment, so one of two starts wins. That lock cannot be held for the whole
run: a lost node keeps its locks on a network file system, and nobody could say whose they are. So the file is valid as
long as its process lives:

- Under the same kernel the process is looked up by its number and its start time, because numbers are reused. The
  identity of the kernel's boot tells, not the host's name, which several machines may have.
- Anywhere else, also after a reboot, the file's age decides, as its run renews it every RENEW_S: after STALE_S it is
  left over. Both times are the file system's, so the hosts' clocks do not matter.
- A job that Slurm has restarted takes over the file of its own earlier start at once.

`HeldDirectory` also notices if the path leads to another directory while the run lives, or the file to another run.
"""

import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import check_own_file, read_regular, write_file
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.process import Process, this_process

RENEW_S = 20.0
STALE_S = 120.0
Kind = Literal["a run", "a benchmark", "a comparison"]
"""What a command leaves in its run directory."""
# Files by which each is recognized. The first one found decides, so a run stays a run whatever else lies beside it.
_SIGNS: Mapping[Kind, tuple[str, ...]] = {
    "a run": ("metrics.jsonl", "checkpoints"),
    # The second sign is written first and may be all that a stopped command left; likewise below.
    "a benchmark": ("benchmark.json", "machine/task.json"),
    "a comparison": ("compare.json", "runs/*_seed_*"),
}
# Reading and writing a small file takes milliseconds, even with several starts at once.
_JUDGE_S = 30.0


def check_run_dir(config: Config, kind: Kind | None = None) -> None:
    """Refuses a run directory that cannot be made or written, before anything expensive; makes nothing.

    `kind` is what the command will leave there; None: a file that conflicts with nothing.
    """
    if config.run_dir is not None and kind is not None:
        check_contents(config.run_dir, kind)
    _probe(config.run_dir, nearest_existing(Path(config.run_dir or "outputs").absolute()))


def nearest_existing(path: Path) -> Path:
    """The first of an absolute path and its parents that exists."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def check_contents(run_dir: str, kind: Kind) -> None:
    """Refuses a directory, which need not exist, if it cannot be read or another command has left something there."""
    found = ((held, sign) for held, signs in _SIGNS.items() for sign in signs if any(Path(run_dir).glob(sign)))
    try:
        held, sign = next(found, (kind, ""))
    except OSError as error:
        raise UserError(_refusal(run_dir, error)) from error
    if held != kind:
        raise UserError(
            f"run_dir={run_dir} holds {held} ({sign}), which {kind} would overwrite; give another run_dir, or leave "
            "it out"
        )


def make_run_dir(given: str | None, name: str) -> Path:
    """Makes the directory that a command writes to, `run_dir` or `outputs/DATE/TIME_NAME`; returns its full path."""
    try:
        if given is None:
            run_dir = _new_directory(Path(f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}_{name}").absolute())
        else:
            run_dir = Path(given).absolute()
            run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_refusal(given, error)) from error
    _probe(given, run_dir)
    return run_dir


def _probe(given: str | None, directory: Path) -> None:
    # Permission bits say nothing about read-only mounts, quotas or file systems without files; a nameless file tells.
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(_refusal(given, error, directory)) from error


def _refusal(given: str | None, error: OSError, place: Path | None = None) -> str:
    key = "run_dir=null (outputs/DATE/TIME_NAME)" if given is None else f"run_dir={given}"
    reason = f"{error.strerror or error} at {place or error.filename}"
    return f"{key} cannot be written: {reason}; give another one with run_dir=DIRECTORY"


def _new_directory(path: Path) -> Path:
    """Makes the path, or the first free of path_2, path_3, …: two runs may start in one second."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}_{number}")
        with suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("itertools.count never ends")


def lock_path(run_dir: Path) -> Path:
    """The file that names the process which holds a run directory."""
    return run_dir / "lock"


def check_run_lock(run_dir: Path) -> None:
    """Refuses a directory that a living run holds, naming its host and process; takes nothing."""
    _check_no_link(run_dir)
    with suppress(FileNotFoundError):
        _check_left_over(lock_path(run_dir))


@contextmanager
def run_lock(run_dir: Path) -> Iterator["HeldDirectory"]:
    """Holds an existing directory, unless a living run does.

    Raises:
        UserError: A living run does; or the directory gives no lock.
    """
    path, note = lock_path(run_dir), None
    _check_no_link(run_dir)
    with _judging(path):
        with suppress(FileNotFoundError):
            note = f"took over {_check_left_over(path)}"
        held = HeldDirectory(run_dir, note)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(RENEW_S):
            # The file system may be away; the next time may succeed.
            with suppress(OSError, UserError):
                held.renew()

    renewal = threading.Thread(target=renew, name="renew-run-lock", daemon=True)
    renewal.start()
    try:
        yield held
    finally:
        released.set()
        renewal.join()
        held.release()


class HeldDirectory:
    """A run directory that this process holds: made while its lock file may be written (`_judging`)."""

    def __init__(self, run_dir: Path, note: str | None) -> None:
        self.note = note
        """Whose left-over lock it took over and why, for the user; None if there was none."""
        self._run_dir = run_dir
        self._path = lock_path(run_dir)
        self._lock = self._new_lock()
        self._directory = os.open(run_dir, os.O_RDONLY)
        # Not every file system gives a file one number for as long as it is open.
        self._is_watched = _leads_to(run_dir, self._directory) and _leads_to(self._path, self._lock)

    def _new_lock(self) -> int:
        # A new file: the old one's process may live after all, but renews and deletes only its own.
        write_file(self._path, this_process().to_json() + "\n")
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)

    def problem(self) -> str | None:
        """Why this process should write there no more, and what to do; None if nothing speaks against it."""
        if not self._is_watched:
            return None
        if not _leads_to(self._run_dir, self._directory):
            return (
                f"run_dir={self._run_dir} is not the directory any more in which this run began: it was moved or "
                "deleted, or its disk unmounted; put it back at this path, or end the run and start it again with the "
                "directory's new place as run_dir"
            )
        if _leads_to(self._path, self._lock) or not os.path.lexists(self._path):
            return None
        holder = Process.read(read_regular(self._path))
        return (
            f"run_dir={self._run_dir} is held by another run, {holder or 'which is unknown'}: this run's lock "
            f"{self._path} was deleted or replaced while it trained; end one of the two"
        )

    def renew(self) -> None:
        """Shows others that this process lives; makes the lock file anew if somebody has deleted it.

        Raises:
            OSError: The file system is away.
            UserError: Another start judges the file for too long.
        """
        os.utime(self._lock)
        if os.path.lexists(self._path) or not _leads_to(self._run_dir, self._directory):
            return
        with _judging(self._path):
            if not os.path.lexists(self._path):
                deleted, self._lock = self._lock, self._new_lock()
                os.close(deleted)

    def release(self) -> None:
        """Deletes the lock file, unless it is another run's by now: error messages suggest to delete it."""
        with suppress(OSError, UserError):
            if _leads_to(self._run_dir, self._directory):
                with _judging(self._path):
                    if _leads_to(self._path, self._lock):
                        self._path.unlink()
                        _guard_path(self._path).unlink(missing_ok=True)
        os.close(self._lock)
        os.close(self._directory)


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether a path leads to an open file or directory; also true if the file system does not say."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def _check_no_link(run_dir: Path) -> None:
    """Refuses links, which would lead to a lock elsewhere or to nothing, and pipes."""
    with suppress(OSError):
        for path in (lock_path(run_dir), _guard_path(lock_path(run_dir))):
            check_own_file(path)


def _guard_path(path: Path) -> Path:
    return path.with_name(f".{path.name}")


@contextmanager
def _judging(path: Path) -> Iterator[None]:
    """Encloses reading, judging and replacing the lock file."""
    place = _guard_path(path)
    try:
        guard = FileLock(place, timeout=_JUDGE_S).acquire()
    except Timeout:
        raise UserError(
            f"run_dir={path.parent}: another start has held {place} for {_JUDGE_S:.0f} s; if there is none, delete it"
        ) from None
    except OSError as error:
        raise UserError(
            f"run_dir={path.parent}: its file system gives no lock on {place} ({error.strerror or error}), without "
            "which two runs may write there; give a run_dir on another one"
        ) from error
    with guard:
        yield


def _check_left_over(path: Path) -> str:
    """Whose lock it is and why it can be taken over; a UserError if it cannot be."""
    holder, me = Process.read(read_regular(path)), this_process()
    if holder is None:
        whose, known = "an unreadable lock", "one whose lock is unreadable"
    else:
        whose, known = f"the lock of {holder}", str(holder)
        if me.restarts_job_of(holder):
            return f"{whose}: Slurm has restarted that job"
        # Without a boot's identity another machine of the same name could be meant.
        if me.boot is not None and me.can_see(holder):
            if holder.has_ended():
                return f"{whose}: that process is gone"
            raise UserError(
                f"run_dir={path.parent} is in use by another run: {known}; wait for its end, end it, or give "
                "another run_dir"
            )
    with tempfile.TemporaryFile(dir=path.parent) as now:
        age_s = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    if age_s < -RENEW_S:
        # The file system's clock was set back. From now on the age tells again; a living run renews it anyway.
        with suppress(OSError):
            os.utime(path)
    if age_s > STALE_S:
        return f"{whose}: it was not renewed for {age_s:.0f} s"
    raise UserError(
        f"run_dir={path.parent} is in use by another run: {known}; its lock was "
        f"renewed {max(0.0, age_s):.0f} s ago. End that run or give another run_dir; if it is gone, start again in "
        f"{STALE_S:.0f} s or delete {path}"
    )
