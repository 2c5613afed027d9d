"""Which runs a benchmark compares: entries of `benchmark.variants` become overrides that follow the command line's own.

An entry is a name of `benchmark.overrides` or the overrides themselves; `bare` and `bare:ENTRY` run megatron-core's
own loop instead of the application's. Overrides that come later win, so a variant also changes what the command line
has chosen. Needs no torch: what is misspelt is refused before anything runs.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gpt_pretrain.config.derived import decay_steps
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import did_you_mean, flatten, nearest_name
from gpt_pretrain.config.schema import BenchmarkConfig, Config
from gpt_pretrain.config.source import parse_override
from gpt_pretrain.rules.no_effect import given_without_effect
from gpt_pretrain.rules.overrides import single_value

PROFILED_STEPS = 3
_BARE = "bare"
# What a benchmark sets in a run beside its number of steps, so that it only trains.
_OWN_VALUES = {
    "trainer.limit_val_batches": "0",
    "trainer.max_time": "null",
    "trainer.max_spike_rewinds": "null",
    "checkpoint.save_interval": "null",
    "checkpoint.save_interval_minutes": "null",
    "checkpoint.save_at_end": "false",
    "checkpoint.async_save": "true",
    "checkpoint.keep_last": "null",
    "checkpoint.keep_every": "null",
    "checkpoint.on_save_error": "stop",
    "checkpoint.resume": "never",
    "sample.max_new_tokens": "0",
}
_OWN_KEYS = ("trainer.max_steps", *_OWN_VALUES)


class Loop(Enum):
    """Which loop trains: the application's, or megatron-core's pieces in the shortest one."""

    app = "app"
    bare = "bare"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One of the runs that are compared."""

    name: str
    """As `benchmark.variants` has it."""
    loop: Loop
    overrides: tuple[str, ...]
    """What it adds to the command line."""


def read_variants(benchmark: BenchmarkConfig) -> list[Variant]:
    """The variants, in their order.

    Raises:
        ConfigError: A name is unknown.
    """
    problems: list[str] = []
    variants = []
    for entry in benchmark.variants:
        try:
            variants.append(_read_variant(entry, benchmark.overrides))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return variants


def _read_variant(entry: str, named: Mapping[str, str]) -> Variant:
    prefix, colon, rest = entry.partition(":")
    if entry == _BARE:
        return Variant(name=entry, loop=Loop.bare, overrides=())
    loop, what = (Loop.bare, rest) if colon and prefix == _BARE else (Loop.app, entry)
    text = named.get(what)
    if text is None and "=" not in what:
        nearest = did_you_mean(nearest_name(what, [*named, _BARE]))
        known = ", ".join([*named, _BARE, f"{_BARE}:NAME"])
        raise ConfigError(
            [
                f"benchmark.variants: {entry!r} is not a variant{nearest}; use one of {known}, or overrides such as "
                '"fp8=delayed model.fp8_params=true"'
            ]
        )
    try:
        return Variant(name=entry, loop=loop, overrides=tuple(shlex.split(what if text is None else text)))
    except ValueError as error:
        raise ConfigError([f"benchmark.variants: the overrides of {entry!r} cannot be split: {error}"]) from None


def benchmark_problems(config: Config) -> list[str]:
    """The rules about `benchmark` itself; each run checks the rules about runs."""
    return list(_problems(config))


def _problems(config: Config) -> Iterator[str]:
    benchmark = config.benchmark
    for name in ("warmup_steps", "steps", "interval", "rounds"):
        if getattr(benchmark, name) < 1:
            yield f"benchmark.{name}={getattr(benchmark, name)} is too small; use 1 or more"
    if benchmark.interval >= 1 and (benchmark.steps < benchmark.interval or benchmark.steps % benchmark.interval):
        yield (
            f"benchmark.steps={benchmark.steps} is not a multiple of benchmark.interval={benchmark.interval}; use "
            f"{max(1, benchmark.steps // benchmark.interval) * benchmark.interval}, or another interval"
        )
    if not benchmark.variants:
        yield "benchmark.variants=[] compares nothing; give names, such as [app,bare]"
    for entry in dict.fromkeys(benchmark.variants):
        if benchmark.variants.count(entry) > 1:
            yield f"benchmark.variants has {entry!r} twice; benchmark.rounds runs all of them several times"
    yield from _process_problems(config)
    try:
        read_variants(benchmark)
    except ConfigError as error:
        yield from error.problems


def _process_problems(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.num_nodes not in (None, 1):
        yield f"trainer.num_nodes={trainer.num_nodes}: a benchmark runs on one node; use 1 or null"
    if trainer.devices is not None and trainer.devices < 1:
        yield f"trainer.devices={trainer.devices} is too small; use 1 or more, or null for one process"


def own_key_problems(overrides: Sequence[str]) -> list[str]:
    """Problems of overrides of keys that the benchmark sets itself, which would have no effect."""
    return [
        f"{key} has no effect: the benchmark sets it, and only trains, for benchmark.warmup_steps and benchmark.steps; "
        "leave it out"
        for key in _keys(overrides)
        if key in _OWN_KEYS
    ]


def variant_problems(variant: Variant, config: Config) -> list[str]:
    """What a variant may not add.

    Args:
        variant: The variant.
        config: What it makes of the command line.
    """
    common = [
        f"{key} is the same for all variants; give it beside benchmark.variants"
        for key in _keys(variant.overrides)
        if key == "run_dir" or key.startswith("benchmark.")
    ]
    return [*own_key_problems(variant.overrides), *common, *_process_problems(config)]


def _keys(overrides: Sequence[str]) -> list[str]:
    parsed = [parse_override(override) for override in overrides]
    return [path for override in parsed for path, _ in flatten(single_value(override), override.key_or_group)]


def run_overrides(config: Config, run_dir: Path, *, profiled: bool) -> list[str]:
    """What turns a run into a run of the benchmark: its first steps, and nothing beside them.

    Args:
        config: The run, and how many steps.
        run_dir: Where it writes.
        profiled: Whether steps to be profiled follow those that are timed.
    """
    benchmark = config.benchmark
    steps = benchmark.warmup_steps + benchmark.steps + (PROFILED_STEPS if profiled else 0)
    # Hydra's quotes: backslashes count only before a quote.
    key = "model.optim.sched.decay_steps"
    quoted = re.sub(r"(\\*)'", r"\1\1\\'", str(run_dir))
    return [
        f"run_dir='{quoted}'",
        f"trainer.max_steps={steps}",
        # The learning rates stay as they are when the steps become fewer.
        *([] if given_without_effect(config, frozenset({key})) else [f"{key}={decay_steps(config)}"]),
        *(f"{key}={value}" for key, value in _OWN_VALUES.items()),
    ]
