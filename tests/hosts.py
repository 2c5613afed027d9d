"""Two hosts on one machine: a torchrun for each, whose ranks exchange through sockets and take each other for remote.

The same runs with gloo on CPUs (`tests/test_hosts.py`) and with NCCL on four GPUs (`tests/test_gpu_hosts.py`): NCCL
takes ranks for those of two hosts if their NCCL_HOSTID says so, and watchdogs and locks if the hosts' names do.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpt_pretrain.report.metrics_file import Metrics, load_metrics
from tests.forked_runs import Fault, fork_ranks, forked_python, shared_parent
from tests.launching import REPOSITORY, SHARE_GPU, clean_environment, gpu_environment, run_ranks
from tests.runs import small_run_arguments

NAMES = ("host-a", "host-b")
RANKS_PER_HOST = 2
# No run of a test takes so long, however busy the machine is.
PATIENCE_S = 200


@dataclass
class Host:
    """A launcher and its ranks."""

    name: str
    launcher: "subprocess.Popen[bytes]"
    output: Path

    def kill(self) -> None:
        """SIGKILL for the launcher and for its ranks, which are sessions of their own: power fails."""
        try:
            processes = psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        for pid in [self.launcher.pid, *(process.pid for process in processes)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait()

    def text(self) -> str:
        return self.output.read_text(errors="replace")[-6000:]


@contextmanager
def two_hosts(
    arguments: Sequence[str], folder: Path, *, on_gpus: bool, faults: Mapping[str, Sequence[Fault]] | None = None
) -> Iterator[list[Host]]:
    """Starts a program on two hosts of two ranks each; kills what is left of them at the end.

    Args:
        arguments: What follows Python's own: `["-m", "gpt_pretrain", …]`.
        folder: Receives what each host prints.
        on_gpus: Each host has two GPUs of this machine; or else none.
        faults: Of the ranks of each host.
    """
    port = free_port()
    with ExitStack() as stack:
        hosts = []
        # torchrun itself is real.
        forked = {} if on_gpus else {"PYTHON_EXEC": str(stack.enter_context(forked_python(shared_parent(), folder)))}
        for number, name in enumerate(NAMES):
            place = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(RANKS_PER_HOST)]
            place += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
            program = on_host(name, arguments, (faults or {}).get(name, []))
            output = folder / f"{name}.output"
            with output.open("wb") as file:
                launcher = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *place, *program],
                    cwd=REPOSITORY,
                    env=clean_environment(_gpus_of(number) if on_gpus else forked),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            hosts.append(Host(name, launcher, output))
            stack.callback(hosts[-1].kill)
        yield hosts


def on_host(name: str, arguments: Sequence[str], faults: Sequence[Fault] = ()) -> list[str]:
    """The arguments of a program that takes itself for one on a host of this name."""
    return ["tests/programs/other_host.py", name, json.dumps(faults), *arguments]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _gpus_of(number: int) -> dict[str, str]:
    if SHARE_GPU in os.environ:
        # Its ranks are hosts of their own.
        return gpu_environment(1)
    devices = gpu_environment(2 * RANKS_PER_HOST)["CUDA_VISIBLE_DEVICES"].split(",")
    own = devices[number * RANKS_PER_HOST :][:RANKS_PER_HOST]
    nccl = {"NCCL_HOSTID": NAMES[number], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(own), **nccl}


def train_on_two_hosts(folder: Path, cache_dir: Path, overrides: Sequence[str], *, on_gpus: bool) -> Metrics:
    """Trains a small run to its end and returns what it logged."""
    arguments = small_run_arguments(folder / "run", cache_dir, overrides)
    with two_hosts(arguments, folder, on_gpus=on_gpus) as hosts:
        for host in hosts:
            host.launcher.wait(PATIENCE_S)
        assert [host.launcher.returncode for host in hosts] == [0, 0], "\n".join(host.text() for host in hosts)
    return load_metrics(folder / "run")


def train_until_a_host_is_killed(
    folder: Path, cache_dir: Path, overrides: Sequence[str], *, killed: str, step: int, on_gpus: bool
) -> float:
    """Kills a host that stands still in a step for which the other one waits; returns how long that one lives on."""
    arguments = small_run_arguments(folder / "run", cache_dir, overrides)
    with two_hosts(arguments, folder, on_gpus=on_gpus, faults={killed: [["sleep_at_step", step]]}) as hosts:
        metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while not metrics.exists() or f'"step": {step - 1},' not in metrics.read_text():
            texts = "\n".join(host.text() for host in hosts)
            assert [host.launcher.poll() for host in hosts] == [None, None], texts
            assert time.monotonic() < deadline, texts
            time.sleep(0.1)
        victim = next(host for host in hosts if host.name == killed)
        (survivor,) = [host for host in hosts if host is not victim]
        # Ranks other than 0 reach the step a moment later.
        time.sleep(1.0)
        victim.kill()
        killed_at = time.monotonic()
        survivor.launcher.wait(PATIENCE_S)
        assert survivor.launcher.returncode == 1, survivor.text()
        return time.monotonic() - killed_at


def go_on_alone(folder: Path, cache_dir: Path, overrides: Sequence[str], *, name: str, on_gpus: bool) -> Metrics:
    """Resumes the run on one host of two ranks and returns all that it has logged."""
    arguments = on_host(name, small_run_arguments(folder / "run", cache_dir, overrides))
    if on_gpus:
        done = run_ranks(RANKS_PER_HOST, arguments, env=gpu_environment(RANKS_PER_HOST))
    else:
        done = fork_ranks(RANKS_PER_HOST, arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return load_metrics(folder / "run")
