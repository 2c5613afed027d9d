"""The processes of the planned run, as if a launcher had started them: what the rules about the world size ask for.

Needs no torch, so that a command line that breaks a rule is refused at once.
"""

import math
from collections.abc import Iterator

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.plan.hardware import GPUS_PER_NODE
from gpt_pretrain.rules.check import config_problems


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
