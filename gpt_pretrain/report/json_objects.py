"""Dataclasses written as JSON objects and read back, checked against their annotations.

JSON has no NaN and no infinity, and a loss that diverged is the last value to lose: those values are written as the
strings "nan", "inf" and "-inf". null means that the value was not measured. Readers ignore fields they do not know, so
that the files of a newer version stay readable.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Self, get_args, get_origin, get_type_hints

type JsonValue = str | int | float | list[JsonValue] | dict[str, JsonValue] | None

_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """A dataclass that is written as a JSON object.

    A field holds a string, a number, such an object, null, or a tuple of these.
    """

    def to_json(self) -> dict[str, JsonValue]:
        """Field → value."""
        return {field.name: to_json_value(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, JsonValue]) -> Self:
        """Builds the object from what `json.loads` gave; fields that this class does not know are ignored.

        A field with a default may be missing: files of earlier versions are without it.

        Raises:
            ValueError: A field is missing or has another type than this class says.
        """
        # mypy takes the class itself for unhashable.
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
            except ValueError as error:
                raise ValueError(f'field "{name}" of {cls.described()}: {error}') from None
        return cls(**arguments)

    @classmethod
    def described(cls) -> str:
        """What messages call it."""
        return f"a {cls.__name__}"


def to_json_value(value: Any) -> JsonValue:
    """What JSON holds for a value: lists for tuples, objects for ours, strings for NaN and the infinities."""
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

    item: Any
    """Annotation of a tuple's elements; None for what is no tuple."""
    nested: type[JsonObject] | None
    """The class of an object."""
    accepted: tuple[type, ...]
    """Python types of anything else: `float | None` gives (float, NoneType), a Literal (str,)."""


# Annotations are read once: a run's statistics of FP8 are hundreds of thousands of objects.
@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


@cache
def _shape(hint: Any) -> _Shape:
    if get_origin(hint) is tuple:
        return _Shape(get_args(hint)[0], None, ())
    parts = get_args(hint) or (hint,)
    accepted = tuple(dict.fromkeys(part if isinstance(part, type) else type(part) for part in parts))
    return _Shape(None, next((part for part in accepted if issubclass(part, JsonObject)), None), accepted)


def _from_json(value: Any, hint: Any) -> Any:
    """Undoes `to_json_value`, and lets a whole number stand where a float is expected, as JSON writers do."""
    shape = _shape(hint)
    if shape.item is not None:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        return tuple(_from_json(item, shape.item) for item in value)
    if shape.nested is not None:
        if value is None and type(None) in shape.accepted:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        return shape.nested.from_json(value)
    if float in shape.accepted and (type(value) is int or value in _NOT_FINITE):
        return float(value)
    if not isinstance(value, shape.accepted) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in shape.accepted)
        raise ValueError(f"{value!r} is not {names}")
    return value
