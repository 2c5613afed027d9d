"""Which runs are compared: entries of `benchmark.variants` or `compare.variants` become overrides.

An entry is a name of `benchmark.overrides` or the overrides themselves. In a benchmark, `bare` and `bare:ENTRY` run
megatron-core's own loop instead of the application's. Overrides that come later win, so a variant also changes what the
command line has chosen. Needs no torch: what is misspelt, or refused by rules or machine, is told before anything runs.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from gpt_pretrain.config.derived import decay_steps
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import did_you_mean, flatten, nearest_name
from gpt_pretrain.config.schema import BenchmarkConfig, Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.rules.no_effect import given_without_effect
from gpt_pretrain.rules.overrides import parse_override, single_value
from gpt_pretrain.spec.platform import Platform

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
    """As written in the key that lists the variants."""
    loop: Loop
    overrides: tuple[str, ...]
    """What it adds to the command line."""

    @property
    def file_name(self) -> str:
        """The name without what file systems dislike; two variants may share it."""
        return re.sub(r"[^\w.-]+", "_", self.name)[:60]


def read_variants(
    entries: Sequence[str], named: Mapping[str, str], key: str, *, repeats: str, with_bare: bool
) -> list[Variant]:
    """The variants, in their order.

    `key` and `repeats` are the keys that hold the entries and that run them several times.

    Raises:
        ConfigError: There are none, a name is unknown, or an entry stands twice.
    """
    problems: list[str] = []
    variants = []
    if not entries:
        example = "[app,bare]" if with_bare else "[bf16,fp8_delayed]"
        problems.append(f"{key}=[] compares nothing; give names, such as {example}")
    for entry in dict.fromkeys(entries):
        if entries.count(entry) > 1:
            problems.append(f"{key} has {entry!r} twice; {repeats} runs all of them several times")
        try:
            variants.append(_read_variant(entry, named, key, with_bare=with_bare))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return variants


def benchmark_variants(benchmark: BenchmarkConfig) -> list[Variant]:
    """The variants of a benchmark; raises what `read_variants` does."""
    key, repeats = "benchmark.variants", "benchmark.rounds"
    return read_variants(benchmark.variants, benchmark.overrides, key, repeats=repeats, with_bare=True)


def _read_variant(entry: str, named: Mapping[str, str], key: str, *, with_bare: bool) -> Variant:
    prefix, colon, rest = entry.partition(":")
    if entry == _BARE and with_bare:
        return Variant(name=entry, loop=Loop.bare, overrides=())
    loop, what = (Loop.bare, rest) if with_bare and colon and prefix == _BARE else (Loop.app, entry)
    text = named.get(what)
    if text is None and "=" not in what:
        bare = [_BARE] if with_bare else []
        nearest = did_you_mean(nearest_name(what, [*named, *bare]))
        known = ", ".join([*named, *bare, *(f"{name}:NAME" for name in bare)])
        raise ConfigError(
            [
                f"{key}: {entry!r} is not a variant{nearest}; use one of {known}, or overrides such as "
                '"fp8=delayed model.fp8_params=true"'
            ]
        )
    try:
        return Variant(name=entry, loop=loop, overrides=tuple(shlex.split(what if text is None else text)))
    except ValueError as error:
        raise ConfigError([f"{key}: the overrides of {entry!r} cannot be split: {error}"]) from None


def load_variants(
    variants: Sequence[Variant],
    source: Source,
    overrides: Sequence[str],
    refuse: Callable[[Variant, Config], Iterable[str]],
    problems: Sequence[str] = (),
) -> dict[Variant, Config]:
    """What each variant makes of a command line; the rules about runs are not asked.

    `refuse` finds the problems of a variant; `problems` are those of the command line itself.

    Raises:
        ConfigError: Those problems; and unknown keys, wrong values and what `refuse` found, each with its variant.
    """
    all_problems, configs = list(problems), {}
    for variant in variants:
        found: Iterable[str]
        try:
            configs[variant] = load_config([*overrides, *variant.overrides], source)
            found = refuse(variant, configs[variant])
        except ConfigError as error:
            found = error.problems
        all_problems += [f"{problem} [{variant.name}]" for problem in found]
    if all_problems:
        raise ConfigError(all_problems)
    return configs


def benchmark_problems(config: Config) -> Iterator[str]:
    """The rules about `benchmark` itself; each run checks the rules about runs."""
    benchmark = config.benchmark
    for name in ("warmup_steps", "steps", "interval", "rounds"):
        if getattr(benchmark, name) < 1:
            yield f"benchmark.{name}={getattr(benchmark, name)} is too small; use 1 or more"
    too_few = benchmark.steps < benchmark.interval
    if min(benchmark.interval, benchmark.steps) >= 1 and (too_few or benchmark.steps % benchmark.interval):
        yield (
            f"benchmark.steps={benchmark.steps} is not a multiple of benchmark.interval={benchmark.interval}; use "
            f"{max(1, benchmark.steps // benchmark.interval) * benchmark.interval}, or another interval"
        )
    yield from process_problems(config)
    try:
        benchmark_variants(benchmark)
    except ConfigError as error:
        yield from error.problems


def process_problems(config: Config) -> Iterator[str]:
    """What is wrong with the processes that a variant is given on this machine."""
    trainer = config.trainer
    if trainer.num_nodes not in (None, 1):
        yield f"trainer.num_nodes={trainer.num_nodes}: variants run on one node; use 1 or null"
    if trainer.devices is not None and trainer.devices < 1:
        yield f"trainer.devices={trainer.devices} is too small; use 1 or more, or null for one process"


def own_key_problems(overrides: Sequence[str]) -> list[str]:
    """Problems of overrides of keys that the benchmark sets itself, which would have no effect."""
    return [
        f"{key} has no effect: the benchmark sets it, and only trains, for benchmark.warmup_steps and benchmark.steps; "
        "leave it out"
        for key in override_keys(overrides)
        if key in _OWN_KEYS
    ]


def variant_problems(variant: Variant, config: Config) -> list[str]:
    """What a variant may not add; `config` is what it makes of the command line."""
    common = common_key_problems(variant, "benchmark")
    return [*own_key_problems(variant.overrides), *common, *process_problems(config)]


def common_key_problems(variant: Variant, section: str, keys: Sequence[str] = ()) -> list[str]:
    """Problems of a variant that sets keys which all variants share: `run_dir`, those of a section, and `keys`."""
    return [
        f"{key} is the same for all variants; give it beside {section}.variants"
        for key in override_keys(variant.overrides)
        if key in ("run_dir", *keys) or key.startswith(f"{section}.")
    ]


def launch_here(config: Config) -> Launch:
    """Rank 0 of a variant's processes on this machine."""
    num_processes = config.trainer.devices or 1
    launcher = "none" if num_processes == 1 else "torchrun"
    return rank_zero_of(num_processes, local_world_size=num_processes, launcher=launcher)


def variant_refusals(config: Config, platform: Platform) -> list[str]:
    """What the rules about runs, and if those are kept the machine, refuse of a run in processes here."""
    launch = launch_here(config)
    last = launch.world_size - 1
    # The last rank is the one that finds no GPU.
    return config_problems(config, launch) or machine_problems(
        config, replace(launch, rank=last, local_rank=last), platform
    )


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides set."""
    parsed = [parse_override(override) for override in overrides]
    return [path for override in parsed for path, _ in flatten(single_value(override), override.key_or_group)]


def run_overrides(config: Config, run_dir: Path, *, profiled: bool) -> list[str]:
    """The overrides that turn a run into the benchmark's: its first steps, and nothing else."""
    benchmark = config.benchmark
    steps = benchmark.warmup_steps + benchmark.steps + (PROFILED_STEPS if profiled else 0)
    key = "model.optim.sched.decay_steps"
    return [
        run_dir_override(run_dir),
        f"trainer.max_steps={steps}",
        # The learning rates stay as they are when the steps become fewer.
        *([] if given_without_effect(config, frozenset({key})) else [f"{key}={decay_steps(config)}"]),
        *(f"{key}={value}" for key, value in _OWN_VALUES.items()),
    ]


def run_dir_override(run_dir: Path) -> str:
    """`run_dir=…` in Hydra's quotes, where backslashes count only before a quote."""
    quoted = re.sub(r"(\\*)'", r"\1\1\\'", str(run_dir))
    return f"run_dir='{quoted}'"
