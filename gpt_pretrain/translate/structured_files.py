"""YAML, TOML and JSON of other programs as flat settings, read as data, with what a command line says over them."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt_pretrain.config.errors import ConfigError, written
from gpt_pretrain.config.files import ForeignFileError, read_foreign_json, read_foreign_text
from gpt_pretrain.config.yaml_files import UNREADABLE, check_values, check_yaml
from gpt_pretrain.rules.overrides import parse_override, single_value

_LOOKUP = re.compile(r"\$\{(\.*)([\w.]+)\}")
# Of a value that looks up one that looks up another.
_MOST_STEPS = 20


def read_values(path: Path) -> dict[str, Any]:
    """The nested values of a file, by its suffix.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It cannot be read, or holds no mapping.
    """
    if path.suffix == ".json":
        values: Any = read_foreign_json(path)
        check_values(values)
        return dict(values)
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(read_foreign_text(path))
            check_values(values)
        else:
            check_yaml(path)
            # Its reader takes 2e-4 for a number, as Hydra's programs do.
            values = OmegaConf.to_container(OmegaConf.create(read_foreign_text(path)), resolve=False)
    except (*UNREADABLE, OmegaConfBaseException) as error:
        raise ForeignFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ForeignFileError(f"{path} cannot be read: it holds no settings")
    return values


def flat(values: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """Every setting by its dotted name; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        own = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict) and value:
            found |= flat(value, own)
        else:
            found[own] = value
    return found


def look_up(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with `${a.b}` and `${.b}` replaced; what a program computes in its own way stays as it is written."""

    def found(name: str, value: Any, steps: int) -> Any:
        """A value of the setting `name` with what it looks up."""
        if isinstance(value, list):
            return [found(name, item, steps) for item in value]
        if not isinstance(value, str) or "${" not in value or steps == 0:
            return value
        whole = _LOOKUP.fullmatch(value)
        if whole is not None:
            target = _target(name, whole)
            return found(target, values[target], steps - 1) if target in values else value
        return _LOOKUP.sub(lambda match: _inside(name, match, steps), value)

    def _inside(name: str, match: re.Match[str], steps: int) -> str:
        target = _target(name, match)
        known = found(target, values[target], steps - 1) if target in values else match[0]
        return str(known) if isinstance(known, str | int | float) else match[0]

    return {name: found(name, value, _MOST_STEPS) for name, value in values.items()}


def _target(name: str, match: re.Match[str]) -> str:
    """The setting that a look-up in `name` names; each dot before it goes up one section."""
    dots, target = match.groups()
    return ".".join([*name.split(".")[: -len(dots)], target]) if dots else target


def with_overrides(values: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values with Hydra's overrides (`++model.fp8=True`), and those as they were written.

    Raises:
        ConfigError: A word is no override.
    """
    changed, shown = dict(values), dict[str, str]()
    for word in words:
        if "=" not in word:
            raise ConfigError([f"{word!r} has no =; write the override as key=value"])
        override = parse_override(word)
        name = override.key_or_group
        for path in [path for path in changed if path == name or path.startswith(f"{name}.")]:
            del changed[path]
        value = single_value(override)
        for path, each in (flat(value, name) if isinstance(value, dict) else {name: value}).items():
            changed[path], shown[path] = each, word
    return changed, shown


def read_value(text: str) -> Any:
    """A value as YAML has it: a number, true or false, a list; otherwise text."""
    value = OmegaConf.create(f"x: {text}").x
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def with_options(values: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values with options such as `--training.steps=10`, `--training.steps 10` and `--a.no_b`, and those as written.

    Raises:
        ConfigError: A word is no option.
    """
    changed, shown, rest = dict(values), dict[str, str](), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise ConfigError([f"{word!r} is no option; write --section.name=value"])
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), " "
        section, _, leaf = name.rpartition(".")
        if not equals and leaf.startswith("no_"):
            name, text = f"{section}.{leaf.removeprefix('no_')}", "false"
        changed[name.replace("-", "_")] = read_value(text) if equals or text else True
        shown[name.replace("-", "_")] = f"--{name}{equals}{text}" if equals else word
    return changed, shown


def as_written(values: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, str]:
    """Each setting as the report shows it."""
    return {name: shown.get(name, f"{name}={written(value)}") for name, value in values.items()}


def has(values: Mapping[str, Any], *names: str) -> bool:
    """Whether one of the sections or settings is there."""
    return any(each == name or each.startswith(f"{name}.") for each in values for name in names)
