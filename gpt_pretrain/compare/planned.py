"""Which runs a comparison trains: variants × seeds, each in an ordinary run directory.

Run k of every variant has `model.seed` + k, hence the same initial weights, data order and dropout as run k of the
others: they differ only in the variant.

A run is finished if its records say so; an unfinished one resumes from its newest checkpoint. A directory whose run had
other values is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt_pretrain.benchmark.variants import (
    Variant,
    common_key_problems,
    launch_here,
    load_variants,
    process_problems,
    read_variants,
    run_dir_override,
)
from gpt_pretrain.compare.answers import gate_problems
from gpt_pretrain.compare.comparability import identity
from gpt_pretrain.compare.sources import numbered
from gpt_pretrain.config.errors import ConfigError, UserError, show
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict, load_saved_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.rules.check import config_problems, ranges

RUNS = "runs"
# The sections whose values change losses or times, and their keys that change neither.
_COUNTING, _IDLE = ("model.", "trainer."), ("trainer.max_time", "trainer.hang_timeout")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a comparison."""

    variant: Variant
    seed: int
    run_dir: Path
    overrides: tuple[str, ...]
    """The whole command line of the run."""
    unread: tuple[str, ...]
    """As of `LoadedVariant`."""
    config: Config
    problems: tuple[str, ...]
    """Why the rules about runs, or this machine, refuse to train it."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done; raises `UserError` if the run's records are damaged."""
        if not metrics_path(self.run_dir).exists():
            return False
        metrics = load_metrics(self.run_dir)
        if metrics.summary is not None:
            return metrics.summary.end_reason == "max_steps"
        # A run that was killed after its last step would write no summary when started again either.
        return bool(metrics.train) and metrics.train[-1].step >= self.config.trainer.max_steps


def compare_problems(config: Config) -> Iterator[str]:
    """The rules about the keys of `compare`; `plan_runs` checks each run."""
    yield from ranges(config, "compare.")
    yield from gate_problems(config.compare)
    try:
        if len(read_variants(config, "compare")) == 1:
            yield "compare.variants has one entry and nothing to compare it with; put the baseline before it: [bf16,…]"
    except ConfigError as error:
        yield from error.problems


def plan_runs(config: Config, source: Source, overrides: Sequence[str], run_dir: Path) -> list[PlannedRun]:
    """The runs in training order: all variants of the first seed, then of the next, to compare as early as possible.

    Raises:
        ConfigError: A variant has unknown keys, wrong values or keys that all must share, or makes losses incomparable;
            or the baseline breaks a rule about runs.
        UserError: A run directory holds a run with other values.
    """

    def refuse(variant: Variant, config: Config) -> Iterator[str]:
        yield from common_key_problems(variant, "compare", ["model.seed"])
        yield from process_problems(config)

    variants = read_variants(config, "compare")
    loaded = load_variants(variants, source, overrides, refuse)
    configs = {variant: each.config for variant, each in loaded.items()}
    incomparable = [problem for variant in variants for problem in _obstacles(variant, configs, variants[0])]
    if incomparable:
        raise ConfigError(incomparable)
    folders = dict(zip(variants, numbered([variant.file_name for variant in variants], "_"), strict=True))

    def plan(variant: Variant, seed: int) -> PlannedRun:
        whole = configs[variant]
        path = run_dir / RUNS / f"{folders[variant]}_seed_{seed}"
        model, logging, own = replace(whole.model, seed=seed), whole.logging, [f"model.seed={seed}"]
        if not model.fp8 and logging.fp8_statistics_interval is not None:
            # Meant for the other variants; the rules refuse it without FP8.
            logging = replace(logging, fp8_statistics_interval=None)
            own.append("logging.fp8_statistics_interval=null")
        planned = replace(whole, model=model, logging=logging, run_dir=str(path))
        return PlannedRun(
            variant=variant,
            seed=seed,
            run_dir=path,
            overrides=(*loaded[variant].overrides, *own, run_dir_override(path)),
            unread=loaded[variant].unread,
            config=planned,
            problems=tuple(config_problems(planned, launch_here(planned))),
        )

    first, baseline = config.model.seed, variants[0]
    runs = [plan(variant, first + number) for number in range(config.compare.seeds) for variant in variants]
    if runs[0].problems:
        raise ConfigError([f"{problem} [{baseline.name}]" for problem in runs[0].problems])
    for run in runs:
        _check_same_values(run)
    return runs


def _obstacles(variant: Variant, configs: Mapping[Variant, Config], baseline: Variant) -> Iterator[str]:
    """What a variant changes although it must share it with the baseline: found here, not after days of training."""
    ours, theirs = (dict(flatten(config_to_dict(configs[each]))) for each in (variant, baseline))
    for what, keys in identity().items():
        for key in keys:
            if ours[key] != theirs[key]:
                yield (
                    f"{key}={show(ours[key])} changes the {what}, so losses cannot be compared with those of "
                    f"{baseline.name} at {show(theirs[key])}; set it outside of compare.variants [{variant.name}]"
                )


def _check_same_values(run: PlannedRun) -> None:
    """Refuses a directory whose run has other values than this command line's."""
    saved_path = run.run_dir / "config.yaml"
    if not saved_path.exists():
        return
    saved, now = (_counting_values(config) for config in (load_saved_config(saved_path), run.config))
    different = [
        f"{key}={show(saved[key])} there, {show(value)} here" for key, value in now.items() if saved[key] != value
    ]
    if different:
        raise UserError(
            f"{run.run_dir} holds a run with other values ({'; '.join(different)}); give the values that it was "
            "started with, or another run_dir"
        )


def _counting_values(config: Config) -> dict[str, object]:
    values = flatten(config_to_dict(config))
    return {key: value for key, value in values if key.startswith(_COUNTING) and key not in _IDLE}
