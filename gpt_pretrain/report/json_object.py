"""Dataclasses as JSON objects and back, checked: what every record of `metrics.jsonl` is built on.

A field holds a string, a number, such an object, null, or a tuple of strings, numbers or such objects.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, get_args, get_origin, get_type_hints

type JsonValue = str | int | float | list[JsonValue] | dict[str, JsonValue] | None

_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """A dataclass that is written as a JSON object; JSON has no NaN and no infinity, so these become strings."""

    @classmethod
    def description(cls) -> str:
        """What errors call it."""
        return f"a {cls.__name__}"

    def to_json(self) -> dict[str, JsonValue]:
        """Field → value."""
        return {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, JsonValue]) -> Self:
        """Builds the object from what `json.loads` gave; fields that this class does not know are ignored.

        Raises:
            ValueError: A field is missing or has another type than this class says.
        """
        hints = get_type_hints(cls)
        arguments: dict[str, Any] = {}
        for field in fields(cls):
            hint = hints[field.name]
            if field.name not in values and type(None) not in get_args(hint):
                raise ValueError(f'{cls.description()} has no field "{field.name}"')
            try:
                arguments[field.name] = _from_json(values.get(field.name), hint)
            except ValueError as error:
                raise ValueError(f'field "{field.name}" of {cls.description()}: {error}') from None
        return cls(**arguments)


def _to_json(value: Any) -> JsonValue:
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, JsonObject):
        return value.to_json()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    json_value: JsonValue = value
    return json_value


def _from_json(value: JsonValue, hint: Any) -> Any:
    """Undoes `_to_json`, and lets a whole number stand where a float is expected, as JSON writers do."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        return tuple(_from_json(item, get_args(hint)[0]) for item in value)
    parts = get_args(hint) or (hint,)
    objects = [part for part in parts if isinstance(part, type) and issubclass(part, JsonObject)]
    if objects:
        if value is None and type(None) in parts:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        return objects[0].from_json(value)
    accepted = _accepted(hint)
    if float in accepted and isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if float in accepted and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, accepted) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in accepted)
        raise ValueError(f"{value!r} is not {names}")
    return value


def _accepted(hint: object) -> tuple[type, ...]:
    """Python types that a field's annotation accepts: `float | None` gives (float, NoneType), a Literal (str,)."""
    kinds: list[type] = []
    for part in get_args(hint) or (hint,):
        kind = part if isinstance(part, type) else type(part)
        if kind not in kinds:
            kinds.append(kind)
    return tuple(kinds)
