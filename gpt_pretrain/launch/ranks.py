"""This process's place among the processes of a run, read from the launcher's environment variables.

torchrun and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT; Slurm's `srun` sets
SLURM_PROCID and its siblings; without either the run is one process. Reading them needs no torch, so that every rule
about the world size runs before anything expensive.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpt_pretrain.config.errors import ConfigError

# The variables of torchrun and `accelerate launch`.
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The place of this process in the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    """Whose variables were read: "torchrun", "srun" or "none"; "plan" for planned processes, "sbatch" for those of a
    job that Slurm does not have yet."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process prints and writes for the run."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Nodes of the run, each with as many processes."""
        return max(1, self.world_size // self.local_world_size)

    def how_to_start(self, num_processes: int) -> str:
        """How to get another number of processes, for error messages."""
        if self.launcher == "plan":
            return f"plan it with plan.num_gpus={num_processes}"
        if self.launcher == "sbatch":
            return (
                f"give its job {num_processes} tasks: hydra.launcher.nodes × hydra.launcher.gpus_per_node, or without "
                "GPUs × hydra.launcher.tasks_per_node"
            )
        return f"start it with torchrun --nproc-per-node {num_processes} -m gpt_pretrain …"


def rank_zero_of(world_size: int, *, local_world_size: int, launcher: str) -> Launch:
    """Rank 0 of a run without a launcher, for the rules about the world size."""
    return Launch(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=local_world_size,
        master_addr="127.0.0.1",
        master_port=0,
        launcher=launcher,
    )


def _number(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = env.get(key) or default
    if value is None:
        raise ConfigError(
            [f"{key} is not set although the launcher's other variables are; start with torchrun or srun"]
        )
    try:
        return int(value)
    except ValueError:
        raise ConfigError([f"{key}={value!r} in the environment is not a whole number"]) from None


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `rack[0-1]_blade[02-07,09],login1` gives `rack0_blade02` (slurm.conf(5))."""
    match = re.match(r"(?:[^\[,]|\[\w[^\]]*\])+", nodelist)
    if match is None:
        raise ConfigError([f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """This process's place in the run; a ConfigError if the launcher's variables are incomplete or contradictory."""
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        world_size = _number(env, "WORLD_SIZE")
        launch = Launch(
            rank=_number(env, "RANK"),
            world_size=world_size,
            local_rank=_number(env, "LOCAL_RANK"),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT", 29500),
            launcher="torchrun",
        )
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NODELIST"):
        # A batch script's own shell has SLURM_PROCID too, but is no task of a step.
        world_size = _number(env, "SLURM_NTASKS")
        launch = Launch(
            rank=_number(env, "SLURM_PROCID"),
            world_size=world_size,
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=_number(env, "SLURM_NTASKS_PER_NODE", world_size // _number(env, "SLURM_NNODES", 1)),
            master_addr=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
            # Two jobs on a node would collide at torch's default port, but differ in their job id.
            master_port=_number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID") % 20000),
            launcher="srun",
        )
    else:
        launch = rank_zero_of(1, local_world_size=1, launcher="none")
    if launch.local_world_size < 1:
        raise ConfigError([f"the launcher states {launch.local_world_size} processes on each node; there must be one"])
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError([f"rank {launch.rank} is not below the world size {launch.world_size} the launcher states"])
    return launch


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without a launcher's variables, for processes that are not ranks of its run."""
    return {
        name: value
        for name, value in env.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(("SLURM_STEP_", "TORCHELASTIC_"))
    }


def start_command(num_processes: int) -> list[str]:
    """What starts ranks on this machine, before `-m MODULE …`: this Python, or torchrun for several ranks."""
    if num_processes == 1:
        return [sys.executable]
    # The system picks the port of the rendezvous, so that several launches can run side by side.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*launcher, "--nproc-per-node", str(num_processes)]
