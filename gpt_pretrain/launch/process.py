"""This process: who it is among those of other hosts, whether such a one still lives, and its end before a run begins.

From the first step on, `training/stop.py` hears the signals.
"""

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

# EX_TEMPFAIL of sysexits(3): "the user is invited to retry the operation".
REQUEUE = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process of a run, as another one on any host can know it."""

    host: str
    process: int
    start: int | None
    """Clock ticks from the host's boot to the process's start (proc(5), stat, field 22); None without /proc."""
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

    def to_json(self) -> str:
        """One line; `read` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Self | None:
        """What `to_json` wrote; None for anything else, such as a file that a full disk cut short."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def can_see(self, other: "Process") -> bool:
        """Whether the other one's number means the same process here."""
        return (other.host, other.boot, other.namespace) == (self.host, self.boot, self.namespace)

    def has_ended(self) -> bool:
        """Whether it is gone, seen from a process that can see it; a number that is in use again deceives nobody."""
        if _start_of(self.process) != self.start:
            return True
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def this_process(env: Mapping[str, str] | None = None) -> Process:
    """The process that asks.

    Args:
        env: Environment variables; the process's own when not given.
    """
    env = os.environ if env is None else env
    restarts = env.get("SLURM_RESTART_COUNT", "")
    boot = namespace = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(
        host=socket.gethostname(),
        process=os.getpid(),
        start=_start_of(os.getpid()),
        boot=boot,
        namespace=namespace,
        job=env.get("SLURM_JOB_ID"),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


def _start_of(process: int) -> int | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    # A zombie has ended; its parent has not asked for its exit code yet.
    return None if state in "ZX" else int(fields[18])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While a run is prepared, SIGTERM and SIGUSR1 end it at once, with the exit code that asks for another start.

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
