"""What this process needs from its machine before torch is imported: driver, libraries' settings, limits.

OpenMP, CUDA, NCCL and Transformer Engine read their environment variables once, when they load; megatron-core and
torch warn of their own deprecations and missing extras while they are imported.

A limit that is reached (disk, descriptors, memory) is an error with a cause and a way out instead of a traceback. It
may be met in our own code, in a library, or in a C library that has only words for it. So an error is recognized by its
number if it has one, and otherwise by the system's words for that number.
"""

import errno
import getpass
import importlib.metadata
import logging
import os
import platform
import re
import resource
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpt_pretrain.config.errors import reason
from gpt_pretrain.config.schema import Config

NVIDIA_SMI = "nvidia-smi"
# nvidia-smi answers in a second or two; in minutes, or never, where a GPU has fallen off the bus.
_DRIVER_TIMEOUT_S = 60
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# No space, no quota left, or a file-size limit.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What is wrong with a path itself, whatever is done there: its length, a file for a folder, links in a circle, rights.
_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EACCES}
# Words of numpy, Python's tempfile and threads, the dynamic linker, and torch's allocator.
_WORDS = {
    r"\d+ requested and \d+ written": errno.ENOSPC,
    "No usable temporary directory": errno.ENOSPC,
    "can't start new thread|unable to start watchdog thread": errno.EAGAIN,
    "failed to map segment": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
}


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, loadable or not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_versions() -> list[str]:
    """Python and the installed libraries that decide what a run computes: "torch 2.11.0"."""
    names = ("torch", "megatron-core", "transformer-engine", "hydra-core")
    installed = [f"{name} {version}" for name in names if (version := installed_version(name)) is not None]
    return [f"Python {platform.python_version()}", *installed]


def ask_driver() -> tuple[str, list[str]]:
    """The driver's version and the names of all GPUs; CUDA_VISIBLE_DEVICES hides none of them.

    Raises:
        FileNotFoundError: There is no nvidia-smi.
        RuntimeError: It fails, in its own words, or does not answer.
    """
    query = [NVIDIA_SMI, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{NVIDIA_SMI} does not answer within {_DRIVER_TIMEOUT_S} s") from None
    rows = [row.split(", ", 1) for row in answer.stdout.strip().splitlines()]
    if answer.returncode != 0 or not rows or len(rows[0]) == 1:
        raise RuntimeError(" ".join((answer.stdout + answer.stderr).split()))
    return rows[0][0], [name for _, name in rows]


def device_files(folder: Path = Path("/dev")) -> list[str]:
    """The GPUs' device files, which exist once the kernel module is loaded, even if the driver breaks later."""
    return sorted(str(path) for path in folder.glob("nvidia[0-9]*"))


def host_memory_bytes() -> tuple[int, str]:
    """Bytes of memory without swap, and whose they are: "this machine" or "this process's control group"."""
    # Commands that ask for no memory start without it.
    import psutil

    installed = psutil.virtual_memory().total
    limit = min(_memory_limits(), default=installed)
    return (limit, "this process's control group") if limit < installed else (installed, "this machine")


def _memory_limits() -> Iterator[int]:
    """Limits of this process's control group and the groups around it, from the files of Linux's cgroup v2."""
    if not _OWN_GROUPS.is_file():
        return
    own = next((line[3:] for line in _OWN_GROUPS.read_text().splitlines() if line.startswith("0::")), "/")
    # In a container the path may be the host's, where only the root exists.
    group = _GROUPS / own.lstrip("/")
    for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(_GROUPS))):
        file = folder / "memory.max"
        if file.is_file() and (said := file.read_text().strip()).isdigit():
            yield int(said)


def set_environment(config: Config) -> None:
    """Sets what the run needs, before torch is imported; what the user has set takes precedence."""
    model = config.model
    # OpenMP's threads spin while they wait for each other. On a busy machine they use up the time slices of the thread
    # that they wait for: a CPU step of the tiny model took 5 s instead of 0.5 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if model.tensor_model_parallel_size > 1 or model.context_parallel_size > 1:
        # One hardware queue keeps the order in which communication and the GEMM it overlaps with were launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.trainer.deterministic:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def prepare_libraries() -> None:
    """Lets any user import torch, and leaves the console to the run; call it before torch is imported."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        # A user without a name, as under `docker run --user 4242`: torch names its caches after the user.
        os.environ["USER"] = str(os.getuid())
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)(\.|$)")
    # Without CUDA a library's calls pass through this module, which warnings about them name.
    ours = r"gpt_pretrain\.megatron\.cpu"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    # megatron-core's distributed optimizer reads .grad of its FP32 shards, which are views of parameters, not leaves.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning, module=ours
    )
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


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


def limit_met(error: BaseException) -> str | None:
    """What ran out and what to do about it, if an error says so; None for any other error."""
    for each in _chain(error):
        number = _number(each)
        if number is not None:
            where = f"{each.filename}: " if isinstance(each, OSError) and each.filename else ""
            said = "" if isinstance(each, OSError) else f" ({reason(each)})"
            return f"{where}{os.strerror(number)}{said}; {_ways_out()[number]}"
    return None


def path_refused(error: BaseException) -> str | None:
    """What is wrong with a path that nobody has looked at before it was used; None for any other error."""
    # What Python 3.12's Path.resolve makes of ELOOP.
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):
        return f"{error}; give another path"
    if not isinstance(error, OSError) or error.errno not in _PATH or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}; give another path"


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that the disk, a quota or the limit on file sizes is exhausted."""
    return any(_number(each) in _DISK_FULL for each in _chain(error))


def _number(error: BaseException) -> int | None:
    known = _ways_out()
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    # A socket that has no data yet is no limit.
    if isinstance(error, BlockingIOError):
        return None
    if isinstance(error, OSError) and error.errno in known:
        return error.errno
    words = {re.escape(os.strerror(number)): number for number in known} | _WORDS
    return next((number for pattern, number in words.items() if re.search(pattern, str(error))), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
