"""The gate: finds everything wrong with a configuration before torch is imported, and reports it at once.

Hydra silently composes a typo after `+` or `++`, and checks no key in YAML. The gate therefore

1. checks the keys on the command line before Hydra sees them;
2. lets Hydra compose the legal ones, and checks the keys of every YAML file involved;
3. reads every value as its type (`config.load`);
4. runs the cross-field rules, unless something was refused: they would blame the rest for what is missing.

All jobs of a sweep pass it before the first one starts.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.keys import flatten, is_known, unknown_key
from gpt_pretrain.config.load import read_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.slurm import Submission, is_submission, read_submission
from gpt_pretrain.rules.no_effect import given_without_effect
from gpt_pretrain.rules.overrides import (
    CommandLine,
    lines_of,
    parse_override,
    parse_overrides,
    readers_of,
    single_value,
    without_sweeps,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a command line: the only one, or one of a sweep."""

    overrides: tuple[str, ...]
    """What distinguishes it from the sweep's other jobs; empty without a sweep."""
    config: Config
    submission: Submission | None = None
    """How it is submitted to Slurm; None: it runs in this process."""
    arguments: tuple[str, ...] = ()
    """The arguments of Slurm's job."""

    @property
    def name(self) -> str:
        """The overrides as one text; empty without a sweep."""
        return " ".join(self.overrides)


# Problems of a configuration that runs here or is submitted to Slurm.
Rules = Callable[[Config, Submission | None], Iterable[str]]


def _display(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _check_files(loader: Loader, overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Problems with keys in the YAML files of a composition, and the file that set each key last."""
    problems: list[str] = []
    origins: dict[str, str] = {}
    source = loader.source
    for default, loaded in loader.files(overrides):
        package = "" if default.package in (None, "_global_") else str(default.package)
        if package.partition(".")[0] == "hydra":
            continue
        name = str(default.config_path).removesuffix(".yaml") + ".yaml"
        file = _display(Path(loaded.path.removeprefix("file://")) / name)
        if source.config_dir is not None and loaded.provider == "main" and (source.config_dir / name).is_file():
            hidden = _display(source.config_dir.resolve() / name)
            problems.append(f"{hidden} is hidden by {file}, which Hydra finds first; give it another name")
        content = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(content, dict):
            if content:
                problems.append(f"{file}: holds a list where keys are expected")
            continue
        if not package:
            content = {name: value for name, value in content.items() if name != "hydra"}
        for path, _ in flatten(content, package):
            if not is_known(path):
                problems.append(f"{file}: {unknown_key(path)}")
            else:
                origins[path] = file
    return problems, origins


def default_run_dir(composed: DictConfig) -> DictConfig:
    """Gives a sweep's job a run directory, Hydra's sweep directory and job number, unless the user gave one."""
    unset = "run_dir" in composed and not OmegaConf.is_interpolation(composed, "run_dir") and composed.run_dir is None
    if unset and HydraConfig.get().mode is RunMode.MULTIRUN:
        merged = OmegaConf.merge(composed, {"run_dir": HydraConfig.get().runtime.output_dir})
        assert isinstance(merged, DictConfig)
        return merged
    return composed


def _read_job(
    composed: DictConfig, number: int, origins: dict[str, str], *, complete: bool
) -> tuple[Config | None, list[str]]:
    """Reads the typed configuration as the job itself will, `${hydra:…}` interpolations included."""
    with open_dict(composed):
        composed.hydra.job.num = number
        composed.hydra.job.id = str(number)
        sweep = composed.hydra.mode is RunMode.MULTIRUN
        directory = Path(composed.hydra.sweep.dir, composed.hydra.sweep.subdir) if sweep else composed.hydra.run.dir
        composed.hydra.runtime.output_dir = str(Path(directory).absolute())
    # As Hydra's `set_config`, which copies it.
    HydraConfig.instance().cfg = cast(Any, composed)
    try:
        nodes = {name: node for name, node in composed.items_ex(resolve=False) if name != "hydra"}
        task = DictConfig(nodes, flags={"no_deepcopy_set_nodes": True})
        return read_config(default_run_dir(task), origins=origins, complete=complete)
    finally:
        HydraConfig.instance().cfg = None


def _sweep_jobs(base: DictConfig, accepted: Sequence[Override]) -> list[list[str]]:
    """The overrides of each job, as Hydra's own sweeper splits them."""
    for plugin, name, ways in (
        (base.hydra.sweeper, "sweeper", "hydra/sweeper=basic"),
        (base.hydra.launcher, "launcher", "hydra/launcher=basic, one after another, or as jobs of Slurm, =slurm"),
    ):
        ours = str(plugin._target_).startswith("hydra._internal.core_plugins.basic_") or is_submission(plugin)
        if not ours:
            problem = f"hydra/{name}: {plugin._target_} is not supported"
            raise ConfigError([f"{problem}; a sweep's jobs run with {ways}"])
    params = [parse_override(f"{key}={value}") for key, value in (base.hydra.sweeper.params or {}).items()]
    tasks = [override for override in accepted if not override.is_hydra_override()]
    return BasicSweeper.split_arguments([*params, *tasks], None)[0]


def _told_once(found: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The problems of all jobs, each once; if not all jobs have one, with the overrides of those that do."""
    jobs_of: dict[str, list[str]] = {}
    for job, problems in found:
        for problem in dict.fromkeys(problems):
            jobs_of.setdefault(problem, []).append(job)
    return [
        problem if len(jobs) == len(found) else f"{problem} [{'; '.join(jobs)}]" for problem, jobs in jobs_of.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gate:
    loader: Loader
    given: frozenset[str]
    """Keys that the command line sets: no file is to blame for their values, and they must have an effect."""
    multirun: bool
    complete: bool
    submission: Submission | None
    rules: Rules | None

    def check_job(self, number: int, lines: Sequence[str], overrides: tuple[str, ...]) -> tuple[Job | None, list[str]]:
        """Composes one job and reads its configuration; None if it has problems or open values."""
        try:
            composed = self.loader.compose(lines)
        except ConfigError as error:
            return None, list(error.problems)
        problems, origins = _check_files(self.loader, lines)
        if composed.hydra.mode is RunMode.MULTIRUN and not self.multirun:
            return None, [*problems, "hydra.mode=MULTIRUN: a sweep is started with -m"]
        origins = {path: file for path, file in origins.items() if path not in self.given}
        config, wrong = _read_job(composed, number, origins, complete=self.complete)
        # A key that a file misspells is also in the composed configuration.
        named = {problem.partition(": ")[2] for problem in problems}
        problems += [problem for problem in wrong if problem not in named]
        if config is not None and not problems and self.rules is not None:
            problems = [*given_without_effect(config, self.given), *self.rules(config, self.submission)]
        if config is None:
            return None, problems
        arguments = () if self.submission is None else _alone(composed, config)
        if self.submission is not None:
            problems += _run_dir_of_a_job(config)
        problems += [
            f"{argument}: ${{hydra:…}} is of this sweep, and Slurm's job of one run does not know it; write the value"
            for argument in arguments
            # As it was typed, or as Hydra's sweeper quotes it.
            if re.search(r"\$\\?\{hydra\b", argument)
        ]
        if problems:
            return None, problems
        return Job(overrides=overrides, config=config, submission=self.submission, arguments=arguments), problems


def _alone(composed: DictConfig, config: Config) -> tuple[str, ...]:
    """The arguments of a job on its own, outside the sweep, with explicit directory and FP8 preset."""
    lines = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    assert isinstance(lines, list)
    keys = [str(line).lstrip("+").partition("=")[0] for line in lines]
    # A submitted run would refuse the keys of the comparison that submits it.
    task = [str(line) for line, key in zip(lines, keys, strict=True) if key != "run_dir" and not readers_of(key)]
    return (*task, f"fp8={composed.hydra.runtime.choices.fp8}", f"run_dir={config.run_dir}")


def _run_dir_of_a_job(config: Config) -> list[str]:
    """The batch script takes the path literally and gives it to Hydra in single quotes."""
    assert config.run_dir is not None, "a sweep's jobs have directories of their own"
    if not re.search(r"['\\\x00-\x1f\x7f]|\$\{", config.run_dir):
        return []
    return [
        f"run_dir={show(config.run_dir)} has characters that a job of Slurm cannot be given (single quotes, "
        "backslashes, ${…}); give another one with run_dir=… or hydra.sweep.dir=…"
    ]


def check_command(
    loader: Loader,
    overrides: Sequence[str],
    *,
    multirun: bool = False,
    complete: bool = True,
    rules: Rules | None = None,
    command: str | None = None,
) -> list[Job]:
    """Checks a command line completely and returns its jobs: one without a sweep (`multirun`).

    A configuration that is only shown needs no `rules`, and may have open values (`???`) unless it must be `complete`;
    there is then no job. `command` is the one that the overrides were typed to, None if another command passes them on.

    Raises:
        ConfigError: Everything that is wrong.
    """
    parsed, problems = parse_overrides(overrides, loader.groups())
    loader.search_also(parsed)
    command_line = CommandLine(loader, command)
    accepted = [override for override in parsed if command_line.accepts(override)]
    problems += command_line.problems
    submission = None
    if multirun:
        try:
            base = loader.compose(lines_of(accepted), RunMode.MULTIRUN)
            sweeps = _sweep_jobs(base, accepted)
            if is_submission(base.hydra.launcher):
                submission = read_submission(base.hydra.launcher)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from error
        fixed = [*lines_of(o for o in accepted if o.is_hydra_override() and o.key_or_group != "hydra.mode")]
        fixed.append("hydra.mode=MULTIRUN")
    else:
        accepted, several = without_sweeps(accepted)
        problems += several
        sweeps, fixed = [[]], lines_of(accepted)

    gate = _Gate(
        loader=loader,
        given=frozenset(path for o in accepted for path, _ in flatten(single_value(o), o.key_or_group)),
        multirun=multirun,
        complete=complete,
        submission=submission,
        # Without the refused overrides, the rules would blame the rest.
        rules=None if problems else rules,
    )
    jobs: list[Job] = []
    found: list[tuple[str, list[str]]] = []
    for number, sweep in enumerate(sweeps):
        varying = tuple(line for line in sweep if not all(line in other for other in sweeps))
        job, job_problems = gate.check_job(number, [*fixed, *sweep], varying)
        found.append((" ".join(varying), job_problems))
        if job is not None:
            jobs.append(job)
    problems += _told_once(found)
    problems += _shared_run_dirs(jobs) if multirun else []
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return jobs


def _shared_run_dirs(jobs: Sequence[Job]) -> list[str]:
    """Jobs that share a run directory: the second would resume the first."""
    by_dir: dict[str | None, list[str]] = {}
    for job in jobs:
        by_dir.setdefault(job.config.run_dir, []).append(job.name)
    return [
        f"run_dir={show(directory)} is shared by {len(sharing)} jobs of the sweep; leave it out, or make it differ "
        "with ${hydra:job.num}"
        for directory, sharing in by_dir.items()
        if len(sharing) > 1
    ]


def load_config(overrides: Sequence[str] = (), source: Source | None = None) -> Config:
    """Composes and reads a configuration, by default from `conf/`; `check_config` applies the cross-field rules.

    Raises:
        ConfigError: All unknown keys or options, wrong types and open values.
    """
    (job,) = check_command(Loader(source or Source()), overrides)
    return job.config


def read_job(composed: DictConfig) -> Config:
    """The configuration of a job that Hydra started after the gate let it pass.

    Raises:
        ConfigError: A YAML file was changed in between, and it is now wrong.
    """
    config, problems = read_config(default_run_dir(composed))
    if config is None:
        raise ConfigError(problems)
    return config
