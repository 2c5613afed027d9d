"""Runs that cost a second each, for tests that start, kill and resume many: forks of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.launching import REPOSITORY, clean_environment

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
                # A child that has ended waits for its parent to ask for its exit code: the number is its own.
                os.killpg(self.pids[rank], signal.SIGKILL)

    def text(self) -> str:
        return "".join(path.read_text(errors="replace")[-4000:] for path in self.outputs if path.exists())


class RunParent:
    """The process that runs are forked from.

    Args:
        env: Variables of all runs beside the inherited ones: `gpu_environment` for runs on GPUs.
        has_imported: A life costs a second as the parent has imported everything; not for GPUs, which a fork of a
            process that has touched one cannot use.
    """

    def __init__(self, env: Mapping[str, str] | None = None, *, has_imported: bool = True) -> None:
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
    ) -> Run:
        """Starts a run whose ranks nobody watches, as under srun.

        Args:
            overrides: The command line.
            output: Receives what the ranks print, as OUTPUT.RANK.
            num_ranks: Processes.
            faults: Of each rank: names and arguments of functions in `tests.programs.faults`.
        """
        # The ranks meet at a store of this process, whose port the system picks.
        store = (
            None
            if num_ranks == 1
            else TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        )
        outputs = [output.with_suffix(f".{rank}") for rank in range(num_ranks)]
        pids = []
        for rank in range(num_ranks):
            environment = {} if store is None else _rank_environment(rank, num_ranks, store.port)
            order = {
                "start": list(overrides),
                "environment": environment,
                "output": str(outputs[rank]),
                "faults": list((faults or {}).get(rank, [])),
            }
            pids.append(self.ask(order))
        return Run(self, pids, outputs, store)

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
        self._process.wait(timeout=20)


def _rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is there already, as torchrun's is.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def run_parent(env: Mapping[str, str] | None = None, *, has_imported: bool = True) -> Iterator[RunParent]:
    """Opens the parent of runs, and ends it; the arguments are those of `RunParent`."""
    parent = RunParent(env, has_imported=has_imported)
    try:
        yield parent
    finally:
        parent.close()
