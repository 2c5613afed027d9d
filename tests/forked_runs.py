"""Programs and runs that cost a second each, as tests start many: forks of one process that has imported everything.

What only a new interpreter shows, and torchrun itself, is for `tests.launching`.
"""

import atexit
import json
import os
import select
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.launching import REPOSITORY, SHARE_GPU, SHUTDOWN_S, clean_environment, on_one_gpu

Fault = Sequence[Any]


@dataclass
class Run:
    """A run of one or several ranks that was started."""

    parent: "RunParent"
    pids: Sequence[int]
    outputs: Sequence[Path]
    store: TCPStore | None
    codes: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        """Whether all ranks have ended; `codes` has their exit codes by rank, negative for signals."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                code = self.parent.ask({"poll": pid})
                if code is not None:
                    self.codes[rank] = code
        return len(self.codes) == len(self.pids)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes of all ranks."""
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            assert time.monotonic() < deadline, f"still running: {self.text()}"
            time.sleep(0.02)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def kill(self, *ranks: int) -> None:
        """SIGKILL for these ranks, or all, as far as they are left, and for what they have forked."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                _kill_group(self.pids[rank])

    def signal(self, rank: int, number: int) -> None:
        """A signal for the process of a rank alone, which has not been asked for its exit code."""
        os.kill(self.pids[rank], number)

    def wait_as_torchrun(self, timeout_s: float) -> int:
        """Exit code of a launcher that ends all ranks when one has failed.

        Raises:
            subprocess.TimeoutExpired: They did not end in time.
        """
        deadline, ending = time.monotonic() + timeout_s, False
        while not self.poll():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("", timeout_s, self.text())
            if not ending and any(self.codes.values()):
                ending, deadline = True, time.monotonic() + SHUTDOWN_S
                for rank in set(range(len(self.pids))) - self.codes.keys():
                    os.kill(self.pids[rank], signal.SIGTERM)
            time.sleep(0.05)
        codes = set(self.codes.values())
        return max(codes) if len(self.pids) == 1 else int(codes != {0})

    def text(self) -> str:
        return "".join(path.read_text(errors="replace")[-4000:] for path in self.outputs if path.exists())


def _kill_group(pid: int) -> None:
    """SIGKILL for a process, and for what it has forked; until its exit code was asked for, the number is its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has not made its own group yet.
        os.kill(pid, signal.SIGKILL)


class RunParent:
    """The process that runs are forked from.

    Args:
        env: Variables of all runs beside the inherited ones: `gpu_environment` for runs on GPUs.
        has_imported: A life costs a second as the parent has imported everything; not for GPUs, which a fork of a
            process that has touched one cannot use.
    """

    def __init__(self, env: Mapping[str, str] | None = None, *, has_imported: bool = True) -> None:
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.forked_runs", *(["--import"] if has_imported else [])],
            cwd=REPOSITORY,
            env=clean_environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(
        self,
        overrides: Sequence[str],
        output: Path,
        *,
        num_ranks: int = 1,
        faults: dict[int, Sequence[Fault]] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """Starts a run whose ranks nobody watches, as under srun.

        Args:
            overrides: The command line.
            output: Receives what the ranks print, as OUTPUT.RANK.
            num_ranks: Processes.
            faults: Of each rank: names and arguments of functions in `tests.programs.faults`.
            env: Variables of the ranks beside those that tell them their places.
        """
        outputs = [(path, path) for path in (output.with_suffix(f".{rank}") for rank in range(num_ranks))]
        return self.start_program(["-m", "gpt_pretrain", *overrides], outputs, faults or {}, env or {})

    def start_program(
        self,
        arguments: Sequence[str],
        outputs: Sequence[tuple[Path, Path]],
        faults: Mapping[int, Sequence[Fault]],
        env: Mapping[str, str],
    ) -> Run:
        """Starts a rank for each pair of files, of what it prints and of its errors; each is a session of its own."""
        num_ranks = len(outputs)
        # The ranks meet at a store of this process, whose port the system picks.
        store = (
            None
            if num_ranks == 1
            else TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        )
        pids = []
        for rank, (stdout, stderr) in enumerate(outputs):
            place = {} if store is None else _rank_environment(rank, num_ranks, store.port)
            order = {
                "start": list(arguments),
                "environment": {**place, **env},
                "stdout": str(stdout),
                "stderr": str(stderr),
                "faults": list(faults.get(rank, [])),
            }
            pids.append(self.ask(order))
        return Run(self, pids, list(dict.fromkeys(path for pair in outputs for path in pair)), store)

    def complete(
        self, num_ranks: int, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """What `fork_ranks` does."""
        with TemporaryDirectory() as folder:
            stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
            run = self.start_program(arguments, [(stdout, stderr)] * num_ranks, {}, env)
            try:
                code = run.wait_as_torchrun(timeout_s)
            finally:
                run.kill()
            return subprocess.CompletedProcess(
                arguments, code, stdout.read_text(errors="replace"), stderr.read_text(errors="replace")
            )

    def run(self, *args: Any, **kwargs: Any) -> tuple[list[int], str]:
        """Exit codes of all ranks of a run that is started so, and what they printed."""
        started = self.start(*args, **kwargs)
        try:
            return started.wait(120), started.text()
        finally:
            started.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


def _rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is there already, as torchrun's is.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return on_one_gpu(place) if SHARE_GPU in os.environ else place


@contextmanager
def run_parent(env: Mapping[str, str] | None = None, *, has_imported: bool = True) -> Iterator[RunParent]:
    """Opens the parent of runs, and ends it; the arguments are those of `RunParent`."""
    parent = RunParent(env, has_imported=has_imported)
    try:
        yield parent
    finally:
        parent.close()


class _Forking(socketserver.StreamRequestHandler):
    """Has a process forked for a stand-in of `tests.programs.forked_python`, and killed where the stand-in is."""

    parent: RunParent

    def handle(self) -> None:
        pid = self.parent.ask(json.loads(self.rfile.readline()))
        self.wfile.write(f"{pid}\n".encode())
        while (code := self.parent.ask({"poll": pid})) is None:
            if select.select([self.connection], [], [], 0.02)[0]:
                _kill_group(pid)
        with suppress(BrokenPipeError):
            self.wfile.write(f"{code}\n".encode())


@contextmanager
def forked_python(parent: RunParent, folder: Path) -> Iterator[Path]:
    """An executable in the place of Python's whose processes are forks of `parent`: for code that starts Python itself.

    torchrun takes it from the variable PYTHON_EXEC.
    """
    executable, place = folder / "python", folder / "socket"
    program = REPOSITORY / "tests" / "programs" / "forked_python.py"
    # Without site: it needs none of the packages, and starts at once.
    executable.write_text(f'#!/bin/sh\nFORKED_PYTHON={place} exec {sys.executable} -S -E {program} "$@"\n')
    executable.chmod(0o755)
    handler = type("_OfParent", (_Forking,), {"parent": parent})
    with socketserver.ThreadingUnixStreamServer(str(place), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield executable
        finally:
            server.shutdown()
            thread.join()


@cache
def shared_parent() -> RunParent:
    """The parent that all tests of this process share."""
    parent = RunParent()
    atexit.register(parent.close)
    return parent


@cache
def _interpreting_parent() -> RunParent:
    parent = RunParent({"TRITON_INTERPRET": "1"})
    atexit.register(parent.close)
    return parent


def interpret_kernels(program: str, *, num_ranks: int = 1) -> None:
    """Runs a program whose Triton kernels are interpreted on CPUs and fails with it; skips without Triton."""
    pytest.importorskip("triton")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program)
        done = _interpreting_parent().complete(num_ranks, [str(file)], 120, {})
    assert done.returncode == 0, done.stderr[-4000:]


def fork_ranks(
    num_ranks: int, arguments: Sequence[str], *, timeout_s: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Does on CPUs what `tests.launching.run_ranks` does, for a tenth of the time; its arguments are those.

    Torch and megatron-core are imported already, and of `env` they see nothing that they read only then.

    Raises:
        subprocess.TimeoutExpired: It did not end in time; carries what it printed.
    """
    return shared_parent().complete(num_ranks, arguments, timeout_s, env or {})
