"""What to do about memory that a run lacks: refuse a run that cannot start, explain one that ran out, offer remedies.

A remedy breaks no rule and keeps what is computed: the same weights, batch and steps. Needs are the plan's forecast,
for a run on this machine instead of the planned one. It was calibrated on GPUs; on the CPU its total is less exact. A
process there may use the machine's memory, or what its container or Slurm job leaves it.

Only functions that ask this machine import torch or psutil: a plan needs neither.
"""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from gpt_pretrain.config.choices import Precision, RecomputeGranularity, RecomputeMethod, ShardingStrategy
from gpt_pretrain.config.derived import shards_weights, uses_distributed_optimizer
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.launch.environment import host_memory_bytes
from gpt_pretrain.plan.memory import GIB, MemoryForecast, forecast_memory
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.run_spec import RunSpec

# Less than this share of the peak is not worth a change.
_WORTHWHILE = 0.01
# What a run holds from its first step on, independent of its batches: counted, not estimated.
_STATES = ("weights", "FP8 weights", "gradients", "masters", "moments")
# The words of torch's allocators, CUDA and NCCL.
_WORDS = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the configuration, and the memory that it would need."""

    overrides: str
    """The change as arguments of a command line."""
    needed_gib: float


def plan_remedies(spec: RunSpec, needed: Callable[[MemoryForecast], float]) -> list[Remedy]:
    """The changes that would save this run memory on as many processes, the most helpful first.

    `needed` picks the GiB of a forecast that should become fewer.
    """
    before, config = needed(forecast_memory(spec)), spec.config
    if not spec.platform.cuda and config.trainer.precision is Precision.auto:
        # To the rules, `auto` is a GPU's.
        config = replace(config, trainer=replace(config.trainer, precision=Precision.fp32))
    found = []
    for changes in _changes(spec):
        varied = replace(config, model=replace(spec.model, **changes))
        if config_problems(varied, spec.launch):
            continue
        after = needed(forecast_memory(build_run_spec(varied, spec.launch, spec.platform)))
        if after < before * (1 - _WORTHWHILE):
            found.append(Remedy(overrides=_as_typed(changes), needed_gib=after))
    return sorted(found, key=lambda remedy: remedy.needed_gib)


def _changes(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Changes of `model` that keep weights, batch and steps."""
    model, sharded = spec.model, _shard_states(spec.model)
    for size in {1, model.micro_batch_size // 2} - {0, model.micro_batch_size}:
        yield {"micro_batch_size": size}
    if model.activations_checkpoint_granularity is not RecomputeGranularity.full:
        yield {
            "activations_checkpoint_granularity": RecomputeGranularity.full,
            "activations_checkpoint_method": RecomputeMethod.uniform,
            "activations_checkpoint_num_layers": 1,
        }
    if model.activations_checkpoint_granularity is None:
        yield {"activations_checkpoint_granularity": RecomputeGranularity.selective}
    if sharded:
        yield sharded
    if spec.layout.shards > 1:
        overlapped = {} if model.overlap_grad_reduce else {"overlap_grad_reduce": True}
        for strategy in ShardingStrategy:
            if not (shards_weights(model) or strategy is model.data_parallel_sharding_strategy):
                yield {**sharded, "data_parallel_sharding_strategy": strategy, **overlapped}
    if not model.optim.use_precision_aware_optimizer:
        # With the default fp32 states and remainders, nothing is rounded that was not rounded before.
        yield {**sharded, "optim": replace(model.optim, use_precision_aware_optimizer=True)}
    if model.fp8 and not model.fp8_params and not model.fp8_emulate:
        yield {"fp8_params": True, "use_distributed_optimizer": True}
    if spec.layout.dp % 2 == 0:
        # Pairs of ranks that hold the same layers would share them.
        yield {"tensor_model_parallel_size": 2 * model.tensor_model_parallel_size, "sequence_parallel": True}
        yield {"pipeline_model_parallel_size": 2 * model.pipeline_model_parallel_size}


def _shard_states(model: ModelConfig) -> dict[str, Any]:
    return {} if uses_distributed_optimizer(model) else {"use_distributed_optimizer": True}


def _as_typed(changes: dict[str, Any]) -> str:
    # Only one key of the optimizer is ever changed.
    flat = {name: value for name, value in changes.items() if name != "optim"}
    flat |= {"optim.use_precision_aware_optimizer": True} if "optim" in changes else {}
    return " ".join(f"model.{name}={show(value)}" for name, value in flat.items())


def check_states_fit(spec: RunSpec) -> None:
    """Refuses a run whose weights, gradients and optimizer states alone exceed the memory.

    On a GPU the run would find out after data and weights were prepared; without one, Linux kills the process silently.

    Raises:
        UserError: What they take, what is available, and the keys that would help.
    """
    launch, platform = spec.launch, spec.platform

    def states_gib(forecast: MemoryForecast) -> dict[str, float]:
        stages = [{name: stage.items.get(name, 0.0) / GIB for name in _STATES} for stage in forecast.stages]
        if platform.cuda:
            return max(stages, key=lambda items: sum(items.values()))
        # All processes of a node without GPUs share its memory; they are assumed to have an equal part of all stages.
        return {name: launch.local_world_size * sum(items[name] for items in stages) / len(stages) for name in _STATES}

    items = states_gib(forecast_memory(spec))
    needed_gib, (total_gib, whose) = sum(items.values()), _total_gib(platform)
    if needed_gib <= total_gib:
        return
    listed = ", ".join(f"{name} {size:.2f}" for name, size in items.items() if size)
    processes = f" in {launch.local_world_size} processes" if launch.local_world_size > 1 and not platform.cuda else ""
    lines = [
        f"the model does not fit: weights, gradients and optimizer states alone take {needed_gib:.2f} GiB{processes} "
        f"({listed}), and {whose} has {total_gib:.2f} GiB{'' if platform.cuda else ' and no GPU'}",
        *_advice(spec, lambda forecast: sum(states_gib(forecast).values()), has_gib=total_gib),
    ]
    raise UserError("\n".join(lines))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the device or on the host."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def explain_out_of_memory(spec: RunSpec, error: BaseException) -> str:
    """The message for a run that ran out of memory on this machine."""
    platform, forecast = spec.platform, forecast_memory(spec)
    items = sorted(forecast.worst.items.items(), key=lambda item: -item[1])
    where = f" on the ranks of pipeline stage {forecast.worst.stage}" if len(forecast.stages) > 1 else ""
    outside = f", and {forecast.outside_gib:.1f} GiB for CUDA and NCCL" if platform.cuda else ""
    said = next(iter(str(error).splitlines()), type(error).__name__)
    lines = [
        f"out of memory on rank {spec.launch.rank} ({platform.device_name}): {said}",
        f"the forecast for this run is a peak of {forecast.peak_gib:.2f} GiB{where}{outside}: "
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in items),
        _used(platform),
        *_advice(spec, attrgetter("peak_gib"), has_gib=None),
    ]
    return "\n".join(lines)


def _advice(spec: RunSpec, needed: Callable[[MemoryForecast], float], *, has_gib: float | None) -> list[str]:
    """The remedies, a line each. A last line says so if each of them needs more than `has_gib`."""
    remedies = plan_remedies(spec, needed)
    larger = "use more GPUs" if spec.platform.cuda else "use a machine with GPUs or with more memory"
    if not remedies:
        return [f"no key of this run would reduce its memory for the same work: {larger}, or a smaller model"]
    now = needed(forecast_memory(spec))
    width = max(len(remedy.overrides) for remedy in remedies)
    told = [
        f"  {remedy.overrides:<{width}}  {remedy.needed_gib:.2f} GiB ({remedy.needed_gib / now - 1:+.0%})"
        for remedy in remedies
    ]
    enough = has_gib is None or remedies[0].needed_gib <= has_gib
    rest = [] if enough else [f"none of them is enough alone: {larger}, or a smaller model"]
    return ["what would help, by the forecast, the most helpful first (each alone):", *told, *rest]


def _total_gib(platform: Platform) -> tuple[float, str]:
    """GiB that the run can have, and whose they are."""
    if platform.cuda:
        import torch

        total = torch.cuda.get_device_properties(platform.device).total_memory
        return float(total) / GIB, f"this GPU ({platform.device_name})"
    import psutil

    # A run that swaps is slow, but runs.
    host, whose = host_memory_bytes()
    return (host + psutil.swap_memory().total) / GIB, whose


def _used(platform: Platform) -> str:
    total, whose = _total_gib(platform)
    if platform.cuda:
        import torch

        allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        return (
            f"used at most: {allocated:.2f} GiB by tensors, {reserved:.2f} GiB taken by torch's allocator for them, "
            f"of the GPU's {total:.2f} GiB"
        )
    # ru_maxrss is in KiB on Linux.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return f"used at most: {resident:.2f} GiB by this process, of {total:.2f} GiB that {whose} has"
