"""The rules about single values, and all cross-field rules in the order in which they are reported."""

from collections.abc import Iterator
from itertools import chain

from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.experts import expert_problems
from gpt_pretrain.rules.fp8 import fp8_problems
from gpt_pretrain.rules.model import (
    kernel_problems,
    pipeline,
    positions,
    recomputation,
    world_and_batch,
)
from gpt_pretrain.rules.no_effect import no_effect_problems
from gpt_pretrain.rules.own_model import own_model_problems
from gpt_pretrain.rules.shapes import division_problems, fp8_shape_problems
from gpt_pretrain.rules.training import asked_launch, training_problems
from gpt_pretrain.run.products import Resolved, resolve


def config_problems(config: Config, launch: Launch | None) -> list[str]:
    """A message for every violated rule; without `launch`, none about the world size."""
    run = resolve(config, None if launch is None else asked_launch(config.trainer, launch))
    rules = (ranges(config), no_effect_problems(run), model_problems(run), training_problems(config, launch))
    return list(chain.from_iterable(rules))


def _out_of_range(config: Config) -> dict[str, str]:
    """What is wrong with single values, by key; null is in every range."""
    found = {}
    for path, key in schema_keys().items():
        value = value_of(config, path) if key.facts.has_range else None
        if value is not None and (problem := key.facts.range_problem(value)) is not None:
            found[path] = f"{path}={value} {problem}"
    return found


def ranges(config: Config, section: str = "") -> Iterator[str]:
    """Single values of a section, or of all, out of their ranges."""
    yield from (problem for path, problem in _out_of_range(config).items() if path.startswith(section))


def _is_size(path: str) -> bool:
    """Whether rules divide by a key: a count of the architecture or the layout."""
    return path.rpartition(".")[0] == "model" and (schema_keys()[path].facts.minimum or 0) >= 1


def model_problems(run: Resolved) -> Iterator[str]:
    """The problems of several keys of `model.`, except data and optimizer.

    Rules divide by sizes, so those about shapes need them in their ranges; `ranges` has the others.
    """
    model, sizes_known = run.model, not any(map(_is_size, _out_of_range(run.config)))
    yield from kernel_problems(run, sizes_known=sizes_known)
    yield from fp8_problems(run, sizes_known=sizes_known)
    yield from own_model_problems(model)
    if not sizes_known:
        return
    yield from positions(model)
    shapes = [*division_problems(model), *pipeline(model, run.launch), *expert_problems(run)]
    yield from shapes
    if not shapes:
        # A rank's shapes are known only if everything divides.
        yield from fp8_shape_problems(run)
    yield from recomputation(model)
    if run.launch is not None:
        yield from world_and_batch(model, run.launch)
