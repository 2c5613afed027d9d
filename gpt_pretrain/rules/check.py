"""All cross-field rules, in the order in which they are told, found before torch is imported."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.files import find_conf_dir
from gpt_pretrain.config.keys import is_known, schema_keys
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.experts import expert_problems
from gpt_pretrain.rules.fp8 import fp8_problems
from gpt_pretrain.rules.model import (
    compile_problems,
    fused_kernel_problems,
    fusions,
    gradients,
    graph_problems,
    numbers,
    pipeline,
    positions,
    recomputation,
    sizes_are_positive,
    tensor_parallel_overlap,
    world_and_batch,
)
from gpt_pretrain.rules.no_effect import no_effect_problems
from gpt_pretrain.rules.shapes import (
    Accepts,
    attention_heads,
    fp8_shape_problems,
    rotated_pairs,
    sequence,
    widths_over_tensor_ranks,
)
from gpt_pretrain.rules.training import training_problems
from gpt_pretrain.spec.products import Resolved, resolve

# The key of a `key=value` that a message offers.
_NAME = re.compile(r"(?<![\w.*/'\"-])[a-z]\w*(?:\.[a-z]\w*)*(?==)")


def config_problems(config: Config, launch: Launch | None) -> list[str]:
    """Every violated rule, as a message; without `launch`, the rules about the world size are left out."""
    run = resolve(config)
    return spell_out([*no_effect_problems(run), *model_problems(run, launch), *training_problems(run, launch)])


def check_config(config: Config, launch: Launch) -> None:
    """Checks every cross-field rule.

    Raises:
        ConfigError: All violated rules.
    """
    problems = config_problems(config, launch)
    if problems:
        raise ConfigError(problems)


def model_problems(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """All problems of `model.` except data and optimizer; without `launch`, no rules about the world size."""
    model = run.model
    sizes = list(sizes_are_positive(model))
    yield from sizes
    yield from numbers(model)
    yield from gradients(model)
    yield from graph_problems(run)
    yield from compile_problems(run)
    yield from fusions(model)
    yield from fused_kernel_problems(run, sizes_known=not sizes)
    yield from fp8_problems(run, sizes_known=not sizes)
    if sizes:
        return

    def accepts(key: str, value: int) -> bool:
        changed: dict[str, Any] = {key: value}
        candidate = replace(model, **changed)
        other = resolve(replace(run.config, model=candidate))
        batch = () if launch is None else world_and_batch(candidate, launch)
        told = chain(_shape_problems(other, launch, lambda *_: True), batch)
        return not any(f"model.{key}=" in problem for problem in told)

    yield from positions(model)
    yield from _shape_problems(run, launch, accepts)
    yield from recomputation(model)
    yield from tensor_parallel_overlap(run, launch)
    if launch is not None:
        yield from world_and_batch(model, launch)


def _shape_problems(run: Resolved, launch: Launch | None, accepts: Accepts) -> Iterator[str]:
    """Divisions, and the multiples of FP8; values that they offer satisfy `accepts`, where possible."""
    model = run.model
    shapes = [
        *attention_heads(model, launch, accepts),
        *rotated_pairs(model, accepts),
        *widths_over_tensor_ranks(model, accepts),
        *pipeline(model, launch),
        *sequence(model, accepts),
        *expert_problems(run, launch),
    ]
    yield from shapes
    if not shapes:
        # A rank's shapes are known only where everything divides.
        yield from fp8_shape_problems(run, accepts)


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in find_conf_dir().iterdir() if path.is_dir())


def spell_out(problems: Iterable[str]) -> list[str]:
    """The problems of rules, with keys written out behind the last semicolon, where they say what to type instead."""
    return [_spell_out(problem) for problem in problems]


def _spell_out(problem: str) -> str:
    told, semicolon, offer = problem.rpartition("; ")
    section = told.partition("=")[0].rpartition(".")[0]

    def whole(found: re.Match[str]) -> str:
        name = found[0]
        if is_known(name) or name in _groups():
            return name
        keys = [key for key in schema_keys() if key.endswith(f".{name}")]
        near = [key for key in keys if key == f"{section}.{name}"] or keys
        return near[0] if len(near) == 1 else name

    return told + semicolon + _NAME.sub(whole, offer)
