"""What several ranks would tell, told once on a node: by the first that comes, whichever that is.

All ranks of a node meet the same mistake at different moments, and as soon as one has left, the launcher ends the
others, rank 0 among them. So no rank waits for another one: the first to come prints, and notes so in a file of this
user, which is locked from the look to the note. Wherever the file, its lock or the note is lost, the next rank prints:
rather twice than never.

A note holds for the ranks of one parent process that had started before it was made: what the next start finds is news
again. Where ranks write to files of their own, each file is told. Each node tells for itself.

torchrun ends with 40 lines of its own, the last of which show what the rank that failed first has left for it.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt_pretrain.launch.proc import start_of

# Clock ticks since the host's boot, and what was told.
_NOTE = re.compile(r"^([0-9]{1,20}) ([0-9a-f]{64})$", re.MULTILINE | re.ASCII)
_MOST_NOTES = 1000
# A rank holds the lock for milliseconds, unless it is stopped meanwhile.
_LOCK_S, _POLL_S = 2.0, 0.01
# Where torchrun reads why one of its ranks has failed (torch.distributed.elastic.multiprocessing.errors).
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def tell_torchrun(text: str, *, is_cause: bool = False) -> None:
    """Leaves for torchrun, if it started this process, why it ends.

    torchrun counts in whole seconds, and of ranks that fail in the same one takes any for the cause. So the rank with
    `is_cause` says that it was a second earlier.
    """
    if path := os.environ.get(_ERROR_FILE):
        shown = {"timestamp": str(int(time.time()) - is_cause), "py_callstack": text}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": shown}}), encoding="utf-8")


def tell_once(lines: Sequence[str], prefix: str) -> None:
    """Writes to standard error those of the lines, with a prefix, that no other rank of this node has written."""
    own_start, parent = start_of(os.getpid()), os.getppid()
    place = f"{parent} {start_of(parent)} {_own_file()}"
    with _notes() as file:
        notes = (
            [] if file is None else _NOTE.findall(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
        )
        told = {digest for at, digest in notes if own_start is not None and int(at) >= own_start}
        digests = {line: hashlib.sha256(f"{place} {line}".encode(errors="replace")).hexdigest() for line in lines}
        new = {line: digest for line, digest in digests.items() if digest not in told}
        text = "".join(prefix + line for line in new)
        # Before any other rank can read the note, leave, and have torchrun end this one.
        tell_torchrun(text.rstrip() or "the same as another rank", is_cause=bool(text))
        sys.stderr.write(text)
        sys.stderr.flush()
        if file is not None:
            now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
            kept = [*notes, *((now, digest) for digest in new.values())][-_MOST_NOTES:]
            content = "".join(f"{at} {digest}\n" for at, digest in kept).encode()
            # A full disk: the next rank tells them, too.
            with suppress(OSError):
                os.pwrite(file, content, 0)
                os.ftruncate(file, len(content))


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
