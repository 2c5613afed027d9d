"""This process's place among the processes of a run, read from the launcher's environment variables.

torchrun and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT; Slurm's `srun` sets
SLURM_PROCID and its siblings; without either the run is one process. Reading them needs no torch, so that every rule
about the world size runs before anything expensive.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpt_pretrain.config.errors import ConfigError

# The variables of torchrun and `accelerate launch`.
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# More processes than any run has.
_MOST = 2**20
# Slurm's numbers for steps that no srun started: interactive, batch, extern (slurm.h, SLURM_INTERACTIVE_STEP, …).
_FIRST_OWN_STEP = 0xFFFFFFF0


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


def _number(env: Mapping[str, str], key: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
    value = env.get(key) or default
    if value is None:
        raise ConfigError(
            [f"{key} is not set although the launcher's other variables are; start with torchrun or srun"]
        )
    # Python's int also takes 1_0, and text of any length.
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", str(value).strip()) or not least <= int(value) <= most:
        raise ConfigError([f"{key}={value!r} in the environment is not a whole number from {least} to {most}"])
    return int(value)


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `rack[0-1]_blade[02-07,09],login1` gives `rack0_blade02` (slurm.conf(5))."""
    match = re.match(r"((?:[^\[\],]|\[\w[^\]]*\])+)(?:,|$)", nodelist)
    if match is None:
        raise ConfigError([f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR"])
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """This process's place in the run; a ConfigError if the launcher's variables are incomplete or contradictory.

    torchrun's variables come first: Slurm's are also set where a task of it has started torchrun.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        return _of_torchrun(env)
    if "SLURM_PROCID" in env and _is_task(env):
        return _of_srun(env)
    return rank_zero_of(1, local_world_size=1, launcher="none")


def _of_torchrun(env: Mapping[str, str]) -> Launch:
    world_size = _number(env, "WORLD_SIZE", least=1)
    launch = Launch(
        rank=_number(env, "RANK"),
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_port(env, world_size, 29500),
        launcher="torchrun",
    )
    # Others than torchrun may leave it out, on several nodes, too.
    stated = ("RANK", "WORLD_SIZE", "LOCAL_RANK", *(["LOCAL_WORLD_SIZE"] if env.get("LOCAL_WORLD_SIZE") else []))
    return _consistent(launch, env, stated)


def _is_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process, or what is above it.

    The shells of a batch script and of salloc have SLURM_PROCID, too, and the job's number of tasks, but are one
    process. Theirs are no steps, or steps that Slurm makes itself.
    """
    if "SLURM_STEP_ID" not in env or not (env.get("SLURM_STEP_NODELIST") or env.get("SLURM_STEP_NUM_TASKS")):
        return False
    return _number(env, "SLURM_STEP_ID", most=2**32 - 1) < _FIRST_OWN_STEP


def _of_srun(env: Mapping[str, str]) -> Launch:
    # The job's number may differ: a step can have fewer tasks.
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _number(env, size, least=1)
    address = env.get("MASTER_ADDR")
    if not address:
        address = first_host(env.get("SLURM_STEP_NODELIST", "")) if world_size > 1 else "127.0.0.1"
    per_node, local_world_size = _tasks_of_node(env, size, world_size)
    launch = Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=local_world_size,
        master_addr=address,
        # Two jobs on a node would collide at torch's default port, but differ in their job id.
        master_port=_port(env, world_size, 20000 + _number(env, "SLURM_JOB_ID", most=2**32 - 1) % 20000),
        launcher="srun",
    )
    return _consistent(launch, env, ("SLURM_PROCID", size, "SLURM_LOCALID", *per_node))


def _tasks_of_node(env: Mapping[str, str], size: str, world_size: int) -> tuple[list[str], int]:
    """Which variable says how many nodes the step has, if one does, and how many of its tasks are on each.

    SLURM_NTASKS_PER_NODE says neither: it is the job's, and at most so many (sbatch(1)).
    """
    names = [name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") if env.get(name)][:1]
    # Tasks that nothing spreads are on one node.
    num_nodes = min(world_size, _number(env, names[0], least=1)) if names else 1
    if world_size % num_nodes:
        problem = f"{size}={world_size} tasks do not divide among {names[0]}={num_nodes} nodes"
        raise ConfigError([f"{problem}; start with srun and as many tasks on each node"])
    return names, world_size // num_nodes


def _port(env: Mapping[str, str], world_size: int, default: int) -> int:
    # One process opens none.
    return _number(env, "MASTER_PORT", default, least=1 if world_size > 1 else 0, most=2**16 - 1)


def _consistent(launch: Launch, env: Mapping[str, str], stated: Sequence[str]) -> Launch:
    """The launch, unless its numbers contradict each other.

    `stated` are the variables that say rank, world size, local rank and, if any does, how many processes a node has.

    Raises:
        ConfigError: They do. Ranks that believed them would wait for each other, or for ranks that nobody starts.
    """
    problem = None
    if launch.local_world_size < 1:
        problem = f"the launcher states {launch.local_world_size} processes on each node; there must be one"
    elif launch.rank >= launch.world_size:
        problem = f"rank {launch.rank} is not below the world size {launch.world_size} the launcher states"
    elif launch.local_rank >= launch.local_world_size:
        problem = f"local rank {launch.local_rank} is not below the {launch.local_world_size} processes on this node"
    # Ranks of a node are numbered in the order of their ranks, so as many lie below and above this one at least.
    elif len(stated) == 4 and not (0 <= launch.rank - launch.local_rank <= launch.world_size - launch.local_world_size):
        problem = (
            f"rank {launch.rank} of {launch.world_size} cannot be local rank {launch.local_rank} of "
            f"{launch.local_world_size}"
        )
    if problem is None:
        return launch
    values = ", ".join(f"{name}={env[name]}" for name in stated)
    raise ConfigError([f"{problem} ({values}); start with torchrun or srun, which set them"])


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
