"""The jobs of a command line: everything wrong with them is found before torch is imported, and reported at once.

Hydra silently composes a typo after `+` or `++`, and checks no key in YAML. So this module

1. checks the keys on the command line before Hydra sees them;
2. lets Hydra compose the legal ones, and checks the keys of every YAML file involved;
3. reads every value as its type (`config.load`);
4. runs the cross-field rules, unless something was refused: they would blame the rest for what is missing.

All jobs of a sweep are checked before the first one starts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from gpt_pretrain.config import own
from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.keys import flatten, is_known, unknown_keys
from gpt_pretrain.config.load import read_config
from gpt_pretrain.config.lookups import bounded_lookups
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.signals import ended_at_once
from gpt_pretrain.launch.slurm import Submission, is_submission, read_submission
from gpt_pretrain.rules.no_effect import given_without_effect
from gpt_pretrain.rules.overrides import (
    lines_of,
    override_problems,
    parse_override,
    parse_overrides,
    single_value,
    submitted_overrides,
    without_sweeps,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a command line: the only one, or one of a sweep."""

    overrides: tuple[str, ...]
    """What distinguishes the job from the sweep's other jobs; empty without a sweep."""
    config: Config
    composed: DictConfig
    """What Hydra composed, with its `hydra` section."""
    submission: Submission | None = None
    """How the job is submitted to Slurm; None: it runs in this process."""
    arguments: tuple[str, ...] = ()
    """The arguments of Slurm's job."""

    @property
    def name(self) -> str:
        """The overrides as one text; empty without a sweep."""
        return " ".join(self.overrides)


# Whose keys need an effect in one of the variants, each of which is checked (`benchmark.variants`).
_WITH_VARIANTS = ("benchmark", "compare")
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
        is_hidden = source.config_dir is not None and (source.config_dir / name).is_file()
        is_saved = loader.saved is not None and name == "config.yaml"
        if is_hidden and not is_saved and loaded.provider == "main":
            assert source.config_dir is not None
            hidden = _display(source.config_dir.resolve() / name)
            problems.append(f"{hidden} is hidden by {file}, which Hydra finds first; give it another name")
        content = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(content, dict):
            if content:
                problems.append(f"{file}: holds a list where keys are expected")
            continue
        if not package:
            content = {name: value for name, value in content.items() if name != "hydra"}
        paths = [path for path, _ in flatten(content, package)]
        problems += [f"{file}: {problem}" for problem in unknown_keys(paths)]
        origins |= {path: file for path in paths if is_known(path)}
    if loader.saved is not None:
        assert source.saved_config is not None
        file = _display(source.saved_config.resolve())
        saved = [path for path, _ in flatten(OmegaConf.to_container(loader.saved, resolve=False))]
        problems += [f"{file}: {problem}" for problem in unknown_keys(saved)]
        origins |= dict.fromkeys(saved, file)
    return problems, origins


@bounded_lookups()
def _read_job(
    loader: Loader, lines: Sequence[str], number: int, given: frozenset[str], *, multirun: bool, complete: bool
) -> tuple[DictConfig, Config | None, list[str]]:
    """Composes a job and reads its configuration, `${hydra:…}` interpolations included.

    `given` are the keys that the command line sets: no file is to blame for their values. The configuration is None if
    it has problems or open values.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    composed = loader.compose(lines)
    problems, origins = _check_files(loader, lines)
    if composed.hydra.mode is RunMode.MULTIRUN and not multirun:
        return composed, None, [*problems, "hydra.mode=MULTIRUN: a sweep is started with -m"]
    if composed.hydra.callbacks:
        problems.append(
            f"hydra.callbacks={show(list(composed.hydra.callbacks))} are not called; register a callback with "
            "gpt_pretrain.extend (docs/bring_your_own.md)"
        )
    with open_dict(composed):
        composed.hydra.job.num = number
        composed.hydra.job.id = str(number)
        directory = Path(composed.hydra.sweep.dir, composed.hydra.sweep.subdir) if multirun else composed.hydra.run.dir
        composed.hydra.runtime.output_dir = str(Path(directory).absolute())
        is_open = "run_dir" in composed and not OmegaConf.is_interpolation(composed, "run_dir")
        if multirun and is_open and composed.run_dir is None:
            composed.run_dir = composed.hydra.runtime.output_dir
    # As Hydra's `set_config`, without a copy.
    HydraConfig.instance().cfg = cast(Any, composed)
    try:
        nodes = {name: node for name, node in composed.items_ex(resolve=False) if name != "hydra"}
        task = DictConfig(nodes, flags={"no_deepcopy_set_nodes": True})
        files = {path: file for path, file in origins.items() if path not in given}
        config, wrong = read_config(task, origins=files, complete=complete)
    finally:
        HydraConfig.instance().cfg = None
    if config is not None and not set(own.LOADED).issuperset(config.extensions):
        problems.append(_not_loaded(config.extensions, origins.get("extensions")))
    if config is not None and config.evaluation.include_path is not None and "evaluation.include_path" not in given:
        setting = f"evaluation.include_path={show(config.evaluation.include_path)}"
        problems.append(
            f"{setting} stands in a file, and only the command line names code to run, as files of tasks may hold; if "
            f"you trust them, give {setting}"
        )
    # A key that a file misspells is also in the composed configuration.
    named = {problem.partition(": ")[2] for problem in problems}
    return composed, config, [*problems, *(problem for problem in wrong if problem not in named)]


def _not_loaded(names: Sequence[str], file: str | None) -> str:
    """The message about `extensions` other than what was imported: a file has named them that may not."""
    loaded, wanted = f"extensions=[{','.join(own.LOADED)}]", f"extensions=[{','.join(names)}]"
    return (
        f"{'' if file is None else f'{file}: '}{wanted}, and this process has imported {loaded}: only the command line "
        f"and the file of --config-name name modules to import; if you trust the code, give {wanted}"
    )


@bounded_lookups()
def _sweep(loader: Loader, accepted: Sequence[Override]) -> tuple[list[list[str]], Submission | None]:
    """The overrides of each job, as Hydra's own sweeper splits them, and how the jobs are submitted to Slurm."""
    base = loader.compose(lines_of(accepted), RunMode.MULTIRUN)
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
    submission = read_submission(base.hydra.launcher) if is_submission(base.hydra.launcher) else None
    for override in params:
        override.config_loader = loader
    if problems := [*chain.from_iterable(map(_no_values, [*params, *tasks]))]:
        raise ConfigError(problems)
    return BasicSweeper.split_arguments([*params, *tasks], None)[0], submission


def _no_values(override: Override) -> Iterator[str]:
    """Why an override gives a sweep nothing to run: without a value of one key there is no run at all."""
    if not override.is_sweep_override():
        return
    if override.is_interval_sweep():
        yield f"{override.input_line}: an interval has no values to run one by one; use range(…) or choice(…)"
    elif not any(True for _ in override.sweep_iterator()):
        yield f"{override.input_line}: no value, so the sweep would start no run; name one, or leave it out"


def _told_once(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """The problems of all jobs, each once; if not all jobs have one, with the overrides of those that do."""
    jobs_of: dict[str, list[str]] = {}
    for job, problems in found:
        for problem in dict.fromkeys(problems):
            jobs_of.setdefault(problem, []).append(job)
    return [
        problem if len(jobs) == len(found) else f"{problem} [{'; '.join(jobs)}]" for problem, jobs in jobs_of.items()
    ]


@ended_at_once()
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
    for override in parsed:
        # For `GROUP=glob(*)`.
        override.config_loader = loader
    loader.search_also(parsed)
    groups = loader.groups()
    refused = [list(override_problems(override, loader, groups, command)) for override in parsed]
    problems += chain.from_iterable(refused)
    accepted = [override for override, told in zip(parsed, refused, strict=True) if not told]
    submission = None
    if multirun:
        try:
            sweeps, submission = _sweep(loader, accepted)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from error
        hydras = [o for o in accepted if o.is_hydra_override() and o.key_or_group != "hydra.mode"]
        fixed = [*lines_of(hydras), "hydra.mode=MULTIRUN"]
    else:
        accepted, several = without_sweeps(accepted)
        problems += several
        sweeps, fixed = [[]], lines_of(accepted)
    given = frozenset(path for o in accepted for path, _ in flatten(single_value(o), o.key_or_group))
    # Without the refused overrides, the rules would blame the rest.
    rules = None if problems else rules

    jobs: list[Job] = []
    found: list[tuple[str, Sequence[str]]] = []
    for number, sweep in enumerate(sweeps):
        varying = tuple(line for line in sweep if not all(line in other for other in sweeps))
        lines = [*fixed, *sweep]
        try:
            composed, config, wrong = _read_job(loader, lines, number, given, multirun=multirun, complete=complete)
        except ConfigError as error:
            found.append((" ".join(varying), error.problems))
            continue
        found.append((" ".join(varying), wrong))
        if config is None:
            continue
        if rules is not None and not wrong:
            dropped = [] if config.extensions == own.LOADED else [_not_loaded(config.extensions, None)]
            unread = [] if command in _WITH_VARIANTS else given_without_effect(config, given)
            wrong += [*dropped, *unread, *rules(config, submission)]
        arguments: list[str] = []
        if submission is not None:
            arguments, unfit = submitted_overrides(composed, config, names_fp8=loader.saved is None)
            wrong += unfit
        if not wrong:
            jobs.append(
                Job(
                    overrides=varying,
                    config=config,
                    composed=composed,
                    submission=submission,
                    arguments=tuple(arguments),
                )
            )
    problems += _told_once(found)
    problems += _shared_run_dirs(jobs)
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
    """Composes and reads a configuration, by default from `conf/`; `config_problems` has the cross-field rules.

    Raises:
        ConfigError: All unknown keys or options, wrong types and open values.
    """
    (job,) = check_command(Loader(source or Source()), overrides)
    return job.config
