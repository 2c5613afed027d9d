"""Where the YAML is and how Hydra composes it: the search path, the groups, and Hydra's errors in our words.

`--config-dir` is searched after `conf/`, `--config-path` replaces it. Hydra's own code composes, so the checks see
exactly what Hydra runs.

If `--config-dir` is a run's directory, its `config.yaml` takes the place of every value in the files: it is whole and
has no defaults list. Options that the command line chooses come over it, then the keys.
"""

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt_pretrain.config import own
from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.files import ForeignFileError, find_conf_dir
from gpt_pretrain.config.keys import did_you_mean, flatten, nearest_name
from gpt_pretrain.config.load import is_saved, load_saved_values
from gpt_pretrain.config.lookups import bounded_lookups
from gpt_pretrain.config.yaml_files import UNREADABLE, check_yaml

JOB_NAME = "gpt_pretrain"

# Settings of Hydra that a foreign file may have. Others make Hydra import, call, create, export or submit something.
_MAY_SET = re.compile(r"hydra\.(?:launcher\.(?:nodes|gpus_per_node|tasks_per_node)|sweeper\.params\..+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Which YAML a configuration is composed from."""

    config_name: str = "config"
    config_path: Path = field(default_factory=find_conf_dir)
    config_dir: Path | None = None

    @property
    def saved_config(self) -> Path | None:
        """The `config.yaml` in `config_dir` if it is the primary file, as in the directory of a run."""
        if self.config_dir is None or self.config_name.removesuffix(".yaml") != "config":
            return None
        path = self.config_dir / "config.yaml"
        return path if os.path.lexists(path) else None


def check_source(source: Source) -> None:
    """Checks that the folders and the primary file exist, before Hydra looks for them.

    Raises:
        ConfigError: One of them does not.
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
    known = [path.stem for folder in folders for path in sorted(folder.glob("*.yaml"))]
    nearest, looked = did_you_mean(nearest_name(name, known)), " and ".join(map(str, folders))
    way = "; a file elsewhere is named with --config-dir=FOLDER --config-name=NAME"
    raise ConfigError([f"--config-name={source.config_name}: {looked} has no such file{nearest or way}"])


class _Original[T]:
    """An object of OmegaConf, and copies to change: pickle takes a fifth of deepcopy's time."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.num_bytes = len(self._pickled)

    def copy(self) -> T:
        copied: T = pickle.loads(self._pickled)
        return copied


# Of a composition, which names 30 files in defaults lists. Files that name two others each double with each level.
_MOST_FILES, _MOST_PICKLED = 500, 1 << 26

# A file, identified by its place and its state on disk.
_FileKey = tuple[Any, ...]
# A process that composes often, as a sweep does, reads and merges the same files once.
_READ: dict[_FileKey, _Original[ConfigResult]] = {}
_MERGED: dict[tuple[tuple[str, _FileKey], ...], _Original[DictConfig]] = {}


class _Files(ConfigRepository):
    """The YAML files of a search path, each read once; Hydra's own repository reads them for each composition."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._found: dict[str, _FileKey | None] = {}

    def key(self, config_path: str) -> _FileKey | None:
        """What identifies a file; None where there is none."""
        if config_path not in self._found:
            source = self._find_object_source(config_path, ObjectType.CONFIG)
            self._found[config_path] = None if source is None else _file_key(source, config_path)
        return self._found[config_path]

    def read(self, config_path: str) -> _Original[ConfigResult] | None:
        """A file; None where there is none."""
        key = self.key(config_path)
        if key is not None and key not in _READ:
            foreign = self.foreign_file(config_path)
            try:
                if foreign is not None:
                    check_yaml(foreign)
                read = super().load_config(config_path)
            except ForeignFileError as error:
                raise ConfigError([str(error)]) from error
            except UNREADABLE as error:
                said = " ".join(str(error).split())
                raise ConfigError([f"{foreign or config_path} cannot be read: {said}"]) from error
            assert read is not None
            if foreign is not None:
                # Before Hydra searches where the primary file says.
                _check_hydras_own(foreign, read, "")
            _READ[key] = _Original(read)
        return None if key is None else _READ[key]

    def foreign_file(self, config_path: str) -> Path | None:
        """The path of a file that does not belong to a package; None for others."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() != "file":
            return None
        path = _file_path(source, config_path)
        return None if path.is_relative_to(find_conf_dir()) else path

    def load_config(self, config_path: str) -> ConfigResult | None:
        # A composition changes the files that it merges.
        file = self.read(config_path)
        return None if file is None else file.copy()

    def __deepcopy__(self, memo: object) -> "_Files":
        # Hydra copies the repository for each composition.
        return self


class _BoundedFiles(CachingConfigRepository):
    """The files of one composition: Hydra asks for one each time that a defaults list names it."""

    def __init__(self, files: _Files, cache: dict[str, ConfigResult | None]) -> None:
        super().__init__(files)
        self.cache = cache
        self._files, self._num_asked, self._num_bytes = files, 0, 0

    def load_config(self, config_path: str) -> ConfigResult | None:
        file = self._files.read(config_path)
        self._num_asked += 1
        self._num_bytes += 0 if file is None else file.num_bytes
        if self._num_asked > _MOST_FILES or self._num_bytes > _MOST_PICKLED:
            raise ConfigError([f"{config_path}: the defaults lists name more than a configuration has; shorten them"])
        return super().load_config(config_path)


def _file_path(source: ConfigSource, config_path: str) -> Path:
    return Path(source.path) / f"{config_path.removesuffix('.yaml')}.yaml"


def _file_key(source: ConfigSource, config_path: str) -> _FileKey:
    place = source.provider, source.full_path(), config_path
    if source.scheme() != "file":
        # Of an installed package.
        return place
    state = _file_path(source, config_path).stat()
    return *place, state.st_ino, state.st_mtime_ns, state.st_size


class Loader(ConfigLoaderImpl):
    """Hydra's loader over the search path of `source`, as `hydra.main` would build it.

    It composes each command line once for the checks, `--help` and Hydra itself.

    Raises:
        ConfigError: A folder or the primary file does not exist.
    """

    def __init__(self, source: Source) -> None:
        check_source(source)
        version.setbase("1.3")
        setup_globals()
        JobRuntime.instance().set("name", JOB_NAME)
        search_path = create_config_search_path(str(source.config_path.resolve()))
        if source.config_dir is not None:
            search_path.prepend(
                provider="command-line",
                path=f"file://{source.config_dir.resolve()}",
                anchor=SearchPathQuery(provider="schema"),
            )
        super().__init__(search_path)
        self.source = source
        self.saved = None if source.saved_config is None else load_saved_values(source.saved_config)
        """Values of a run's directory, which options that the command line chooses override."""
        self._chosen: set[str] = set()
        self._files = _Files(search_path)
        self.repository = self._files
        # Compositions with their files, and the files of the last one.
        self._composed: dict[tuple[str, ...], tuple[_Original[DictConfig], list[ResultDefault]]] = {}
        self._merged: list[ResultDefault] = []

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *args: Any, **kwargs: Any
    ) -> DictConfig:
        """Hydra's own, once per command line, so that resolvers such as `${now:}` give one answer."""
        key = (run_mode.name, *overrides)
        if key not in self._composed:
            # Groups, and keys, which name no folder. `model={…}` sets keys.
            options = (line.partition("=") for line in overrides)
            self._chosen = {name.lstrip("+") for name, _, option in options if not option.startswith("{")}
            with bounded_lookups():
                composed = super().load_configuration(config_name, overrides, run_mode, *args, **kwargs)
            # Checked here because Hydra composes nowhere else, and acts on the result.
            for default, file in self._read(self._merged):
                foreign = self._files.foreign_file(str(default.config_path))
                if foreign is not None:
                    _check_hydras_own(foreign, file, default.package or "")
            self._composed[key] = _Original(composed), self._merged
        return self._composed[key][0].copy()

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, caching = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return parsed, _BoundedFiles(self._files, caching.cache)

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        """Hydra's own, which alone sees the files of a composition; it merges the same files once."""
        self._merged = defaults
        files = tuple((repr(default), self._files.key(str(default.config_path)) or ()) for default in defaults)
        if files not in _MERGED:
            _MERGED[files] = _Original(super()._compose_config_from_defaults_list(defaults, repo))
        merged = _MERGED[files].copy()
        for group, values in own.default_values().items():
            # A value in place of the group is refused when the configuration is read.
            if group not in merged or OmegaConf.is_dict(merged[group]):
                merged[group] = OmegaConf.merge(values, merged.get(group, {}))
        if self.saved is not None:
            chosen = super()._compose_config_from_defaults_list(self._chosen_files(defaults), repo)
            for name, values in self.saved.items():
                merged[name] = values
            merged.merge_with(chosen)
        return merged

    def _chosen_files(self, defaults: Sequence[ResultDefault]) -> list[ResultDefault]:
        """The files of the options that the command line chooses, also through an experiment, in their order."""
        groups, number = set(self._chosen), -1
        while len(groups) != number:
            number, paths = len(groups), set[str]()
            for default, file in self._read(defaults):
                path = str(default.config_path)
                if path.rpartition("/")[0] in groups or default.parent in paths:
                    paths.add(path)
                    others = (each for each in file.defaults_list or [] if isinstance(each, GroupDefault))
                    groups |= {str(other.group).lstrip("/") for other in others if other.override}
        return [default for default in defaults if default.config_path in paths]

    def compose(self, overrides: Sequence[str], run_mode: RunMode = RunMode.RUN) -> DictConfig:
        """Hydra's composition, its `hydra` section included.

        Raises:
            ConfigError: Hydra refuses it.
        """
        with _told_as_config_error():
            return self.load_configuration(self.source.config_name, list(overrides), run_mode)

    def primary_extensions(self) -> Any:
        """`extensions` of the primary file; None if it has none, or a run has saved it.

        Raises:
            ConfigError: The file cannot be read.
        """
        with _told_as_config_error():
            file = None if self.saved is not None else self._files.read(self.source.config_name)
        if file is None or not isinstance(file.value.config, DictConfig):
            return None
        values = file.value.config
        if "extensions" not in values or (not file.value.defaults_list and is_saved(list(values))):
            return None
        return OmegaConf.to_container(values, resolve=False)["extensions"]  # type: ignore[index,call-overload]

    def search_also(self, overrides: Sequence[Override]) -> None:
        """Also searches the folders of a `hydra.searchpath=[…]` among the overrides."""
        with _told_as_config_error():
            lines = [str(o.input_line) for o in overrides if o.key_or_group == "hydra.searchpath"]
            self._parse_overrides_and_create_caching_repo(self.source.config_name, lines)

    def groups(self, parent: str = "") -> list[str]:
        """Every group except Hydra's: "model", …, nested ones as a/b."""
        found = []
        for name in self.repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            if group != "hydra" and not name.startswith(("_", ".")):
                found += [group, *self.groups(group)]
        return found

    def options(self, group: str) -> list[str]:
        """The options of a group, the names of its YAML files."""
        return self.repository.get_group_options(group, ObjectType.CONFIG)

    def files(self, overrides: Sequence[str]) -> Iterator[tuple[ResultDefault, ConfigResult]]:
        """The YAML files of an earlier composition in the order of merging, not to be changed."""
        return self._read(self._composed[RunMode.RUN.name, *overrides][1])

    def _read(self, defaults: Sequence[ResultDefault]) -> Iterator[tuple[ResultDefault, ConfigResult]]:
        for default in defaults:
            if default.config_path is not None:
                file = self._files.read(default.config_path)
                assert file is not None, "Hydra lists only files that it found"
                yield default, file.value


@cache
def _own_values() -> Mapping[str, Any]:
    """Hydra's settings in conf/, which a copy of it may repeat."""
    content = OmegaConf.to_container(OmegaConf.load(find_conf_dir() / "config.yaml"), resolve=False)
    assert isinstance(content, dict)
    return dict(flatten({"hydra": content["hydra"]}))


def _check_hydras_own(path: Path, file: ConfigResult, package: str) -> None:
    """Refuses settings of Hydra by which a file could make it import, call, create, export or submit something.

    Raises:
        ConfigError: The file has settings of Hydra beyond `_MAY_SET`.
    """
    content = OmegaConf.to_container(file.config, resolve=False)
    if package.partition(".")[0] != "hydra":
        package = ""
        content = {"hydra": content["hydra"]} if isinstance(content, dict) and "hydra" in content else {}
    keys = flatten(content, package) if isinstance(content, dict) else [(package, content)]
    problems = [
        f"{path}: {key}={show(value)} is Hydra's own, and a file sets values of a run; leave it out"
        for key, value in keys
        if not _MAY_SET.match(key) and (key not in _own_values() or _own_values()[key] != value)
    ]
    if problems:
        raise ConfigError(problems)


@contextmanager
def _told_as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(
            ["the configuration refers to itself endlessly, in a defaults list or a value; look for such a file"]
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError([composition_problem(error)]) from error
    except (AttributeError, TypeError) as error:
        # OmegaConf's own: a dictionary for a key of Hydra's that holds none yet.
        key = re.search(r"^\s*full_key: (\S+)$", str(error), re.MULTILINE)
        if key is None:
            raise
        raise ConfigError([f"{key[1]} cannot be set as a whole on the command line; set it in a YAML file"]) from error


def composition_problem(error: BaseException) -> str:
    """An error of Hydra, OmegaConf or YAML as one problem, without the parts that do not apply here."""
    if isinstance(error, MissingConfigException):
        wanted = str(error.missing_cfg_file or "").rpartition("/")[2]
        options = list(error.options or [])
        known = f"; known: {', '.join(options)}" if options else ""
        first = str(error).strip().splitlines()[0].rstrip(".")
        return f"{first}{did_you_mean(nearest_name(wanted, options))}{known}"
    text, cause = str(error), error.__cause__
    if cause is not None and str(cause) not in text:
        text += f"\n{cause}"
    # OmegaConf's dump of its own state, and advice (`+key`) that the checks would refuse.
    not_ours = ("full_key:", "object_type=", "To append to your", "See http")
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith(not_ours)]
    return "\n".join(lines) or type(error).__name__
