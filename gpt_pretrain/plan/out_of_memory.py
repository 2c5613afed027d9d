"""Memory that a run lacks: refused before the start where that is certain, and explained where it runs out later.

The message tells the forecast for the run, what was used, and which keys would save how much.

The forecast is the plan's, for the machine of the run instead of a planned one. It was calibrated on GPUs; for a run on
the CPU it tells how the memory divides, and less exactly the total. A process there may have the machine's memory, or
what its container or Slurm job leaves it.
"""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.memory import GIB, MemoryForecast
from gpt_pretrain.plan.remedies import forecast_of, peak_gib_of, plan_remedies
from gpt_pretrain.spec.platform import Platform, detect_platform

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def host_memory_bytes() -> tuple[int, str]:
    """The bytes, swap included, and whose they are: "this machine" or "this process's control group"."""
    installed, swap = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _swap_bytes()
    limit = min(_limits(), default=installed)
    if limit < installed:
        return limit + swap, "this process's control group"
    return installed + swap, "this machine"


def _swap_bytes() -> int:
    if _MEMORY.is_file():
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def _limits() -> Iterator[int]:
    """Limits of this process's control group and of those that it is in, as Linux's cgroup v2 and v1 write them."""
    if not _OWN_GROUPS.is_file():
        return
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers:
            root, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and only the root is there.
        group = root / own.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            file = folder / name
            if file.is_file() and (said := file.read_text().strip()).isdigit():
                yield int(said)


# What a run holds from its first step on, whatever its batches are: counted, not estimated.
_STATES = ("weights", "FP8 weights", "gradients", "masters", "moments")
# How torch's allocators, CUDA and NCCL say it.
_WORDS = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def check_states_fit(config: Config, launch: Launch, platform: Platform) -> None:
    """Refuses a run whose weights, gradients and optimizer states alone are more than there is.

    On a GPU they would be found out after data and weights were prepared; without one, Linux ends the process for it
    and says nothing.

    Raises:
        UserError: What they take, what there is, and the keys that would help.
    """

    def states_gib(forecast: MemoryForecast) -> dict[str, float]:
        stages = [{name: stage.items.get(name, 0.0) / GIB for name in _STATES} for stage in forecast.stages]
        if platform.cuda:
            return max(stages, key=lambda items: sum(items.values()))
        # All processes of a node without GPUs have its memory; their stages are taken to be as in the whole run.
        return {name: launch.local_world_size * sum(items[name] for items in stages) / len(stages) for name in _STATES}

    items = states_gib(forecast_of(config, launch, platform))
    needed_gib, (total_gib, whose) = sum(items.values()), _total_gib(platform)
    if needed_gib <= total_gib:
        return
    listed = ", ".join(f"{name} {size:.2f}" for name, size in items.items() if size)
    processes = f" in {launch.local_world_size} processes" if launch.local_world_size > 1 and not platform.cuda else ""
    lines = [
        f"the model does not fit: weights, gradients and optimizer states alone take {needed_gib:.2f} GiB{processes} "
        f"({listed}), and {whose} has {total_gib:.2f} GiB{'' if platform.cuda else ' and no GPU'}",
        *_advice(config, launch, platform, lambda forecast: sum(states_gib(forecast).values()), has_gib=total_gib),
    ]
    raise UserError("\n".join(lines))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def explain_out_of_memory(config: Config, launch: Launch, error: BaseException) -> str:
    """The message for a run that ran out of memory on this machine."""
    platform = detect_platform()
    forecast = forecast_of(config, launch, platform)
    peak_gib = forecast.worst.peak / GIB
    items = sorted(forecast.worst.items.items(), key=lambda item: -item[1])
    where = f" on the ranks of pipeline stage {forecast.worst.stage}" if len(forecast.stages) > 1 else ""
    outside = f", and {forecast.outside_gib:.1f} GiB for CUDA and NCCL" if platform.cuda else ""
    said = next(iter(str(error).splitlines()), type(error).__name__)
    lines = [
        f"out of memory on rank {launch.rank} ({platform.device_name}): {said}",
        f"the forecast for this run is a peak of {peak_gib:.2f} GiB{where}{outside}: "
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in items),
        _used(platform),
        *_advice(config, launch, platform, peak_gib_of, has_gib=None),
    ]
    return "\n".join(lines)


def _advice(
    config: Config,
    launch: Launch,
    platform: Platform,
    needed: Callable[[MemoryForecast], float],
    *,
    has_gib: float | None,
) -> list[str]:
    """Lines for the user; the last tells of more, where what there is (`has_gib`) is less than each remedy needs."""
    remedies = plan_remedies(config, launch, platform, needed)
    larger = "use more GPUs" if platform.cuda else "use a machine with GPUs or with more memory"
    if not remedies:
        return [f"no key of this run would make it smaller at the same work: {larger}, or a smaller model"]
    now = needed(forecast_of(config, launch, platform))
    width = max(len(remedy.overrides) for remedy in remedies)
    told = [
        f"  {remedy.overrides:<{width}}  {remedy.needed_gib:.2f} GiB ({remedy.needed_gib / now - 1:+.0%})"
        for remedy in remedies
    ]
    enough = has_gib is None or remedies[0].needed_gib <= has_gib
    rest = [] if enough else [f"none of them is enough alone: {larger}, or a smaller model"]
    return ["what would help, by the forecast, the most helpful first (each alone):", *told, *rest]


def _total_gib(platform: Platform) -> tuple[float, str]:
    """Memory that the run can have, and whose it is."""
    if platform.cuda:
        total = torch.cuda.get_device_properties(platform.device).total_memory
        return float(total) / GIB, f"this GPU ({platform.device_name})"
    host, whose = host_memory_bytes()
    return host / GIB, whose


def _used(platform: Platform) -> str:
    total, whose = _total_gib(platform)
    if platform.cuda:
        allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        return (
            f"used at most: {allocated:.2f} GiB by tensors, {reserved:.2f} GiB taken by torch's allocator for them, "
            f"of the GPU's {total:.2f} GiB"
        )
    # ru_maxrss is in KiB on Linux.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return f"used at most: {resident:.2f} GiB by this process, of {total:.2f} GiB that {whose} has"
