"""Dataclasses written as JSON objects and read back, checked against their annotations.

JSON has no NaN and no infinity, but a loss that diverged must not get lost: such values become the strings "nan", "inf"
and "-inf". null means that the value was not measured. Readers ignore unknown fields, so that they can read the files
of newer versions.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from reprlib import repr as shortened
from typing import Any, Self, get_args, get_origin, get_type_hints

type JsonValue = str | int | float | list[JsonValue] | dict[str, JsonValue] | None

_NOT_FINITE = ("nan", "inf", "-inf")
# No count of steps, samples, tokens or bytes is larger.
_LARGEST = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """A dataclass whose fields hold strings, numbers, booleans, such objects, None, or tuples and mappings of these."""

    def to_json(self) -> dict[str, JsonValue]:
        """The object as `json.dumps` takes it."""
        return {field.name: to_json_value(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, JsonValue]) -> Self:
        """Builds the object from what `json.loads` returned.

        Fields with a default may be missing, as in files of earlier versions. Raises `ValueError` if another field is
        missing or a value has the wrong type. Integers are counts.
        """
        # mypy considers the class itself unhashable.
        kind: type = cls
        arguments: dict[str, Any] = {}
        for name, hint in _hints(kind).items():
            if name not in values:
                if cls.__dataclass_fields__[name].default is not MISSING:
                    continue
                if type(None) not in _shape(hint).accepted:
                    raise ValueError(f'{cls.described()} has no field "{name}"')
            try:
                arguments[name] = _from_json(values.get(name), hint)
            except (ValueError, OverflowError) as error:
                raise ValueError(f'field "{name}" of {cls.described()}: {error}') from None
        return cls(**arguments)

    @classmethod
    def described(cls) -> str:
        """Its name in messages."""
        return f"a {cls.__name__}"


def to_json_value(value: Any) -> JsonValue:
    """A value as `json.dumps` takes it: lists for tuples, dicts for our objects, strings for NaN and infinities."""
    if isinstance(value, JsonObject):
        return value.to_json()
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    json_value: JsonValue = value
    return json_value


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a field's annotation accepts in JSON."""

    container: Any
    """tuple or Mapping; None if it is neither."""
    inside: tuple[Any, ...]
    """What a container's annotation names."""
    nested: type[JsonObject] | None
    """The class of an object."""
    accepted: tuple[type, ...]
    """Python types of anything else: `float | None` gives (float, NoneType), a Literal (str,)."""


# Cached because a run's FP8 statistics are hundreds of thousands of objects.
@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


@cache
def _shape(hint: Any) -> _Shape:
    parts = (hint,) if get_origin(hint) in (tuple, Mapping) else get_args(hint) or (hint,)
    container = next((part for part in parts if get_origin(part) in (tuple, Mapping)), None)
    accepted = tuple(dict.fromkeys(part if isinstance(part, type) else type(part) for part in parts))
    nested = next((part for part in accepted if issubclass(part, JsonObject)), None)
    return _Shape(get_origin(container), get_args(container), nested, accepted)


def _from_json(value: Any, hint: Any) -> Any:
    """Undoes `to_json_value`; accepts whole numbers for floats, because JSON writers drop the point."""
    shape = _shape(hint)
    if hint is Any or (value is None and type(None) in shape.accepted):
        return value
    if shape.container is not None:
        return _read_container(value, shape)
    if shape.nested is not None:
        if not isinstance(value, dict):
            raise ValueError(f"{shortened(value)} is not an object")
        return shape.nested.from_json(value)
    if float in shape.accepted and (type(value) is int or value in _NOT_FINITE):
        return float(value)
    if not isinstance(value, shape.accepted) or (isinstance(value, bool) and bool not in shape.accepted):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in shape.accepted)
        raise ValueError(f"{shortened(value)} is not {names}")
    if type(value) is int and not 0 <= value <= _LARGEST:
        raise ValueError(f"{shortened(value)} is not a count from 0 to {_LARGEST}")
    return value


def _read_container(value: Any, shape: _Shape) -> tuple[Any, ...] | dict[str, Any]:
    if shape.container is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{shortened(value)} is not a list")
        kinds = shape.inside[:1] * len(value) if shape.inside[-1] is Ellipsis else shape.inside
        if len(value) != len(kinds):
            raise ValueError(f"{shortened(value)} does not hold {len(kinds)} values")
        return tuple(map(_from_json, value, kinds))
    if not isinstance(value, dict):
        raise ValueError(f"{shortened(value)} is not an object")
    read = {}
    for key, item in value.items():
        try:
            read[key] = _from_json(item, shape.inside[1])
        except ValueError as error:
            raise ValueError(f"{shortened(key)}: {error}") from None
    return read
