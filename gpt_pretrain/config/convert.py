"""Converts a value to the type that its key takes, only without loss.

`1e3` becomes an integer, `1` a number, "12" 12. pydantic would not make this shorter: it accepts 1 and "on" as booleans
and enums by value, its errors would need the same sentences, and its import takes 0.25 s. OmegaConf's structured
configs stop at the first error.
"""

import contextlib
import csv
import math
from typing import Any

from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.keys import TYPE_NAMES, Key, did_you_mean, nearest_name

_MISFITS = {
    int: "is not an integer",
    float: "is not a number",
    bool: "is neither true nor false",
    str: "is not a string",
    Any: "is neither a string nor a number",
}
# The largest of seconds, rates and shares; a thread waits no longer.
_LARGEST_NUMBER = 1e9


class WrongValue(Exception):
    """A value that does not fit its key; the message follows `key=value`."""


def _scalar(value: Any, kind: Any, more: str = "") -> Any:
    """A value as `kind`, a key of `_MISFITS`; `more` about what would fit ends the message."""
    if kind is bool:
        # 1 may mean a level, and "on" a choice of another program.
        if not isinstance(value, bool) and (not isinstance(value, str) or value.lower() not in ("true", "false")):
            raise WrongValue(f"{_MISFITS[bool]}{more}; use true or false")
        return str(value).lower() == "true"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        if kind is Any:
            return value
        with contextlib.suppress(ValueError, OverflowError):
            converted = kind(value)
            if kind is float and not math.isfinite(converted):
                raise WrongValue(f"is not finite{more}")
            if kind is not int or isinstance(value, str) or converted == value:
                return converted
    raise WrongValue(f"{_MISFITS[kind]}{more}")


def _choice(value: Any, key: Key) -> Any:
    if isinstance(value, str) and value in key.choices:
        return key.kind[value]
    text = str(value)
    by_value = {str(member.value).lower(): member.name for member in key.kind}
    nearest = by_value.get(text.lower()) or nearest_name(text, key.choices)
    allowed = ", ".join(key.choices) + (" or null" if key.optional else "")
    if (why := key.facts.absent.get(text)) is not None:
        raise WrongValue(f"is not here: {why}; use one of {allowed}")
    way = did_you_mean(nearest)
    if key.is_open:
        way += "; if an extension registers it, name that with extensions=[MODULE]"
    raise WrongValue(f"is not one of {allowed}{way}")


def _member(value: Any, key: Key, what: str) -> Any:
    """An element of a list, or an entry of a mapping."""
    try:
        return _scalar(value, key.item)
    except WrongValue as wrong:
        raise WrongValue(f"has {what}={show(value)} {wrong}") from None


def convert(value: Any, key: Key) -> Any:
    """A value as the type of its key.

    Raises:
        WrongValue: It does not fit.
    """
    if value is None:
        if key.optional:
            return None
        raise WrongValue(f"may not be null; it takes: {key.type_text}")
    if key.kind is list:
        value = [value] if isinstance(value, str) and value == key.facts.word else value
        if not isinstance(value, list):
            raise WrongValue(f"is not a list; write {key.path}=[…] with {TYPE_NAMES[key.item]}s")
        return [_member(item, key, f"an element that does not fit: [{index}]") for index, item in enumerate(value)]
    if key.kind is dict:
        if not isinstance(value, dict):
            raise WrongValue(f"is not a mapping; write {key.path}.NAME=… with a {TYPE_NAMES[key.item]}")
        return {str(name): _member(item, key, f"an entry that does not fit: {name}") for name, item in value.items()}
    # Which strings have a meaning of their own, only the key's help says.
    more = (" or null" if key.optional else "") + (f"; {key.doc.rstrip('.')}" if key.kind is str else "")
    converted = _choice(value, key) if key.choices else _scalar(value, key.kind, more)
    if key.kind is int and abs(converted) > (largest := key.facts.largest):
        raise WrongValue(f"is beyond any run; use {largest} or less")
    if key.kind is float and abs(converted) > _LARGEST_NUMBER:
        raise WrongValue(f"is beyond any run; use {_LARGEST_NUMBER:g} or less")
    return converted


def read_value(text: str, key: Key) -> Any:
    """The value of a command's argument; strings, including those in a list, are taken literally.

    Raises:
        ConfigError: The value does not fit.
    """
    value: str | list[str] | None = None if text == "null" and key.optional else text
    if key.kind is list and text.startswith("[") and text.endswith("]"):
        value = next(csv.reader([text[1:-1]], skipinitialspace=True), [])
    try:
        return convert(value, key)
    except WrongValue as wrong:
        raise ConfigError([f"{key.path}={text} {wrong}"]) from None
