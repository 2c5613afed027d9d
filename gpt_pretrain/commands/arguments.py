"""The command line of a command that takes a few `key=value` of its own: a dataclass says which.

Names, types, documentation and messages come from the dataclass, as those of a run come from its schema; nothing is
composed. A field without a default must be given. A string is what follows the first `=`, to the letter, so that a
prompt may hold anything. `--key value`, `--key=value` and, where the key is true or false, `--key` say the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import Key, did_you_mean, nearest_name, section_keys
from gpt_pretrain.config.values import read_value


def defaults_of(kind: type) -> dict[str, Any]:
    """The values of the fields that may be left out."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def _pairs(
    arguments: Sequence[str], keys: dict[str, Key], plain: Sequence[str]
) -> Iterator[tuple[str, str | None, str]]:
    """Each argument's key, its value or None, and how it was written."""
    rest, places = list(arguments), list(plain)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        # As on the command line of a run, plus signs make no difference.
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name.lstrip("+")
        if key not in keys and places and not name.startswith("-"):
            yield places.pop(0), argument, argument
        elif equals or key not in keys:
            yield key, text if equals else None, argument
        elif name.startswith("--") and keys[key].kind is bool:
            yield key, "true", argument
        else:
            yield key, rest.pop(0) if name.startswith("--") and rest else None, argument


def read_arguments[Arguments](kind: type[Arguments], arguments: Sequence[str], plain: Sequence[str] = ()) -> Arguments:
    """Reads a command line.

    Args:
        kind: The dataclass of the arguments.
        arguments: What follows the command's name.
        plain: Keys whose values may stand without them, in this order.

    Raises:
        ConfigError: All that is wrong: unknown, repeated or missing keys, and values of another type.
    """
    keys, defaults = section_keys(kind), defaults_of(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    meant: set[str | None] = set()
    for name, text, argument in _pairs(arguments, keys, plain):
        if name not in keys:
            nearest = nearest_name(name, keys)
            problems.append(f"{name} is not a key of this command{did_you_mean(nearest)}")
            meant.add(nearest)
        elif text is None:
            problems.append(f"{name} has no value; write {name}=…")
            meant.add(name)
        elif name in values:
            problems.append(f"{argument}: {name} is given twice")
        else:
            try:
                values[name] = read_value(text, keys[name])
            except ConfigError as error:
                problems += error.problems
                values[name] = None
    problems += [
        f"{name} is missing; give {name}=… ({key.type_text}: {key.doc})"
        for name, key in keys.items()
        if name not in values and name not in defaults and name not in meant
    ]
    if problems:
        raise ConfigError(problems)
    return kind(**values)
