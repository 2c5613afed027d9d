"""The run directory: the one that the user gave, or one named by the time of the start; one run at a time holds it.

`RUN_DIR/lock` is a small JSON file that names the process that writes there. Whoever judges or changes it holds
`filelock`'s lock on `RUN_DIR/.lock` for that moment, so one of two starts wins. That lock cannot be held for the whole
run: a lost node keeps its locks on a network file system, and nobody could say whose they are. So the file is valid as
long as its process lives:

- On the same host the process is looked up by its number and its start time, because numbers are reused.
- Another host cannot be asked. There the file's age decides, as its run renews it every RENEW_S: after STALE_S it is
  left over. Both times are the file system's, so the hosts' clocks do not matter.
- A job that Slurm has restarted takes over the file of its own earlier start at once.
"""

import itertools
import json
import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from filelock import FileLock, Timeout

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import parse_json, write_file
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.proc import start_of

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process of a run, as others on any host know it."""

    host: str
    process: int
    start: int | None
    """Clock ticks from the host's boot to the process's start (proc(5), stat, field 22); None without /proc."""
    boot: str | None
    """Identity of that boot."""
    namespace: str | None
    """Where the number is valid: each container on a host counts from 1."""
    job: str | None
    """Slurm's job, if any."""
    restarts: int
    """How often Slurm had restarted the job."""
    since: str
    """Date and time of the start, for the user."""

    def __str__(self) -> str:
        job = "" if self.job is None else f" (Slurm job {self.job})"
        return f"process {self.process} on {self.host}{job}, started {self.since}"

    def to_json(self) -> str:
        """One line; `read` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Self | None:
        """What `to_json` wrote; None for anything else, such as a file truncated by a full disk."""
        try:
            read = cls(**parse_json(text))
        except (ValueError, TypeError):
            return None
        # A field's type is a class or a union of some, not their names.
        fits = all(isinstance(getattr(read, field.name), field.type) for field in fields(cls))  # type: ignore[arg-type]
        return read if fits and read.process > 0 else None

    def can_see(self, other: "Process") -> bool:
        """Whether the other's number means the same process here."""
        return (other.host, other.boot, other.namespace) == (self.host, self.boot, self.namespace)

    def has_ended(self) -> bool:
        """Whether it is gone, asked by a process that can see it; a reused number is another process."""
        if start_of(self.process) != self.start:
            return True
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            # Another user's process lives, but may not be signaled.
            return False
        return False


def this_process() -> Process:
    """The calling process."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    boot = namespace = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(
        host=socket.gethostname(),
        process=os.getpid(),
        start=start_of(os.getpid()),
        boot=boot,
        namespace=namespace,
        job=os.environ.get("SLURM_JOB_ID"),
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


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
def run_lock(run_dir: Path) -> Iterator[str | None]:
    """Holds an existing directory, unless a living run does; yields a note if it took over a left-over lock."""
    path, note = lock_path(run_dir), None
    _check_no_link(run_dir)
    with _judging(path):
        with suppress(FileNotFoundError):
            note = f"took over {_check_left_over(path)}"
        # A new file: the old one's process may live after all, but renews and deletes only its own.
        write_file(path, this_process().to_json() + "\n")
        file = os.open(path, os.O_RDWR)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(RENEW_S):
            # The file system may be away; the next time may succeed.
            with suppress(OSError):
                os.utime(file)

    renewal = threading.Thread(target=renew, name="renew-run-lock", daemon=True)
    renewal.start()
    try:
        yield note
    finally:
        released.set()
        renewal.join()
        # Somebody may have deleted it, as error messages suggest, and another run may have made its own.
        with suppress(OSError, UserError), _judging(path):
            if os.path.samestat(os.fstat(file), path.stat()):
                path.unlink()
                _guard_path(path).unlink(missing_ok=True)
        os.close(file)


def _check_no_link(run_dir: Path) -> None:
    """Refuses links, which would lead to a lock elsewhere or to nothing, and pipes."""
    for path in (lock_path(run_dir), _guard_path(lock_path(run_dir))):
        with suppress(OSError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise UserError(f"{path} is not a regular file, which a run needs to hold its directory; delete it")


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
    holder, me = Process.read(path.read_bytes()), this_process()
    if holder is None:
        whose, known = "an unreadable lock", "one whose lock is unreadable"
    else:
        whose, known = f"the lock of {holder}", str(holder)
        if holder.job is not None and holder.job == me.job and holder.restarts < me.restarts:
            return f"{whose}: Slurm has restarted that job"
        if holder.host == me.host and holder.boot != me.boot:
            return f"{whose}: its host has rebooted since"
        if me.can_see(holder):
            if holder.has_ended():
                return f"{whose}: that process is gone"
            raise UserError(
                f"run_dir={path.parent} is in use by another run: {known}; wait for its end, end it, or give "
                "another run_dir"
            )
    with tempfile.TemporaryFile(dir=path.parent) as now:
        age_s = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    if age_s > STALE_S:
        return f"{whose}: it was not renewed for {age_s:.0f} s"
    raise UserError(
        f"run_dir={path.parent} is in use by another run: {known}; its lock was "
        f"renewed {max(0.0, age_s):.0f} s ago. End that run or give another run_dir; if it is gone, start again in "
        f"{STALE_S:.0f} s or delete {path}"
    )
