"""The typed `Config`: read from what Hydra composed or from a run directory, and written back to YAML.

It is read value by value, so that all wrong values are reported together.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from gpt_pretrain.config import own
from gpt_pretrain.config.convert import WrongValue, convert
from gpt_pretrain.config.errors import ConfigError, reason, show
from gpt_pretrain.config.facts import NOT_TOLD
from gpt_pretrain.config.files import ForeignFileError
from gpt_pretrain.config.keys import (
    UNSUPPORTED_VALUES,
    Key,
    schema_keys,
    schema_sections,
    unknown_keys,
)
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.yaml_files import UNREADABLE, check_yaml

# Keys that earlier versions saved, with the values that they took; None: any, which training never read.
_REMOVED_KEYS = (
    ("model", "nccl_ub", (False,)),
    ("model", "fp8_multi_head_attention", (False,)),
    ("benchmark", "forecast", None),
    ("benchmark", "markdown", None),
)
# Sections of every configuration that a run has saved. A user's own file of a few keys lacks some.
_SAVED_SECTIONS = {"model", "trainer", "checkpoint", "logging", "sample"}
# Behind an even number of backslashes.
_LOOKED_UP = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


def section_problem(path: str, value: Any) -> str:
    """The message about a value in place of a section."""
    members = ", ".join(field.name for field in fields(schema_sections()[path]))
    keys = [name for name, key in schema_keys().items() if name.rpartition(".")[0] == path and value in key.choices]
    if len(keys) == 1:
        return f"{path}={show(value)} replaces a whole section; did you mean {keys[0]}={value}?"
    return f"{path}={show(value)} replaces a whole section; set its keys instead: {members}"


def _unresolved(node: DictConfig, name: str) -> Any:
    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict)
    return raw[name]


def _read_section(
    node: DictConfig, section: type, prefix: str, origins: Mapping[str, str], *, complete: bool
) -> tuple[Any, list[str]]:
    """Builds `section` from `node`, None if something in it is wrong or open, and returns what is wrong."""
    problems = unknown_keys(f"{prefix}{name!s}" for name in node)
    values: dict[str, Any] = {}
    for field in fields(section):
        path, child = prefix + field.name, node._get_node(field.name)
        if child is None or OmegaConf.is_missing(node, field.name):
            if complete:
                what = "is not in the configuration" if child is None else "has no value"
                key = schema_keys().get(path)
                takes = "" if key is None else f" ({key.type_text}: {key.doc})"
                problems.append(f"{path} {what}; choose a preset that sets it, or give {path}=…{takes}")
        elif is_dataclass(field.type):
            assert isinstance(field.type, type)
            if not isinstance(child, DictConfig) or child._is_none():
                problems.append(section_problem(path, _unresolved(node, field.name)))
                continue
            typed, wrong = _read_section(child, field.type, f"{path}.", origins, complete=complete)
            problems += wrong
            if typed is not None:
                values[field.name] = typed
        else:
            try:
                values[field.name] = _read_leaf(node, field.name, schema_keys()[path])
            except InterpolationToMissingValueError:
                # The open value that it refers to is reported under its own name.
                continue
            except WrongValue as wrong_value:
                problems.append(f"{wrong_value} (in {origins[path]})" if path in origins else str(wrong_value))
    if len(values) < len(fields(section)):
        return None, problems
    try:
        return section(**values), problems
    except Exception as error:
        # Only that of an extension has code of its own, which checks its values.
        if section not in own.SECTIONS.values():
            raise
        where = f"{section.__module__}.{section.__qualname__}"
        return None, [*problems, f"{prefix.removesuffix('.')}: {where} does not take these values: {reason(error)}"]


def _read_leaf(node: DictConfig, name: str, key: Key) -> Any:
    try:
        value = node[name]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except InterpolationToMissingValueError:
        raise
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise WrongValue(f"{key.path}={_unresolved(node, name)!s} cannot be resolved: {reason}") from error
    try:
        return convert(value, key)
    except WrongValue as wrong:
        instead = UNSUPPORTED_VALUES.get((key.path, str(value).lower()))
        text = str(wrong) if instead is None else f"{str(wrong).partition(';')[0]}; {instead}"
        raise WrongValue(f"{key.path}={show(value)} {text}") from None


def read_config(
    composed: DictConfig, *, origins: Mapping[str, str] | None = None, complete: bool = True
) -> tuple[Config | None, list[str]]:
    """The typed configuration, None if it has problems or open values, and the problems.

    `composed` has no `hydra` section, `origins` maps dotted keys to the YAML files that set them, for messages, and
    `complete` makes open values (`???`) problems.
    """
    config, problems = _read_section(composed, own.config_class(), "", origins or {}, complete=complete)
    return (None if problems else config), problems


def config_to_dict(value: Any) -> Any:
    """A configuration or a part of it as plain values: dictionaries, lists, enums by name."""
    if is_dataclass(value):
        return {field.name: config_to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return [config_to_dict(item) for item in value]
    if isinstance(value, dict):
        return {name: config_to_dict(item) for name, item in value.items()}
    # A literal ${…} must not become an interpolation when the file is read again. OmegaConf reads backslashes before
    # one in pairs.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def config_to_yaml(config: Config) -> str:
    """The configuration as YAML, every value resolved, enums by name; `load_saved_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))


def load_saved_config(path: Path) -> Config:
    """Reads the `config.yaml` of a run directory.

    Raises:
        ConfigError: The file is missing, is no YAML, or does not fit the schema.
    """
    config, problems = read_saved_config(_load_yaml(path))
    if config is None:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config


def saved_extensions(run_dir: Path) -> Any:
    """`extensions` in the `config.yaml` of a run directory; None without, or without a file that can be read."""
    try:
        return OmegaConf.to_container(_load_yaml(run_dir / "config.yaml"), resolve=False).get("extensions")  # type: ignore[union-attr]
    except ConfigError:
        return None


def is_saved(values: Collection[Any]) -> bool:
    """Whether a file without a defaults list has all sections of a configuration, as those that runs save."""
    return _SAVED_SECTIONS.issubset(values)


def load_saved_values(path: Path) -> DictConfig | None:
    """The values of a whole configuration that a run of this or an earlier version has saved; None for another file.

    Raises:
        ConfigError: The file is missing or no YAML, or its values would be looked up.
    """
    saved = _load_yaml(path)
    if "defaults" in saved or not is_saved(saved):
        return None
    whole, problems = _whole(saved)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return whole


def _load_yaml(path: Path) -> DictConfig:
    try:
        check_yaml(path)
        composed = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file; a run writes its configuration there"]) from None
    except ForeignFileError as error:
        raise ConfigError([str(error)]) from error
    except (OmegaConfBaseException, OSError, *UNREADABLE) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    if not isinstance(composed, DictConfig):
        raise ConfigError([f"{path} holds no configuration but a list"])
    return composed


def read_saved_config(saved: DictConfig) -> tuple[Config | None, list[str]]:
    """`read_config` for what a run of this or an earlier version has saved."""
    whole, problems = _whole(saved)
    return (None, problems) if problems else read_config(whole)


@cache
def _later_values() -> dict[str, Any]:
    """What configurations of earlier versions mean by the keys that they lack, which keeps their models what they are.

    null leaves kernels and the like to this version, as it does for all keys of `model.` that take true, false or null.
    """
    values: dict[str, Any] = {}
    for path, key in schema_keys().items():
        before, (*sections, name) = key.facts.before, path.split(".")
        if before is NOT_TOLD and sections[:1] == ["model"] and key.kind is bool and key.optional:
            before = None
        if before is not NOT_TOLD:
            parent = reduce(lambda inner, section: inner.setdefault(section, {}), sections, values)
            parent[name] = config_to_dict(before)
    return values


def _whole(saved: DictConfig) -> tuple[DictConfig, list[str]]:
    values = OmegaConf.to_container(saved, resolve=False)
    assert isinstance(values, dict)
    if missing := own.missing_problem(values.get("extensions")):
        return saved, [missing]
    if own.dropped_modules(values.get("extensions")):
        values = own.without_extensions(values)
    for section, name, values_read in _REMOVED_KEYS:
        if isinstance(inside := values.get(section), dict) and (values_read is None or inside.get(name) in values_read):
            inside.pop(name, None)
    looked_up = list(_interpolations(values))
    whole = OmegaConf.merge(OmegaConf.create(_later_values()), own.default_values(), values)
    assert isinstance(whole, DictConfig)
    return whole, [f"{path} is looked up with ${{…}}, and a run saves values; write the value" for path in looked_up]


def _interpolations(value: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of values that OmegaConf would look up (`${…}`), for example in the environment."""
    if isinstance(value, str) and _LOOKED_UP.search(value):
        yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield from _interpolations(member, f"{path}.{name}" if path else str(name))
