"""What `plan` says of a variant, to stand beside what is measured of it."""

from gpt_pretrain.benchmark.results import Forecast
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.plan.forecast import build_plan
from gpt_pretrain.plan.machine import platform_problems
from gpt_pretrain.plan.memory import GIB
from gpt_pretrain.plan.world import planned_launch


def forecast(config: Config) -> Forecast:
    """Plans a run on `plan.num_gpus` of `plan.gpu`.

    Raises:
        ConfigError: The planned machine refuses it.
    """
    launch = planned_launch(config)
    problems = platform_problems(config, launch)
    if problems:
        raise ConfigError(problems)
    plan = build_plan(config, launch)
    return Forecast(
        memory_gib=plan.memory.worst.peak / GIB,
        tokens_per_s_per_gpu=None if plan.speed is None else plan.speed.run.tokens_per_s_per_gpu,
    )
