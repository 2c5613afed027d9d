"""One run to a run directory: `RUN_DIR/lock`, a small JSON file that names the process that writes there.

A killed run leaves its lock behind, so a lock is believed only as long as its process lives. On the same host that is
looked up: the process is there and started when the lock says, so that a reused number is not taken for it. Another
host cannot be asked; there the lock's time counts, which its run renews every RENEW_S. A lock not renewed for STALE_S
is left over. Ages are differences of two times of the file system, so that clocks of hosts do not matter. A job that
Slurm has restarted takes over the lock of its own earlier life at once.

Two starts at the same moment: the first to create the file wins (O_EXCL, also over NFS); a lock left over is replaced
under flock on the very file that was judged.
"""

import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from gpt_pretrain.config.errors import UserError

RENEW_S = 20.0
STALE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process behind a lock."""

    host: str
    process: int
    start: int | None
    """Clock ticks from the host's boot to the process's start (proc(5), stat, field 22); None where /proc is not."""
    boot: str | None
    """Identity of that boot."""
    namespace: str | None
    """Where the process's number counts: containers on one host number their processes from 1."""
    job: str | None
    """Slurm's job, if there is one."""
    restarts: int
    """How often Slurm had restarted it."""
    since: str
    """Date and time of the start, for people."""

    def __str__(self) -> str:
        job = "" if self.job is None else f" (Slurm job {self.job})"
        return f"process {self.process} on {self.host}{job}, started {self.since}"


def check_run_lock(run_dir: Path) -> None:
    """Whether no living run holds the directory; takes nothing.

    Raises:
        UserError: One does; names its host and process.
    """
    path = lock_path(run_dir)
    with suppress(FileNotFoundError):
        _check_left_over(path, _read(path), this_process())


@contextmanager
def run_lock(run_dir: Path) -> Iterator[str | None]:
    """Holds the directory's lock; yields what to tell of a lock that was left over and taken over.

    Args:
        run_dir: The run directory; it exists.

    Raises:
        UserError: A living run holds it; names its host and process.
    """
    path, me = lock_path(run_dir), this_process()
    file, note = _take(path, me)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(RENEW_S):
            # The file system may be away for a while; the next time may do.
            with suppress(OSError):
                os.utime(file)

    renewal = threading.Thread(target=renew, name="renew-run-lock", daemon=True)
    renewal.start()
    try:
        yield note
    finally:
        released.set()
        renewal.join()
        # Somebody may have deleted it, as errors offer, and another run may have made its own.
        with suppress(OSError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                path.unlink()
        os.close(file)


def lock_path(run_dir: Path) -> Path:
    """Where a run directory's lock is."""
    return run_dir / "lock"


def this_process(env: Mapping[str, str] | None = None) -> Holder:
    """What a lock of this process says.

    Args:
        env: Environment variables; the process's own when not given.
    """
    env = os.environ if env is None else env
    restarts = env.get("SLURM_RESTART_COUNT", "")
    return Holder(
        host=socket.gethostname(),
        process=os.getpid(),
        start=_start_of(os.getpid()),
        boot=_boot(),
        namespace=_namespace(),
        job=env.get("SLURM_JOB_ID"),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


def _take(path: Path, me: Holder) -> tuple[int, str | None]:
    """An open lock file that names this process, and what to tell of the one that it replaced."""
    content = json.dumps(asdict(me)).encode() + b"\n"
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            pass
        else:
            _write(file, content)
            return file, None
        with suppress(FileNotFoundError):
            found = path.open("rb")
            with found:
                _flock(found.fileno(), path)
                if not os.path.samestat(os.fstat(found.fileno()), os.stat(path)):
                    # Another start has just replaced it: judge that one's.
                    continue
                holder = _parse(found.read())
                why = _check_left_over(path, holder, me)
                file, name = tempfile.mkstemp(dir=path.parent, prefix=".lock.")
                _write(file, content)
                os.replace(name, path)
                who = "an unreadable lock" if holder is None else f"the lock of {holder}"
                return file, f"took over {who}: {why}"


def _write(file: int, content: bytes) -> None:
    os.write(file, content)
    os.fsync(file)


def _flock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"{path} was left by a run, and this file system has no locks with which to take it over "
            f"({error.strerror}); if no run writes to {path.parent} any more, delete the file"
        ) from error


def _check_left_over(path: Path, holder: Holder | None, me: Holder) -> str:
    """Why a lock can be taken over.

    Raises:
        UserError: It cannot.
    """
    if holder is not None:
        if holder.job is not None and holder.job == me.job and holder.restarts < me.restarts:
            return "Slurm has restarted that job"
        if holder.host == me.host and holder.boot != me.boot:
            return "its host has been booted since"
        if (holder.host, holder.namespace) == (me.host, me.namespace):
            if _start_of(holder.process) == holder.start and _exists(holder.process):
                raise UserError(
                    f"run_dir={path.parent} is in use by another run: {holder}; wait for its end, end it, or give "
                    "another run_dir"
                )
            return "that process is gone"
    age_s = _age_s(path)
    if age_s > STALE_S:
        return f"it was not renewed for {age_s:.0f} s"
    raise UserError(
        f"run_dir={path.parent} is in use by another run: {holder or 'one whose lock is unreadable'}; its lock was "
        f"renewed {max(0.0, age_s):.0f} s ago. End that run or give another run_dir; if it is gone, start again in "
        f"{STALE_S:.0f} s or delete {path}"
    )


def _read(path: Path) -> Holder | None:
    return _parse(path.read_bytes())


def _parse(content: bytes) -> Holder | None:
    """None for what no run has written whole: a full disk, a start at this very moment."""
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _age_s(path: Path) -> float:
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def _start_of(process: int) -> int | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    # A zombie has ended; its parent has not asked for its exit code yet.
    return None if state in "ZX" else int(fields[18])


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return None


def _namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
