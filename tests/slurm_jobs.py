"""Jobs of a real Slurm for tests: submitted, watched, and cancelled at the end whatever happened."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.launching import REPOSITORY, clean_environment

START = "SLURM_CONF=$(tests/slurm/start.sh) make test"
# A job that waits longer for anything has gone wrong.
PATIENCE_S = 150
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def slurm_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a user who submits from this checkout has in the environment."""
    ours = {"VENV": sys.prefix}
    if "SLURM_CONF" in os.environ:
        ours["SLURM_CONF"] = os.environ["SLURM_CONF"]
    # A cluster's partition and account are none of the tests' own.
    kept = {name: value for name, value in clean_environment(ours).items() if not name.startswith("SBATCH_")}
    return {**kept, **(env or {})}


@cache
def missing_slurm() -> str | None:
    """Why there is no Slurm to test with; None if there is one."""
    try:
        # Jobs of tests are not for a cluster on whose login node somebody tries them.
        if "ClusterName=tests" not in Path(os.environ.get("SLURM_CONF", os.devnull)).read_text():
            return f"SLURM_CONF names no Slurm of the tests' own; start one: {START}"
        found = ask("sinfo", "--noheader", "--format=%t", timeout_s=20)
    except (FileNotFoundError, subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        return f"there is no Slurm ({error}); start one: {START}"
    takes_jobs = re.search("down|drain|unk|inval", found) is None
    return None if takes_jobs else f"Slurm's nodes take no jobs ({found}); start one: {START}"


def ask(*command: str, timeout_s: float = 60, env: Mapping[str, str] | None = None) -> str:
    """What one of Slurm's commands answers."""
    done = subprocess.run(
        command, env=slurm_environment(env), capture_output=True, text=True, check=True, timeout=timeout_s
    )
    return done.stdout.strip()


def wait_for(condition: Callable[[], object], what: Callable[[], str]) -> None:
    """Waits until a condition holds; `what` is told if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


class SlurmJob:
    """A job that Slurm has accepted."""

    def __init__(self, number: str, log: Path, run_dir: Path) -> None:
        self.number = number
        self.run_dir = run_dir
        self._log = log

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def num_restarts(self) -> int:
        return int(self.field("Restarts"))

    def field(self, name: str) -> str:
        """A field of `scontrol show job`."""
        match = re.search(rf"\b{name}=(\S+)", ask("scontrol", "show", "job", self.number))
        assert match is not None
        return match.group(1)

    @property
    def text(self) -> str:
        """The job's log so far."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def last_lines(self) -> list[str]:
        return self.text.splitlines()[-5:]

    def rank_log(self, rank: int, start: int = 0) -> str:
        """What a rank has written since a start of the job, counted from 0."""
        path = self.run_dir / "logs" / f"{self.number}_{start}" / f"rank_{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step: int, start: int = 0) -> None:
        """Waits until rank 0 has said that it has done a step."""

        def done() -> bool:
            assert self.state not in _ENDED, self.text
            return f"\nstep {step}/" in self.rank_log(0, start)

        wait_for(done, lambda: f"step {step} is not reached: {self.text}")

    def wait_for_state(self, *states: str) -> None:
        wait_for(lambda: self.state in states, lambda: f"job {self.number} is {self.state}: {self.text}")

    def wait_for_end(self) -> str:
        """Waits until the job has ended and answers how."""
        self.wait_for_state(*_ENDED)
        return self.state

    def signal(self, name: str) -> None:
        """Sends a signal to the job's tasks."""
        ask("scancel", f"--signal={name}", self.number)

    def pid(self, rank: int) -> int:
        """The process of a rank; Slurm's node is this machine."""
        for line in ask("scontrol", "listpids", self.number).splitlines()[1:]:
            pid, _, _, _, task = line.split()
            if task == str(rank):
                return int(pid)
        raise AssertionError(f"job {self.number} has no rank {rank}")


class Slurm:
    """Submits jobs from the repository's root, as a user would."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers: list[str] = []

    def submit(
        self,
        script: str,
        arguments: Sequence[str],
        *options: str,
        run_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> SlurmJob:
        log = self._directory / f"job_{len(self._numbers)}.out"
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={log}", *options, f"scripts/slurm/{script}", *arguments],
            cwd=REPOSITORY,
            env=slurm_environment(env),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return self.adopt(done.stdout.strip(), log, run_dir or self._directory)

    def adopt(self, number: str, log: Path, run_dir: Path) -> SlurmJob:
        """A job that something else has submitted."""
        self._numbers.append(number)
        return SlurmJob(number, log, run_dir)

    def close(self) -> None:
        for number in self._numbers:
            subprocess.run(["scancel", number], env=slurm_environment(), check=False, timeout=60, capture_output=True)
