"""The machine that is planned for: the chosen GPU with Transformer Engine, as training would find it.

The same checks and the same translations as training's get it in place of the machine that the plan is made on.
"""

from dataclasses import replace

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.hardware import GPUS
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.spec.platform import Platform, multicast_variables, recipe_variables
from gpt_pretrain.spec.run_spec import build_run_spec

# What this project is tested with (pyproject.toml, constraints.txt).
TRANSFORMER_ENGINE, FLASH_ATTENTION, TORCH_CUDA = "2.12.0", "4.0.0b36", "13.0"


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
        transformer_engine_problem=None,
        recipe_variables=recipe_variables(),
        multicast_variables=multicast_variables(),
        flash_attention=FLASH_ATTENTION if config.model.use_flash_attention else None,
        flash_attention_problem=None,
        apex_layer_norm=False,
        apex_optimizer=False,
        apex_softmax=False,
        apex_weight_gradient=False,
    )


def _refusals(config: Config, launch: Launch) -> list[str]:
    try:
        check_machine(build_run_spec(config, launch, planned_platform(config, launch)))
    except ConfigError as error:
        return list(error.problems)
    return []


def platform_problems(config: Config, launch: Launch) -> list[str]:
    """What the planned machine would refuse, with the GPUs that would not."""
    problems = _refusals(config, launch)
    if not problems:
        return []
    on_others = {gpu.name: replace(config, plan=replace(config.plan, gpu=gpu)) for gpu in GPUS}
    fitting = [name for name, other in on_others.items() if not _refusals(other, launch)]
    return [f"{problem}; or plan.gpu={' or '.join(fitting)}" if fitting else problem for problem in problems]
