"""Where the YAML lies and how Hydra composes it: the search path, the groups, and Hydra's errors in our words.

`conf/` is beside the package in an installed wheel and at the top of a checkout. A user's `--config-dir` is searched
after it, `--config-path` replaces it. Everything here is Hydra's own machinery, so that what the gate checks is what
Hydra runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import did_you_mean, nearest_name

HYDRA_VERSION_BASE = "1.3"
JOB_NAME = "gpt_pretrain"

_LEXER_ERROR = "LexerNoViableAltException: "

# What Hydra's composition raises for a user's mistake: its own errors, OmegaConf's, YAML's, and bare ValueErrors.
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)


def find_conf_dir() -> Path:
    """The folder `conf` that belongs to this package."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError([f"the package in {package} has no conf/ beside it; install gpt_pretrain again"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Which YAML a configuration is composed from."""

    config_name: str = "config"
    config_path: Path = field(default_factory=find_conf_dir)
    config_dir: Path | None = None


def _yaml_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def check_source(source: Source) -> None:
    """Checks that the folders and the primary file exist, before Hydra looks for them.

    Raises:
        ConfigError: One of them does not, or a file is given where a name is asked for.
    """
    problems = [
        f"{option}={folder}: there is no such folder"
        for option, folder in (("--config-path", source.config_path), ("--config-dir", source.config_dir))
        if folder is not None and not folder.is_dir()
    ]
    if problems:
        raise ConfigError(problems)
    folders = [folder for folder in (source.config_path, source.config_dir) if folder is not None]
    name = source.config_name.removesuffix(".yaml")
    if any((folder / f"{name}.yaml").is_file() for folder in folders):
        return
    path = Path(source.config_name)
    with_suffix = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    if with_suffix.is_file():
        raise ConfigError(
            [
                f"--config-name={source.config_name} is a path, and takes a name; "
                f"use --config-dir={with_suffix.parent} --config-name={with_suffix.stem}"
            ]
        )
    known = [name for folder in folders for name in _yaml_names(folder)]
    looked = " and ".join(map(str, folders))
    raise ConfigError(
        [f"--config-name={source.config_name}: {looked} has no such file{did_you_mean(nearest_name(name, known))}"]
    )


def build_loader(source: Source) -> ConfigLoaderImpl:
    """Hydra's loader over the search path of `source`, as `hydra.main` would build it."""
    check_source(source)
    version.setbase(HYDRA_VERSION_BASE)
    setup_globals()
    JobRuntime.instance().set("name", JOB_NAME)
    search_path = create_config_search_path(str(source.config_path.resolve()))
    if source.config_dir is not None:
        search_path.prepend(
            provider="command-line",
            path=f"file://{source.config_dir.resolve()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return ConfigLoaderImpl(search_path)


def parse_override(text: str) -> Override:
    """One override of the command line.

    Raises:
        ConfigError: It does not follow Hydra's grammar.
    """
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if not line.startswith(("Error parsing", "See http"))), lines[0])
        if reason.startswith(_LEXER_ERROR):
            # Hydra repeats the text behind this prefix and points below it with a caret.
            column = lines[1].index("^") - len(_LEXER_ERROR)
            reason = f"unexpected {text[column]!r} at character {column + 1}"
        problem = f"{text!r} is no override: {reason}; write key=value, and quote a value with special characters"
        raise ConfigError([f"{problem}: \"key='…'\""]) from error
    return override


def open_repository(loader: ConfigLoaderImpl, source: Source, overrides: Sequence[Override]) -> CachingConfigRepository:
    """The YAML files that Hydra finds, `hydra.searchpath` included."""
    lines = [line for o in overrides if o.key_or_group == "hydra.searchpath" and (line := o.input_line) is not None]
    try:
        return loader._parse_overrides_and_create_caching_repo(source.config_name, lines)[1]
    except COMPOSITION_ERRORS as error:
        raise ConfigError([composition_problem(error)]) from error


def list_groups(repository: CachingConfigRepository, parent: str = "") -> list[str]:
    """Every group of ours ("model", …), nested ones as a/b, those of Hydra left out."""
    groups = []
    for name in repository.get_group_options(parent, ObjectType.GROUP):
        group = f"{parent}/{name}" if parent else name
        if group != "hydra" and not name.startswith(("_", ".")):
            groups += [group, *list_groups(repository, group)]
    return groups


def list_options(repository: CachingConfigRepository, group: str) -> list[str]:
    """The options of a group: names of its YAML files."""
    return list(repository.get_group_options(group, ObjectType.CONFIG))


def compose(
    loader: ConfigLoaderImpl, source: Source, overrides: Sequence[str], run_mode: RunMode = RunMode.RUN
) -> DictConfig:
    """Hydra's composition, its `hydra` section included.

    Raises:
        ConfigError: Hydra refuses it.
    """
    try:
        return loader.load_configuration(source.config_name, list(overrides), run_mode)
    except COMPOSITION_ERRORS as error:
        raise ConfigError([composition_problem(error)]) from error


def list_used_files(
    repository: CachingConfigRepository, source: Source, overrides: Sequence[str]
) -> list[ResultDefault]:
    """The YAML files of a composition in the order in which they are merged; each is read once.

    Raises:
        ConfigError: The defaults list names something that does not exist.
    """
    return _defaults_list(repository, source, overrides).defaults


def list_chosen_groups(repository: CachingConfigRepository, source: Source) -> list[str]:
    """The groups of the defaults list, of which a command line chooses other options.

    Raises:
        ConfigError: The defaults list names something that does not exist.
    """
    return list(_defaults_list(repository, source, []).overrides.known_choices)


def _defaults_list(repository: CachingConfigRepository, source: Source, overrides: Sequence[str]) -> DefaultsList:
    """What Hydra's loader computes, which would read all files anew."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        return create_defaults_list(repository, source.config_name, parsed, prepend_hydra=True, skip_missing=False)
    except COMPOSITION_ERRORS as error:
        raise ConfigError([composition_problem(error)]) from error


def composition_problem(error: BaseException) -> str:
    """A message of Hydra, OmegaConf or YAML as one problem, without what does not apply here."""
    if isinstance(error, MissingConfigException):
        wanted = str(error.missing_cfg_file or "").rpartition("/")[2]
        options = list(error.options or [])
        known = f"; known: {', '.join(options)}" if options else ""
        first = str(error).strip().splitlines()[0].rstrip(".")
        return f"{first}{did_you_mean(nearest_name(wanted, options))}{known}"
    messages = [str(error)]
    if error.__cause__ is not None and str(error.__cause__) not in messages[0]:
        messages.append(str(error.__cause__))
    lines = [
        line.strip()
        for message in messages
        for line in message.splitlines()
        # OmegaConf's dump of its own state, and advice (`+key`) that the gate would refuse.
        if line.strip() and not line.strip().startswith(("full_key:", "object_type=", "To append to your", "See http"))
    ]
    return "\n".join(lines) or type(error).__name__
