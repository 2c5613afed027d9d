"""Changes of a configuration that need less memory, by the forecast: for a run that ran out of it, and for a plan.

Each keeps what is computed: the same weights, batch and steps. What breaks a rule is left out. Needs no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import PlanGpu, Precision, RecomputeGranularity, RecomputeMethod
from gpt_pretrain.config.derived import data_parallel_size, uses_distributed_optimizer
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.hardware import GPUS, GPUS_PER_NODE, Gpu
from gpt_pretrain.plan.machine import planned_launch, planned_platform, planned_problems
from gpt_pretrain.plan.memory import GIB, MemoryForecast, forecast_memory
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.run_spec import build_run_spec

# Less than this share of the peak is not worth a change.
_WORTHWHILE = 0.01
# How many times the GPUs are offered; where even so many are too few, a smaller model is meant.
_TIMES_THE_GPUS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the configuration that needs less memory, by the forecast."""

    overrides: str
    """As one would type it."""
    needed_gib: float
    """What would be needed then."""


def peak_gib_of(forecast: MemoryForecast) -> float:
    """The peak of torch's allocator on the worst stage."""
    return forecast.worst.peak / GIB


def plan_remedies(
    config: Config, launch: Launch, platform: Platform, needed: Callable[[MemoryForecast], float] = peak_gib_of
) -> list[Remedy]:
    """The changes that this run could make and that would save memory, the most helpful first.

    Changes that break a rule are left out, and the number of processes stays. `needed` answers the GiB of a forecast
    that shall become fewer.
    """
    # The rules ask for the precision, too.
    config = _as_run(config, platform)
    before = needed(forecast_of(config, launch, platform))
    found = []
    for changes in _changes(config.model, launch):
        varied = replace(config, model=replace(config.model, **changes))
        if config_problems(varied, launch):
            continue
        after = needed(forecast_of(varied, launch, platform))
        if after < before * (1 - _WORTHWHILE):
            found.append(Remedy(overrides=_as_typed(changes), needed_gib=after))
    return sorted(found, key=lambda remedy: remedy.needed_gib)


def _changes(model: ModelConfig, launch: Launch) -> Iterator[dict[str, Any]]:
    """Changes of `model` that keep what is computed: the same weights, batch and steps."""
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
    if not uses_distributed_optimizer(model):
        yield {"use_distributed_optimizer": True}
    if not model.optim.use_precision_aware_optimizer:
        # With fp32 states and remainders, as they are by default, nothing is rounded that was not rounded before.
        yield {
            **({} if uses_distributed_optimizer(model) else {"use_distributed_optimizer": True}),
            "optim": replace(model.optim, use_precision_aware_optimizer=True),
        }
    if model.fp8 and not model.fp8_params and not model.fp8_emulate:
        yield {"fp8_params": True, "use_distributed_optimizer": True}
    if data_parallel_size(model, launch.world_size) % 2 == 0:
        # Of the ranks that hold the same layers, every two would share them.
        yield {"tensor_model_parallel_size": 2 * model.tensor_model_parallel_size, "sequence_parallel": True}
        yield {"pipeline_model_parallel_size": 2 * model.pipeline_model_parallel_size}


def _as_typed(changes: dict[str, Any]) -> str:
    def value(given: Any) -> str:
        return str(given.name if isinstance(given, Enum) else given)

    # Of the optimizer one key alone is changed.
    flat = {
        **{name: given for name, given in changes.items() if name != "optim"},
        **({"optim.use_precision_aware_optimizer": True} if "optim" in changes else {}),
    }
    return " ".join(f"model.{name}={value(given).replace('True', 'true')}" for name, given in flat.items())


def plan_more_gpus(config: Config, needed: Callable[[MemoryForecast], float], *, gib: float) -> list[Remedy]:
    """The least numbers of planned GPUs on which a run needs at most `gib`, for each way to lay it out over more.

    Experts stay shared out over as many ranks, or more of them.
    """
    world_size = planned_launch(config).world_size
    found: dict[str, Remedy] = {}
    for times in _TIMES_THE_GPUS:
        plan = replace(config.plan, num_gpus=times * world_size)
        for changes in _layouts(config.model, times):
            way = " ".join(changes)
            varied = replace(config, model=replace(config.model, **changes), plan=plan)
            if way in found or planned_problems(varied):
                continue
            launch = planned_launch(varied)
            needs = needed(forecast_of(varied, launch, planned_platform(varied, launch)))
            if needs <= gib:
                overrides = " ".join(filter(None, [f"plan.num_gpus={plan.num_gpus}", _as_typed(changes)]))
                found[way] = Remedy(overrides=overrides, needed_gib=needs)
        if found:
            break
    return sorted(found.values(), key=lambda remedy: remedy.needed_gib)


def _layouts(model: ModelConfig, times: int) -> Iterator[dict[str, Any]]:
    """Layouts over as many times the ranks."""
    sharded = {} if uses_distributed_optimizer(model) else {"use_distributed_optimizer": True}
    yield sharded
    if model.num_moe_experts is not None:
        yield {**sharded, "expert_model_parallel_size": times * model.expert_model_parallel_size}
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    yield {"pipeline_model_parallel_size": times * pp}
    # Tensor parallelism within a node, and what is left between nodes.
    inside = min(times, GPUS_PER_NODE // tp)
    if inside > 1:
        between = {"pipeline_model_parallel_size": pp * times // inside} if times > inside else {}
        yield {"tensor_model_parallel_size": inside * tp, "sequence_parallel": True, **between}


def forecast_of(config: Config, launch: Launch, platform: Platform) -> MemoryForecast:
    """The forecast for a run on the machine that it runs on."""
    return forecast_memory(build_run_spec(_as_run(config, platform), launch, platform), _gpu(platform))


def _gpu(platform: Platform) -> Gpu:
    """This machine's GPU as the plan describes one; a run's peak depends on no more of it than this."""
    return replace(
        GPUS[PlanGpu.h200], name=platform.device_name, compute_capability=platform.compute_capability or (0, 0)
    )


def _as_run(config: Config, platform: Platform) -> Config:
    """The configuration with the precision that this machine gives it: the plan takes `auto` for a GPU's."""
    if platform.cuda or config.trainer.precision is not Precision.auto:
        return config
    return replace(config, trainer=replace(config.trainer, precision=Precision.fp32))
