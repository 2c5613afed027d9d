"""From what Hydra composed to the typed `Config`: leaf by leaf, so that every wrong value is reported, not the first.

Values are converted only where nothing is lost (`1e3` to an integer, `1` to a number, "12" to 12); anything else is an
error that names the key, the value and what the key takes.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import (
    TYPE_NAMES,
    UNSUPPORTED_VALUES,
    Key,
    did_you_mean,
    is_known,
    nearest_name,
    schema_keys,
    schema_sections,
    unknown_key,
)
from gpt_pretrain.config.schema import Config


class _Wrong(Exception):
    """A value that does not fit its key; the message is what follows `key=value`."""


def show(value: Any) -> str:
    """A value as messages print it: strings quoted, null, true and false as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    return repr(value)


def written(value: Any) -> str:
    """A value as it stands on a command line: null, true and false as in YAML, strings plain where they can be."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, str):
        return f'"{value}"' if not value or value != value.strip() else value
    return show(value)


def section_problem(path: str, value: Any) -> str:
    """What is told about a value where a section of keys belongs."""
    members = ", ".join(field.name for field in fields(schema_sections()[path]))
    return f"{path}={show(value)} replaces a whole section; set its keys instead: {members}"


# What YAML 1.1 and other programs write for a boolean.
_SAID_OTHERWISE = {"true": ("1", "yes", "on", "y", "t"), "false": ("0", "no", "off", "n", "f")}


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    raise _Wrong("is not an integer")


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise _Wrong("is not a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _Wrong("is not a number") from None
    if not math.isfinite(number):
        raise _Wrong("is not finite")
    return number


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if isinstance(value, str) and text in ("true", "false"):
        return text == "true"
    # Not taken for one: 1 may be a level, and "on" a choice that another code knows.
    meant = next((f"; use {name}" for name, words in _SAID_OTHERWISE.items() if text in words), "")
    raise _Wrong(f"is neither true nor false{meant}")


def _string(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise _Wrong("is not a string")


def _string_or_number(value: Any) -> str | int | float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    raise _Wrong("is neither a string nor a number")


_SCALARS = {int: _integer, float: _number, bool: _boolean, str: _string, Any: _string_or_number}


def _choice(value: Any, key: Key) -> Any:
    if isinstance(value, str) and value in key.choices:
        return key.kind[value]
    text = str(value)
    by_value = {str(member.value).lower(): member.name for member in key.kind}
    nearest = by_value.get(text.lower()) or nearest_name(text, key.choices)
    allowed = ", ".join(key.choices) + (" or null" if key.optional else "")
    raise _Wrong(f"is not one of {allowed}{did_you_mean(nearest)}")


def _convert(value: Any, key: Key) -> Any:
    """One leaf: the value as its type, or `_Wrong`."""
    if value is None:
        if key.optional:
            return None
        raise _Wrong(f"may not be null; it takes: {key.type_text}")
    if key.kind is list:
        if not isinstance(value, list):
            raise _Wrong(f"is not a list; write {key.path}=[…] with {TYPE_NAMES[key.item]}s")
        items = []
        for index, item in enumerate(value):
            try:
                items.append(_SCALARS[key.item](item))
            except _Wrong as wrong:
                raise _Wrong(f"has an element that does not fit: [{index}]={show(item)} {wrong}") from None
        return items
    if key.kind is dict:
        if not isinstance(value, dict):
            raise _Wrong(f"is no mapping; write {key.path}.NAME=… with a {TYPE_NAMES[key.item]}")
        entries = {}
        for name, entry in value.items():
            try:
                entries[str(name)] = _SCALARS[key.item](entry)
            except _Wrong as wrong:
                raise _Wrong(f"has an entry that does not fit: {name}={show(entry)} {wrong}") from None
        return entries
    if key.choices:
        return _choice(value, key)
    try:
        return _SCALARS[key.kind](value)
    except _Wrong as wrong:
        what, use, instead = str(wrong).partition("; use ")
        raise _Wrong(f"{what} or null{use}{instead}" if key.optional else str(wrong)) from None


def read_value(text: str, key: Key) -> Any:
    """One argument of a command line as its type; a string is taken as it stands, whatever is in it.

    Raises:
        ConfigError: The value does not fit.
    """
    value = None if text == "null" and key.optional else text
    try:
        return _convert(value, key)
    except _Wrong as wrong:
        raise ConfigError([f"{key.path}={text} {wrong}"]) from None


class _Reader:
    """Reads a composed configuration once and keeps what is wrong with it."""

    def __init__(self, origins: Mapping[str, str], *, complete: bool) -> None:
        self.origins = origins
        self.complete = complete
        self.problems: list[str] = []

    def read_section(self, node: DictConfig, section: type, prefix: str) -> Any:
        """Builds `section` from `node`; None when something in it is wrong or missing."""
        self._unknown(node, prefix)
        values: dict[str, Any] = {}
        for field in fields(section):
            path = prefix + field.name
            if is_dataclass(field.type):
                assert isinstance(field.type, type)
                child = node._get_node(field.name)
                if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                    typed = self.read_section(child, field.type, f"{path}.")
                    if typed is not None:
                        values[field.name] = typed
                elif child is None or OmegaConf.is_missing(node, field.name):
                    self._missing(path, "is not in the configuration")
                else:
                    raw = OmegaConf.to_container(node, resolve=False)
                    assert isinstance(raw, dict)
                    self.problems.append(section_problem(path, raw[field.name]))
            else:
                self._read_leaf(node, field.name, schema_keys()[path], values)
        return section(**values) if len(values) == len(fields(section)) and not self.problems else None

    def _read_leaf(self, node: DictConfig, name: str, key: Key, values: dict[str, Any]) -> None:
        if node._get_node(name) is None:
            self._missing(key.path, "is not in the configuration")
            return
        if OmegaConf.is_missing(node, name):
            self._missing(key.path, "has no value")
            return
        try:
            value = node[name]
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except InterpolationToMissingValueError:
            # The open value that it points to is reported under its own name.
            return
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict)
            reason = str(error).splitlines()[0]
            self.problems.append(f"{key.path}={raw[name]!s} cannot be resolved{self._origin(key.path)}: {reason}")
            return
        try:
            values[name] = _convert(value, key)
        except _Wrong as wrong:
            instead = UNSUPPORTED_VALUES.get((key.path, str(value).lower()))
            text = str(wrong) if instead is None else f"{str(wrong).partition(';')[0]}; {instead}"
            self.problems.append(f"{key.path}={show(value)} {text}{self._origin(key.path)}")

    def _missing(self, path: str, what: str) -> None:
        if self.complete:
            key = schema_keys().get(path)
            takes = "" if key is None else f" ({key.type_text}: {key.doc})"
            self.problems.append(f"{path} {what}; choose a preset that sets it, or give {path}=…{takes}")

    def _unknown(self, node: DictConfig, prefix: str) -> None:
        for name in node:
            path = f"{prefix}{name!s}"
            if not is_known(path):
                self.problems.append(unknown_key(path))

    def _origin(self, path: str) -> str:
        return f" (in {self.origins[path]})" if path in self.origins else ""


def read_config(
    composed: DictConfig, *, origins: Mapping[str, str] | None = None, complete: bool = True
) -> tuple[Config | None, list[str]]:
    """Reads the typed configuration out of a composed one.

    Args:
        composed: What Hydra composed, without its `hydra` section.
        origins: Dotted key to the YAML file that set it; named in messages.
        complete: Whether values that are still open (`???`) are problems.

    Returns:
        The configuration, or None where it has problems or open values; and the problems.
    """
    reader = _Reader(origins or {}, complete=complete)
    config = reader.read_section(composed, Config, "")
    return (None, reader.problems) if reader.problems else (config, [])
