"""Real processes for tests: a program as one plain process, or as ranks of torchrun on this machine."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt_pretrain.launch.ranks import start_command, without_launcher

REPOSITORY = Path(__file__).resolve().parents[1]

# Set by `pytest -m gpu --share-gpu`.
SHARE_GPU = "TESTS_SHARE_GPU"
# torchrun gives its ranks 30 s to end before it kills them.
SHUTDOWN_S = 40


def clean_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    # The ranks of a test are none of a launcher's around pytest itself.
    inherited = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith("SLURM_")}
    # Programs find the package and `tests` as pytest does, from the repository's root.
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # Ranks share few cores; a GPU, where there is one, is for tests that ask for it.
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**inherited, **ours, **(env or {})}


def gpu_environment(num_gpus: int) -> dict[str, str]:
    """What lets ranks see the first `num_gpus` of the GPUs that this process sees; give it to `run_ranks` as `env`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[:num_gpus])}


def on_one_gpu(place: Mapping[str, str]) -> dict[str, str]:
    """A rank's place as srun tells it to a task that sees a GPU of its own, for ranks that share the first GPU.

    The application refuses more ranks of torchrun than there are GPUs, and NCCL 2.28 two ranks of a host on one GPU: so
    each names a host of its own, and they exchange through sockets.
    """
    rank = place["RANK"]
    task = {"SLURM_PROCID": rank, "SLURM_NTASKS": place["WORLD_SIZE"], "SLURM_LOCALID": place["LOCAL_RANK"]}
    step = {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    kept = {name: value for name, value in place.items() if name not in ("RANK", "WORLD_SIZE")}
    nccl = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {**kept, **task, **step, **nccl}


def run_ranks(
    num_ranks: int, arguments: Sequence[str], *, timeout_s: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program from the repository's root and waits for it; the caller looks at `returncode` and output.

    Args:
        num_ranks: Processes; 1 runs plain Python without a launcher.
        arguments: What follows Python or torchrun's own options: `["-m", "gpt_pretrain", …]` or
            `["tests/programs/x.py", …]`.
        timeout_s: Seconds after which all processes are ended.
        env: Variables beside the inherited ones.

    Raises:
        subprocess.TimeoutExpired: It did not end in time; carries what it printed.
    """
    command = [*start_command(num_ranks), *arguments]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=clean_environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as expired:
        # torchrun's ranks are sessions of their own: only torchrun itself can end them, so it is asked to.
        process.terminate()
        try:
            stdout, stderr = process.communicate(timeout=SHUTDOWN_S)
        finally:
            process.kill()
        raise subprocess.TimeoutExpired(command, timeout_s, stdout, stderr) from expired
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
