"""A process as others know it, on any host: in the lock of a run directory, and to the watchdog's peers."""

import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Self

from gpt_pretrain.config.files import parse_json
from gpt_pretrain.launch.proc import start_of


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
    cluster: str | None = None
    """Slurm's cluster, if any: each counts its own jobs."""

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

    def restarts_job_of(self, other: "Process") -> bool:
        """Whether Slurm has restarted the other's job as this process's, after the other's end."""
        is_same_job = self.job is not None and (self.cluster, self.job) == (other.cluster, other.job)
        return is_same_job and other.restarts < self.restarts

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
        cluster=os.environ.get("SLURM_CLUSTER_NAME"),
    )
