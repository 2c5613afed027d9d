"""The command line of a run: `parse_command_line` → `check_request` → `show`, or the jobs.

Hydra itself answers its options that show something (`--cfg`, `--info`); only `--help` and the errors are ours.
`hydra_settings` gives a job what Hydra's own keys (`hydra.run.dir`, `hydra.job.chdir`, …) ask for.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, env_override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt_pretrain.commands.arguments import print_help
from gpt_pretrain.config.errors import ConfigError, UserError, written
from gpt_pretrain.config.files import find_conf_dir, group_names
from gpt_pretrain.config.foreign import foreign_options
from gpt_pretrain.config.keys import (
    UNSUPPORTED,
    did_you_mean,
    flatten,
    is_known,
    key_named,
    nearest_name,
    schema_keys,
    schema_sections,
)
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import JOB_NAME, Loader, Source, composition_problem
from gpt_pretrain.launch.environment import limit_met
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.signals import ended_at_once
from gpt_pretrain.launch.slurm import Submission
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.extensions import check_resumed, extended_loader
from gpt_pretrain.rules.jobs import Job, check_command
from gpt_pretrain.rules.overrides import by_split

# Hydra's options that are not supported, and never offered.
_REFUSED = ("--experimental-rerun", "--hydra-help", "--shell-completion")
_COMMANDS = ("run", "multirun", "cfg", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a command line asks for."""

    options: argparse.Namespace
    """Hydra's options, read by its own parser."""
    loader: Loader
    overrides: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether the command line runs the command rather than shows something."""
        options = self.options
        # A configuration that --cfg and --info show may be incomplete, and no rules check it.
        return options.cfg is None and options.info is None and not options.help

    @property
    def source_options(self) -> list[str]:
        """The options that say where the configuration is, as given."""
        given = {f"--config-{name}": getattr(self.options, f"config_{name}") for name in ("name", "path", "dir")}
        return [f"{option}={value}" for option, value in given.items() if value is not None]


def _unknown_option(argument: str, known: Sequence[str]) -> str:
    """The message about an unknown option, which may be a group or a key after dashes, or a typo."""
    name, _, value = argument.lstrip("-").partition("=")
    # Also a flag of another program: --micro-batch-size=4.
    plain = name.replace("-", "_").lower()
    if plain in UNSUPPORTED:
        return f"{argument}: there is no such option: {UNSUPPORTED[plain]}"
    meant = name if is_known(name) or name in group_names() else key_named(plain)
    if meant is not None:
        return f"{argument}: there is no such option; groups and keys stand without dashes: {meant}={value or '…'}"
    nearest = nearest_name(argument, known)
    return f"{argument}: there is no such option{did_you_mean(None if nearest in _REFUSED else nearest)}"


def parse_command_line(arguments: Sequence[str]) -> Request:
    """Reads the command line.

    Raises:
        ConfigError: An unknown option, options that exclude each other, or an extension that cannot be imported.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    # `--experiment smoke` would be read as --experimental-rerun.
    parser.allow_abbrev = False
    try:
        # Intermixed, because plain parsing refuses `model=tiny -m model.seed=1,2`.
        options, rest = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError([f"{error}; python -m gpt_pretrain --help shows the options"]) from error
    if rest:
        if told := foreign_options(rest):
            raise ConfigError([told])
        known = [option for action in parser._actions for option in action.option_strings]
        raise ConfigError([_unknown_option(argument, known) for argument in rest])
    given = [f"--{name.replace('_', '-')}" for name in _COMMANDS if getattr(options, name)]
    if len(given) > 1:
        raise ConfigError([f"{' and '.join(given)} exclude each other; give one"])
    for name in ("resolve", "package"):
        if options.cfg is None and getattr(options, name) not in (None, False):
            raise ConfigError([f"--{name} goes with --cfg, and there is none"])
    for option, way in zip(_REFUSED, ("run_dir=DIRECTORY resumes a run", "see --help", "leave it out"), strict=True):
        if getattr(options, option.lstrip("-").replace("-", "_")):
            raise ConfigError([f"{option} is not supported; {way}"])
    if options.config_path is not None:
        # Hydra would resolve the path relative to this file, not to the working directory.
        options.config_path = str(Path(options.config_path).resolve())
    source = Source(
        config_name=options.config_name or "config",
        config_path=find_conf_dir() if options.config_path is None else Path(options.config_path),
        config_dir=None if options.config_dir is None else Path(options.config_dir),
    )
    loader = extended_loader(options.overrides, source)
    overrides = chain.from_iterable(by_split(_with_two_plus_signs(given)) for given in options.overrides)
    return Request(options=options, loader=loader, overrides=tuple(overrides))


def _with_two_plus_signs(override: str) -> str:
    """`+key` as `++key`, because Hydra refuses to add a key that exists, and every key does."""
    key = override.partition("=")[0]
    return (
        f"+{override}" if key.startswith("+") and is_known(key[1:]) and key[1:] not in schema_sections() else override
    )


def check_request(
    request: Request,
    launch: Launch,
    rules: Callable[[Config], Iterable[str]] | None = None,
    command: str | None = None,
) -> list[Job]:
    """Checks everything a command line asks for before any of it happens, and returns its jobs.

    `rules` are the cross-field rules; by default those of training, for `launch` or for the job submitted to Slurm.
    `command` refuses keys that only other commands read; None accepts all.

    Raises:
        ConfigError: Everything that is wrong.
    """
    options = request.options
    if options.multirun and launch.launcher != "none":
        problem = f"-m runs a sweep's jobs one after another in one process, and {launch.launcher} started this one"
        raise ConfigError([f"{problem}; start the sweep without {launch.launcher}, or each of its runs on its own"])

    def rules_of_job(config: Config, submission: Submission | None) -> Iterable[str]:
        if rules is not None:
            return rules(config)
        return config_problems(config, launch if submission is None else submission.launch)

    if request.runs and rules is None:
        check_resumed(request.overrides)
    jobs = check_command(
        request.loader,
        request.overrides,
        multirun=options.multirun,
        complete=request.runs,
        rules=rules_of_job if request.runs else None,
        command=command if request.runs else None,
    )
    if options.package not in (None, "_global_"):
        composed = request.loader.compose(request.overrides)
        if OmegaConf.select(composed, options.package) is None and options.package not in schema_keys():
            nearest = nearest_name(options.package, [*schema_sections(), *schema_keys()])
            raise ConfigError([f"--package={options.package} is not in the configuration{did_you_mean(nearest)}"])
    return jobs


def show(request: Request, doc: str) -> None:
    """Prints what a command line asks to see: `--help`, which begins with `doc`, or what Hydra shows.

    Raises:
        ConfigError: Hydra refuses to show it.
    """
    if not request.options.help:
        _show_with_hydra(request)
        return
    loader = request.loader
    composed = loader.compose(request.overrides)
    choices = {str(group): str(option) for group, option in composed.hydra.runtime.choices.items()}
    # Unresolved: an interpolation says more than its value, and an open value shows as ???.
    values = dict(flatten(OmegaConf.to_container(composed, resolve=False)))
    print_help(doc, schema_keys(), values, {group: loader.options(group) for group in loader.groups()}, choices)


def _show_with_hydra(request: Request) -> None:
    """Hands the command line to Hydra, as `hydra.main` does, with the loader that has checked it."""
    options, name, overrides = request.options, request.loader.source.config_name, list(request.overrides)
    hydra = Hydra(task_name=JOB_NAME, config_loader=request.loader)
    GlobalHydra.instance().initialize(hydra)
    try:
        if options.info is not None:
            hydra.show_info(options.info, config_name=name, overrides=overrides)
        else:
            hydra.show_cfg(name, overrides, options.cfg, options.package, options.resolve)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError([composition_problem(error)]) from error
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def hydra_settings(job: Job) -> Iterator[None]:
    """What a job's own Hydra keys ask for while it runs: a directory, files that describe it, logging, an environment.

    Raises:
        UserError: Hydra's directory or files cannot be written.
    """
    settings = job.composed.hydra
    # As Hydra's `set_config`, without a copy.
    HydraConfig.instance().cfg = cast(Any, job.composed)
    try:
        directory = _describe_job(job)
        configure_log(settings.job_logging, settings.verbose)
        with env_override(settings.job.env_set), chdir(directory) if settings.job.chdir else nullcontext():
            yield
    finally:
        HydraConfig.instance().cfg = None


@ended_at_once()
def _describe_job(job: Job) -> Path:
    """Makes the directory of `hydra.run.dir` or of a sweep's job, and the files of `hydra.output_subdir`, if any."""
    composed, settings = job.composed, job.composed.hydra
    swept = settings.mode is RunMode.MULTIRUN
    directory = Path(settings.sweep.dir, settings.sweep.subdir) if swept else Path(settings.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if settings.output_subdir is not None:
            (directory / settings.output_subdir).mkdir(parents=True, exist_ok=True)
            own = {name: node for name, node in composed.items_ex(resolve=False) if name != "hydra"}
            sections = {"config": own, "hydra": {"hydra": settings}, "overrides": settings.overrides.task}
            for name, section in sections.items():
                OmegaConf.save(section, directory / settings.output_subdir / f"{name}.yaml")
    except OSError as error:
        raise _unwritable(error, settings, "hydra.run.dir", "hydra.output_subdir") from error
    return directory


@ended_at_once()
def record_sweep(request: Request) -> None:
    """Writes the composition of a sweep, with what it sweeps over, to `multirun.yaml` in its directory.

    Raises:
        UserError: The directory cannot be written.
    """
    composed = request.loader.compose([*request.overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    directory = Path(composed.hydra.sweep.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(composed, directory / "multirun.yaml")
    except OSError as error:
        raise _unwritable(error, composed.hydra, "hydra.sweep.dir") from error


def _unwritable(error: OSError, settings: DictConfig, *keys: str) -> Exception:
    """The error for a place that Hydra's `keys` name; a limit that is met is no matter of the place."""
    if limit_met(error) is not None:
        return error
    where = ", ".join(f"{key}={written(OmegaConf.select(settings, key.removeprefix('hydra.')))}" for key in keys)
    return UserError(
        f"Hydra cannot write {error.filename}: {error.strerror}; give another directory ({where}), or leave it out"
    )
