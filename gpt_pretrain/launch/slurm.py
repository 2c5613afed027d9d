"""A sweep's runs as jobs of Slurm: `-m hydra/launcher=slurm` hands each to `sbatch` instead of running it here.

By then every run is checked, with the ranks that its job will have. A job is scripts/slurm/fp8_gpt.sbatch
with the run's own overrides: Slurm warns it ahead of its time limit, and it is requeued like any other.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.launch.ranks import Launch, rank_zero_of

_LAUNCHER = "hydra.launcher"
# A busy controller takes its time; sbatch itself gives up eventually.
_SUBMISSION_TIMEOUT_S = 300
# Options of sbatch that say how many nodes, tasks and GPUs a job has; long ones may be abbreviated.
_COUNTS = re.compile(r"-[NnG]|--(nodes|ntask|gpus)|--gres(=.*gpu|$)")
# Variables that say the same, which the user may have set for other jobs.
_COUNTING_VARIABLES = ("SBATCH_GPUS", "SBATCH_NTASKS", "SBATCH_GRES")


@dataclass(kw_only=True, slots=True)
class Submission:
    """How each run is handed to Slurm; `conf/hydra/launcher/slurm.yaml` has the values."""

    script: str
    """The batch script; relative to the working directory, which is the checkout."""
    nodes: int
    gpus_per_node: int
    """One task for each; 0: the job asks for none."""
    tasks_per_node: int
    """Of a job without GPUs."""
    sbatch: list[str]
    """Further options of sbatch; none that change the number of tasks."""

    @property
    def launch(self) -> Launch:
        """Rank 0 of a job, for the rules about the world size."""
        local_world_size = self.gpus_per_node or self.tasks_per_node
        return rank_zero_of(self.nodes * local_world_size, local_world_size=local_world_size, launcher="sbatch")

    @property
    def options(self) -> list[str]:
        """Of sbatch."""
        gpus, tasks = f"--gpus-per-node={self.gpus_per_node}", f"--ntasks-per-node={self.tasks_per_node}"
        return [f"--nodes={self.nodes}", gpus if self.gpus_per_node else tasks, *self.sbatch]


def is_submission(launcher: DictConfig) -> bool:
    """Whether a `hydra/launcher` hands runs to Slurm."""
    return str(launcher.get("_target_")) == f"{Submission.__module__}.{Submission.__qualname__}"


def read_submission(launcher: DictConfig) -> Submission:
    """Reads the section `hydra.launcher`; a ConfigError if a key or a value is wrong, or the batch script missing."""
    keys = OmegaConf.masked_copy(launcher, [str(name) for name in launcher if name != "_target_"])
    try:
        submission = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Submission), keys))
    except OmegaConfBaseException as error:
        raise ConfigError([f"{_LAUNCHER}: {str(error).partition('\n')[0]}"]) from error
    assert isinstance(submission, Submission)
    least = {"nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1}
    problems = [
        f"{_LAUNCHER}.{name}={getattr(submission, name)} is too small; use {minimum} or more"
        for name, minimum in least.items()
        if getattr(submission, name) < minimum
    ]
    problems += [
        f"{_LAUNCHER}.sbatch: {option} changes how many tasks a job has, which its run was checked with; use "
        f"{_LAUNCHER}.nodes and gpus_per_node, or tasks_per_node"
        for option in submission.sbatch
        if _COUNTS.match(option)
    ]
    if not Path(submission.script).is_file():
        problems.append(
            f"{_LAUNCHER}.script={submission.script} is not a file; start in the checkout, or give the script's path"
        )
    if problems:
        raise ConfigError(problems)
    return submission


def submit(submission: Submission, run_dir: Path, arguments: Sequence[str]) -> str:
    """Hands one run to Slurm, with the arguments of its `python -m gpt_pretrain`, and returns the job's number.

    The job writes its log to the run directory.

    Raises:
        UserError: Slurm is not installed or refuses the job, or the run directory cannot be made.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_COUNTING_VARIABLES)}
    if Path(sys.prefix, "bin", "python").is_file():
        # Ranks use this Python, unless the user has set another.
        environment.setdefault("VENV", sys.prefix)
    log = f"--output={str(run_dir).replace('%', '%%')}/slurm-%j.out"
    command = ["sbatch", "--parsable", log, *submission.options, submission.script, *arguments]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SUBMISSION_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise UserError("hydra/launcher=slurm needs Slurm's sbatch, which is not on this machine's PATH") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the run of {run_dir} could not be handed to Slurm: {error}") from error
    if done.returncode:
        raise UserError(f"sbatch refuses the run of {run_dir}: {done.stderr.strip()}")
    # "JOB", or "JOB;CLUSTER" where there are several clusters.
    return done.stdout.strip().partition(";")[0]
