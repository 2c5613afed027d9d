"""The cross-field rules: combinations that no single key can be blamed for, found before torch is imported."""

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.model import model_problems
from gpt_pretrain.rules.no_effect import no_effect_problems
from gpt_pretrain.rules.training import training_problems
from gpt_pretrain.spec.resolved import resolve


def config_problems(config: Config, launch: Launch | None) -> list[str]:
    """Every violated rule, as a message; without `launch`, the rules about the world size are left out."""
    run = resolve(config)
    return [*no_effect_problems(run), *model_problems(run, launch), *training_problems(run, launch)]


def check_config(config: Config, launch: Launch) -> None:
    """Checks every cross-field rule.

    Raises:
        ConfigError: All violated rules.
    """
    problems = config_problems(config, launch)
    if problems:
        raise ConfigError(problems)
