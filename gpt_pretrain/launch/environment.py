"""This process before torch and megatron-core are imported: the driver, the libraries' settings, the signals.

OpenMP, CUDA, NCCL and Transformer Engine read their environment variables once, when they load; megatron-core and
torch warn of their own deprecations and missing extras while they are imported. From the first step on,
`training/stop.py` hears the signals.
"""

import getpass
import importlib.metadata
import logging
import os
import platform
import signal
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpt_pretrain.config.schema import Config

# EX_TEMPFAIL of sysexits(3): "the user is invited to retry the operation".
REQUEUE = 75
# 128 + the signal's number, as shells have it.
INTERRUPTED = 128 + signal.SIGINT
NVIDIA_SMI = "nvidia-smi"
# nvidia-smi answers in a second or two; in minutes, or never, where a GPU has fallen off the bus.
_DRIVER_TIMEOUT_S = 60


def library_versions() -> list[str]:
    """Python and the installed libraries that decide what a run computes: "torch 2.11.0"."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", "megatron-core", "transformer-engine", "hydra-core"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


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
    """The files of GPUs, which are there where the driver's kernel module was loaded; of one that broke later, too."""
    return sorted(str(path) for path in folder.glob("nvidia[0-9]*"))


def _name_user() -> None:
    """Names a user by number who has no name, as under `docker run --user 4242`: torch calls its caches by it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def set_environment(config: Config) -> None:
    """Sets what the run needs; call it before torch is imported. What the user has set stands."""
    model = config.model
    # OpenMP's threads spin while they wait for each other. With one other busy process on the machine they spin away
    # the time slices of the thread they wait for: a CPU step of the tiny model took 5 s instead of 0.5 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if model.tensor_model_parallel_size > 1 or model.context_parallel_size > 1:
        # One hardware queue keeps the order in which communication and the GEMM it overlaps with were launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.trainer.deterministic:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def prepare_libraries() -> None:
    """Lets torch be imported under any user, and leaves the console to the run; call it before torch is imported."""
    _name_user()
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)(\.|$)")
    # Warnings about a library's own calls name the module that the calls pass through on a machine without CUDA.
    ours = r"gpt_pretrain\.megatron\.cpu"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    # megatron-core's distributed optimizer asks its FP32 shards for .grad, which are views of parameters, no leaves.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning, module=ours
    )
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While a run is prepared, SIGTERM and SIGUSR1 end it at once, with the exit code that asks for another start.

    Raises:
        SystemExit: One of them came.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(REQUEUE)

    with _handled_by(end, signal.SIGTERM, signal.SIGUSR1):
        yield


@contextmanager
def ended_while_importing() -> Iterator[None]:
    """While libraries are imported, Ctrl-C and these signals end the process as it stands: nothing has been begun.

    Libraries take an exception in the middle of an import for a missing extra and go on, or leave modules half made.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(INTERRUPTED if number == signal.SIGINT else REQUEUE)

    # A shell starts what runs in its background with Ctrl-C ignored.
    interrupts = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else []
    with _handled_by(end, *interrupts, signal.SIGTERM, signal.SIGUSR1):
        yield


@contextmanager
def ended_while_waiting() -> Iterator[None]:
    """While torch waits for other ranks, Ctrl-C and these signals end the process as it stands: nothing has been begun.

    Python calls its handlers between two of its own instructions, and torch waits in C++ for up to half an hour. The
    signal's number is written to a descriptor at once, where another thread reads it.
    """
    codes = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE}
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while number := reader.recv(1):
            if number[0] in codes:
                os._exit(codes[signal.Signals(number[0])])

    listener = threading.Thread(target=listen, name="end-by-signals", daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        listener.join()
        reader.close()


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], NoReturn], *numbers: signal.Signals) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
