"""Which variants the rules or this machine refuse, known before the first one trains.

A process of its own looks at the machine: the one that asks keeps no CUDA context beside the runs that it measures, and
needs no torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpt_pretrain.benchmark.results import PlatformSeen
from gpt_pretrain.benchmark.worker import run_task
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.spec.platform import Platform


def launch_here(config: Config) -> Launch:
    """Rank 0 of a variant's processes on this machine."""
    num_processes = config.trainer.devices or 1
    launcher = "none" if num_processes == 1 else "torchrun"
    return rank_zero_of(num_processes, local_world_size=num_processes, launcher=launcher)


def detect_in_process(folder: Path, *, source: Source, overrides: Sequence[str]) -> Platform:
    """What `spec.platform.detect_platform` says in a process of its own, which writes into `folder`.

    Raises:
        RunError: The process failed.
    """
    outcome = run_task("platform", PlatformSeen, folder, source=source, overrides=overrides)
    if outcome.problem is not None:
        raise RunError(f"this machine's devices and libraries could not be looked up: {outcome.problem}")
    return outcome.results[0].platform


def variant_refusals(config: Config, platform: Platform) -> list[str]:
    """What the rules about runs, and the machine where those are kept, refuse of a run in processes of this machine."""
    launch = launch_here(config)
    last = launch.world_size - 1
    # The last rank is the one that finds no GPU.
    return config_problems(config, launch) or machine_problems(
        config, replace(launch, rank=last, local_rank=last), platform
    )
