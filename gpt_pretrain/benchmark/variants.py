"""Which runs are compared: entries of `benchmark.variants` or `compare.variants` become overrides.

An entry is a name in `benchmark.overrides` or the overrides themselves. In a benchmark, `bare` and `bare:ENTRY` run
megatron-core's own loop instead of the application's. A variant's overrides come last and win over the command line.
Without torch, so that typos and refusals by rules or machine are reported before anything runs.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpt_pretrain.config.errors import ConfigError, hydra_quoted
from gpt_pretrain.config.keys import did_you_mean, flatten, nearest_name
from gpt_pretrain.config.schedule import rate_phases
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.rules.check import config_problems, ranges
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.rules.no_effect import given_without_effect, unread_keys
from gpt_pretrain.rules.overrides import parse_override, single_value
from gpt_pretrain.run.platform import Platform

PROFILED_STEPS = 3
_BARE = "bare"
# What a benchmark sets in a run besides the number of steps, so that it only trains.
_OWN_VALUES = {
    "trainer.limit_val_batches": "0",
    "trainer.max_tokens": "null",
    "evaluation.tasks": "[]",
    "trainer.max_time": "null",
    # Every step has as many samples as the last ones of the run.
    "model.rampup_batch_size": "null",
    "model.step_batch_size_schedule": "null",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One of the runs that are compared."""

    name: str
    """The entry in the list of variants."""
    loop: Literal["app", "bare"]
    """Which loop trains: the application's, or the shortest one from megatron-core's pieces."""
    overrides: tuple[str, ...]
    """What it adds to the command line."""

    @property
    def file_name(self) -> str:
        """The name without characters that file systems dislike; not unique."""
        return re.sub(r"[^\w.-]+", "_", self.name)[:60]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedVariant:
    """A variant's configuration, before the rules about runs, and the command line of its runs."""

    config: Config
    overrides: tuple[str, ...]
    unread: tuple[str, ...]
    """A line for each override of the command line that this variant goes without, because only others read it."""


def read_variants(config: Config, section: Literal["benchmark", "compare"]) -> list[Variant]:
    """The variants in their order; raises `ConfigError` for none, unknown names and repeated entries."""
    with_bare = section == "benchmark"
    entries = config.benchmark.variants if with_bare else config.compare.variants
    key, repeats = f"{section}.variants", "benchmark.rounds" if with_bare else "compare.seeds"
    problems: list[str] = []
    variants = []
    if not entries:
        example = "[app,bare]" if with_bare else "[bf16,fp8_delayed]"
        problems.append(f"{key}=[] compares nothing; give names, such as {example}")
    for entry in dict.fromkeys(entries):
        if entries.count(entry) > 1:
            problems.append(f"{key} has {entry!r} twice; use {repeats} to repeat all variants")
        try:
            variants.append(_read_variant(entry, config.benchmark.overrides, key, with_bare=with_bare))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return variants


def _read_variant(entry: str, named: Mapping[str, str], key: str, *, with_bare: bool) -> Variant:
    prefix, colon, rest = entry.partition(":")
    if entry == _BARE and with_bare:
        return Variant(name=entry, loop="bare", overrides=())
    is_bare = with_bare and colon and prefix == _BARE
    what = rest if is_bare else entry
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
        overrides = tuple(shlex.split(what if text is None else text))
    except ValueError as error:
        raise ConfigError([f"{key}: the overrides of {entry!r} cannot be split: {error}"]) from None
    return Variant(name=entry, loop="bare" if is_bare else "app", overrides=overrides)


def load_variants(
    variants: Sequence[Variant],
    source: Source,
    overrides: Sequence[str],
    refuse: Callable[[Variant, Config], Iterable[str]],
    problems: Sequence[str] = (),
) -> dict[Variant, LoadedVariant]:
    """Each variant with the `overrides` of the command line that have an effect in it.

    Raises `ConfigError` with the `problems` of the command line itself, with unknown keys, wrong values and what
    `refuse` found, each with its variant, and with overrides that have no effect in any of the variants.
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
    unread = {variant: _unread(overrides, variant, config) for variant, config in configs.items()}
    nowhere = [override for override in overrides if all(override in each for each in unread.values())]
    first, config = next(iter(configs.items()))
    if unused := given_without_effect(config, frozenset(override_keys(nowhere))):
        raise ConfigError([f"{problem} [{first.name}, and all other variants]" for problem in unused])
    for each in unread.values():
        for override in nowhere:
            del each[override]
    return {variant: _without(overrides, variant, unread[variant], source) for variant in configs}


def _unread(overrides: Sequence[str], variant: Variant, config: Config) -> dict[str, str]:
    """The overrides of the command line that a variant does not read, and why."""
    own, unread = {*override_keys(variant.overrides)}, {}
    for override in overrides:
        keys = frozenset(override_keys([override]))
        why = unread_keys(config, keys)
        if keys and keys == why.keys() and not keys & own:
            unread[override] = next(iter(why.values()))
    return unread


def _without(overrides: Sequence[str], variant: Variant, unread: Mapping[str, str], source: Source) -> LoadedVariant:
    kept = (*(override for override in overrides if override not in unread), *variant.overrides)
    told = tuple(f"{variant.name} goes without {override}: no effect with {why}" for override, why in unread.items())
    return LoadedVariant(config=load_config(kept, source), overrides=kept, unread=told)


def benchmark_problems(config: Config) -> Iterator[str]:
    """The rules about the keys of `benchmark`; each run checks the rules about runs."""
    benchmark = config.benchmark
    yield from ranges(config, "benchmark.")
    if min(benchmark.interval, benchmark.steps) >= 1 and benchmark.steps % benchmark.interval:
        yield (
            f"benchmark.steps={benchmark.steps} is not a multiple of benchmark.interval={benchmark.interval}; use "
            f"{max(1, benchmark.steps // benchmark.interval) * benchmark.interval}, or another interval"
        )
    yield from process_problems(config)
    try:
        read_variants(config, "benchmark")
    except ConfigError as error:
        yield from error.problems


def process_problems(config: Config) -> Iterator[str]:
    """Problems with a variant's number of processes on this machine."""
    trainer = config.trainer
    if trainer.num_nodes not in (None, 1):
        yield f"trainer.num_nodes={trainer.num_nodes}: variants run on one node; use 1 or null"
    if trainer.devices is not None and trainer.devices < 1:
        yield f"trainer.devices={trainer.devices} is too small; use 1 or more, or null for one process"


def own_key_problems(overrides: Sequence[str]) -> list[str]:
    """Problems of overrides without effect, because the benchmark sets their keys."""
    return [
        f"{key} has no effect: the benchmark sets it to train for benchmark.warmup_steps and benchmark.steps only; "
        "leave it out"
        for key in override_keys(overrides)
        if key in _OWN_KEYS
    ]


def variant_problems(variant: Variant, config: Config) -> list[str]:
    """Why a variant of a benchmark with this configuration cannot run."""
    common = common_key_problems(variant, "benchmark")
    return [*own_key_problems(variant.overrides), *common, *process_problems(config)]


def common_key_problems(variant: Variant, section: str, keys: Sequence[str] = ()) -> list[str]:
    """Problems of a variant that sets keys all variants share: `run_dir`, those of a section, and `keys`."""
    return [
        f"{key} must be the same for all variants; set it outside of {section}.variants"
        for key in override_keys(variant.overrides)
        if key in ("run_dir", *keys) or key.startswith(f"{section}.")
    ]


def launch_here(config: Config) -> Launch:
    """Rank 0 of a variant's processes on this machine."""
    num_processes = config.trainer.devices or 1
    launcher = "none" if num_processes == 1 else "torchrun"
    return rank_zero_of(num_processes, local_world_size=num_processes, launcher=launcher)


def variant_refusals(config: Config, platform: Platform) -> list[str]:
    """Why the rules about runs, or else this machine, refuse a run."""
    launch = launch_here(config)
    # If a GPU is missing, the last rank finds none.
    last = launch.world_size - 1
    return config_problems(config, launch) or machine_problems(
        build_run_spec(config, replace(launch, rank=last, local_rank=last), platform)
    )


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides set."""
    parsed = [parse_override(override) for override in overrides]
    return [path for override in parsed for path, _ in flatten(single_value(override), override.key_or_group)]


def run_overrides(config: Config, run_dir: Path, *, profiled: bool) -> list[str]:
    """The overrides that reduce a run to the benchmark's: its first steps and nothing else."""
    benchmark = config.benchmark
    steps = benchmark.warmup_steps + benchmark.steps + (PROFILED_STEPS if profiled else 0)
    phases, sched = rate_phases(config), "model.optim.sched"
    decay = [f"{sched}.decay_steps={phases.decay}"]
    if phases.in_tokens:
        decay = [f"{sched}.decay_steps=null", f"{sched}.decay_tokens={phases.decay}"]
    return [
        f"run_dir={hydra_quoted(str(run_dir))}",
        f"trainer.max_steps={steps}",
        # Fewer steps must not change the learning rates.
        *([] if given_without_effect(config, frozenset({decay[-1].partition("=")[0]})) else decay),
        *(f"{key}={value}" for key, value in _OWN_VALUES.items()),
    ]
