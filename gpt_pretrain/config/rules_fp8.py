"""Cross-field rules of FP8: each trap of the stack below, found on the laptop and not hours into a run.

Each rule yields one message: the keys and values in conflict, the rule, and the way out.
"""

import fnmatch
from collections.abc import Iterator

from gpt_pretrain.config.fp8 import Fp8Settings, fp8_settings
from gpt_pretrain.config.gemms import linears
from gpt_pretrain.config.schema import ModelConfig


def exclusions(model: ModelConfig, settings: Fp8Settings) -> Iterator[str]:
    """Patterns that keep nothing out of FP8."""
    names = [linear.module for linear in linears(model) if linear.layer >= 0]
    for pattern in settings.exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            yield (
                f"model.fp8_exclude: {pattern!r} matches no linear layer; they are named "
                f"{names[0]} … {names[-1]}, and * stands for anything"
            )


def fp8_problems(model: ModelConfig) -> Iterator[str]:
    """All problems of the FP8 keys that no machine has to be asked about."""
    settings = fp8_settings(model)
    if settings is None:
        return
    yield from exclusions(model, settings)
