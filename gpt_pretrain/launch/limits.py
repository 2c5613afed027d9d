"""What the system has no more of (disk, descriptors, memory), told as a cause and a way out instead of a traceback.

Who meets a limit first is chance: our own code, a library's, a C library that has only words for it. So an error is
known by its number where it has one, and otherwise by the system's words for that number.
"""

import errno
import os
import re
import resource
from collections.abc import Iterator, Mapping

from gpt_pretrain.config.errors import reason

# What a full disk answers: no space, no quota left, or a file-size limit.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _limit(kind: int, unit: int = 1) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)


def _ways_out() -> Mapping[int, str]:
    memory = f"ulimit -v is {_limit(resource.RLIMIT_AS, 1024)}; raise it, or use a machine or a job with more memory"
    return {
        errno.ENOSPC: "free space on that disk, or write to another one",
        errno.EDQUOT: "your quota on that disk is used up; free space, or write to another one",
        errno.EFBIG: f"ulimit -f is {_limit(resource.RLIMIT_FSIZE, 1024)}; raise it, or write to another disk",
        errno.EROFS: "write to another disk",
        errno.EMFILE: f"ulimit -n is {_limit(resource.RLIMIT_NOFILE)}; raise it: ulimit -n 4096",
        errno.ENFILE: "the whole machine has no more descriptors; end other programs",
        errno.ENOMEM: memory,
        errno.EAGAIN: f"ulimit -u is {_limit(resource.RLIMIT_NPROC)}; raise it, or end other programs; or {memory}",
    }


# Of numpy, Python's tempfile and threads, the dynamic linker, and torch's allocator.
_WORDS = {
    r"\d+ requested and \d+ written": errno.ENOSPC,
    "No usable temporary directory": errno.ENOSPC,
    "can't start new thread|unable to start watchdog thread": errno.EAGAIN,
    "failed to map segment": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
}


def limit_met(error: BaseException) -> str | None:
    """What ran out and what to do about it, where an error says so; None for any other error."""
    for each in _chain(error):
        number = _number(each)
        if number is not None:
            where = f"{each.filename}: " if isinstance(each, OSError) and each.filename else ""
            said = "" if isinstance(each, OSError) else f" ({reason(each)})"
            return f"{where}{os.strerror(number)}{said}; {_ways_out()[number]}"
    return None


def disk_is_full(error: BaseException) -> bool:
    """Whether an error of writing says that the disk, a quota or the limit on file sizes takes no more."""
    return any(_number(each) in _DISK_FULL for each in _chain(error))


def _number(error: BaseException) -> int | None:
    known = _ways_out()
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    # That a socket has nothing yet is no limit.
    if isinstance(error, BlockingIOError):
        return None
    if isinstance(error, OSError) and error.errno in known:
        return error.errno
    words = {re.escape(os.strerror(number)): number for number in known} | _WORDS
    return next((number for pattern, number in words.items() if re.search(pattern, str(error))), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
