"""The planned run's processes and machine: as if a launcher had started it on the chosen GPUs with Transformer Engine.

Training's own rules, checks and translations get them in place of the machine that the plan is made on. Needs no torch,
so that a command line that breaks a rule is refused at once.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.plan.hardware import GPUS, GPUS_PER_NODE
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.spec.platform import Platform, multicast_variables, recipe_variables

# What this project is tested with (pyproject.toml, constraints.txt).
TRANSFORMER_ENGINE, FLASH_ATTENTION, TORCHAO, TORCH_CUDA = "2.12.0", "4.0.0b36", "0.18.0", "13.0"


def planned_platform(config: Config, launch: Launch) -> Platform:
    """A node with the planned GPUs, Transformer Engine and no apex; with the environment that the plan is made in.

    FlashAttention-4, an optional package, is there only where `model.use_flash_attention=true` asks for it.
    """
    gpu = GPUS[config.plan.gpu]
    return Platform(
        cuda=True,
        num_gpus=launch.local_world_size,
        device_name=gpu.name,
        compute_capability=gpu.compute_capability,
        torch_cuda=TORCH_CUDA,
        transformer_engine=TRANSFORMER_ENGINE,
        torchao=TORCHAO,
        recipe_variables=recipe_variables(),
        multicast_variables=multicast_variables(),
        flash_attention=FLASH_ATTENTION if config.model.use_flash_attention else None,
    )


def _refusals(config: Config, launch: Launch) -> list[str]:
    return machine_problems(config, launch, planned_platform(config, launch))


def platform_problems(config: Config, launch: Launch) -> list[str]:
    """What the planned machine would refuse, with the GPUs that would not."""
    problems = _refusals(config, launch)
    if not problems:
        return []
    on_others = {gpu.name: replace(config, plan=replace(config.plan, gpu=gpu)) for gpu in GPUS}
    fitting = [name for name, other in on_others.items() if not _refusals(other, launch)]
    return [f"{problem}; or plan.gpu={' or '.join(fitting)}" if fitting else problem for problem in problems]


def planned_world_size(config: Config) -> int:
    """Processes of the planned run, one per GPU.

    `plan.num_gpus`, else `trainer.devices` × `trainer.num_nodes` where either is given, else the fewest that the layout
    can do with: one data-parallel rank, or as many as experts are shared out over.
    """
    model, trainer = config.model, config.trainer
    stage = model.tensor_model_parallel_size * model.context_parallel_size
    if model.num_moe_experts is not None:
        stage = math.lcm(stage, model.expert_model_parallel_size * expert_tensor_parallel_size(model))
    layout = model.pipeline_model_parallel_size * stage
    if config.plan.num_gpus is not None:
        return max(1, config.plan.num_gpus)
    if trainer.devices is not None:
        return max(1, trainer.devices * (trainer.num_nodes or 1))
    # A number of nodes alone: as many whole replicas as it takes to give each node the same number of processes.
    return max(1, math.lcm(max(1, layout), max(1, trainer.num_nodes or 1)))


def planned_world_problems(config: Config) -> Iterator[str]:
    """What `plan.num_gpus` cannot be."""
    num_gpus, trainer = config.plan.num_gpus, config.trainer
    if num_gpus is None:
        return
    if num_gpus < 1:
        yield f"plan.num_gpus={num_gpus} is not positive; use 1 or more, or null for the fewest that the layout needs"
    elif trainer.devices is not None and trainer.devices > 0 and num_gpus % trainer.devices:
        yield (
            f"plan.num_gpus={num_gpus} is not a multiple of trainer.devices={trainer.devices}, the GPUs of one node; "
            "use a multiple, or trainer.devices=null"
        )
    elif trainer.num_nodes is not None and trainer.num_nodes > 0:
        per_node = trainer.devices or num_gpus // trainer.num_nodes
        if num_gpus != trainer.num_nodes * per_node:
            devices = "null" if trainer.devices is None else trainer.devices
            yield (
                f"plan.num_gpus={num_gpus} does not make trainer.num_nodes={trainer.num_nodes} nodes of "
                f"trainer.devices={devices} GPUs; use another number, or trainer.num_nodes=null"
            )


def planned_problems(config: Config) -> list[str]:
    """Everything that training on the planned ranks would be refused for before it looks at the machine."""
    return list(planned_world_problems(config)) or config_problems(config, planned_launch(config))


def planned_launch(config: Config) -> Launch:
    """Rank 0 of the planned run, on as few nodes of eight GPUs as hold it."""
    world_size, trainer = planned_world_size(config), config.trainer
    if trainer.devices is not None and trainer.devices > 0:
        local = min(trainer.devices, world_size)
    elif trainer.num_nodes is not None and trainer.num_nodes > 0:
        local = max(1, world_size // trainer.num_nodes)
    else:
        local = max(size for size in range(1, GPUS_PER_NODE + 1) if world_size % size == 0)
    return rank_zero_of(world_size, local_world_size=local, launcher="plan")
