"""What several ranks would tell, told once on a node: by the first that comes, whichever that is.

All ranks of a node meet the same mistake at different moments, and as soon as one has left, the launcher ends the
others, rank 0 among them. So no rank waits for another one: the first to come prints, and notes so in a file of this
user, which is locked from the look to the note. Wherever the file, its lock or the note is lost, the next rank prints:
rather twice than never.

A note holds for the ranks of one launcher's process that had started before it was made: what the next start finds is
news again. Where ranks write to files of their own, each file is told. Each node tells for itself.
"""

import fcntl
import hashlib
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.launch.proc import environment_of, parent_of, start_of

# What differs between the ranks of a launcher, and what the launcher itself does not have.
_PLACE = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
_NOTE = re.compile(r"^([0-9]{1,10}\.[0-9]{1,20}) ([0-9]{1,20}) ([0-9a-f]{64})$", re.MULTILINE | re.ASCII)
# A rank holds the lock for milliseconds, unless it is stopped meanwhile.
_LOCK_S, _POLL_S = 2.0, 0.01


@dataclass(frozen=True)
class _Note:
    launcher: str
    at: int
    """Clock ticks since the host's boot."""
    digest: str

    def __str__(self) -> str:
        return f"{self.launcher} {self.at} {self.digest}\n"


def tell_once(lines: Sequence[str], prefix: str) -> None:
    """Writes to standard error those of the lines, with a prefix, that no other rank of this node has written."""
    launcher, own_start, place = _launcher(), start_of(os.getpid()), _own_file()
    with _notes() as file:
        known = [] if file is None else _read(file)
        told = {
            note.digest
            for note in known
            if note.launcher == launcher and own_start is not None and note.at >= own_start
        }
        digests = {line: hashlib.sha256(f"{place} {line}".encode(errors="replace")).hexdigest() for line in lines}
        new = {line: digest for line, digest in digests.items() if digest not in told}
        sys.stderr.write("".join(prefix + line for line in new))
        sys.stderr.flush()
        if file is not None and launcher is not None:
            # A full disk: the next rank tells them, too.
            with suppress(OSError):
                _write(file, [*known, *(_Note(launcher, _now(), digest) for digest in new.values())])


def _now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _launcher() -> str | None:
    """The process that started the ranks of this node, whatever programs stand between; None if none can be seen."""
    place = {name: os.environ[name] for name in _PLACE if name in os.environ}
    if not place:
        return None
    process = os.getppid()
    while place.items() <= environment_of(process).items():
        process = parent_of(process)
    start = start_of(process)
    return None if start is None else f"{process}.{start}"


def _own_file() -> str:
    """Standard error if it is a file; a terminal and pipes come together in one place."""
    with suppress(OSError, ValueError):
        status = os.fstat(sys.stderr.fileno())
        if stat.S_ISREG(status.st_mode):
            return f"{status.st_dev}.{status.st_ino}"
    return ""


@contextmanager
def _notes() -> Iterator[int | None]:
    """The descriptor of this user's notes, locked; None if they cannot be had."""
    file = None
    try:
        with suppress(OSError):
            path = Path(tempfile.gettempdir(), f"gpt_pretrain-{os.getuid()}.told")
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        yield file if file is not None and _is_ours(file) and _lock(file) else None
    finally:
        if file is not None:
            os.close(file)


def _is_ours(file: int) -> bool:
    """Whether it is a file of this user: everybody may make one of its name."""
    status = os.fstat(file)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _lock(file: int) -> bool:
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return False
        else:
            return True
    return False


def _read(file: int) -> list[_Note]:
    """The notes for launchers that live; a line that a killed process left unfinished is none."""
    content = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    notes = [_Note(launcher, int(at), digest) for launcher, at, digest in _NOTE.findall(content)]
    return [note for note in notes if _lives(note.launcher)]


def _lives(launcher: str) -> bool:
    process, _, start = launcher.partition(".")
    return str(start_of(int(process))) == start


def _write(file: int, notes: list[_Note]) -> None:
    content = "".join(map(str, notes)).encode()
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
