"""How much a YAML file from elsewhere may hold, and the values of a JSON file that become a configuration.

A small file can stand for a huge configuration, if aliases of lists and mappings repeat each other. So an alias names a
text or a number, and a file is measured by the events of YAML's own parser before anything is built from it.
A file within the bounds is read in about a second. `lookups` bounds what its values (`${name}`) make of each other.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from gpt_pretrain.config.files import ForeignFileError, read_foreign_text

# A configuration has 300 values in 4 levels; the longest lists are those of files, which may be given as patterns.
_MOST_VALUES, _MOST_CHARACTERS, _DEEPEST = 10_000, 1 << 20, 32
# In values that look others up, and in one: OmegaConf takes milliseconds for a line of its grammar, more if it nests.
_MOST_LOOKING_UP, _LONGEST_LOOKING_UP = 1 << 16, 1 << 12
# Python takes quadratic time for YAML's base 60 (`1:30:00`). No number has as many digits.
_LONG_NUMBER = re.compile(r"[-+.\d][-+.:\w]{400}")
# Others make dates, sets and bytes, and fail in many ways.
_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))

# What reading YAML raises, by its parser, by what a tag makes of a scalar (`!!bool 3`), or by its depth.
UNREADABLE = (yaml.YAMLError, ValueError, LookupError, ArithmeticError, RecursionError)


class TooMuch(ValueError):
    """Values beyond the bounds; the message says which."""


class _Size:
    """What has been counted of a file."""

    def __init__(self) -> None:
        self.values = self.characters = self.looking_up = 0

    def add(self, text: str, depth: int) -> None:
        """Counts a value; the text of a list or a mapping is empty."""
        looks_up = "${" in text
        if looks_up and len(text) > _LONGEST_LOOKING_UP:
            raise TooMuch(f"a value with ${{…}} has more than {_LONGEST_LOOKING_UP:,} characters")
        self.values += 1
        self.characters += len(text)
        self.looking_up += len(text) if looks_up else 0
        for counted, most, what in (
            (self.values, _MOST_VALUES, "values"),
            (self.characters, _MOST_CHARACTERS, "characters, aliases counted as what they name"),
            (self.looking_up, _MOST_LOOKING_UP, "characters in values that look others up with ${…}"),
            (depth, _DEEPEST, "levels"),
        ):
            if counted > most:
                raise TooMuch(f"it has more than {most:,} {what}")


def check_yaml(path: Path) -> None:
    """Refuses YAML beyond the bounds, and files that are no text.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is refused.
    """
    text = read_foreign_text(path)
    try:
        if len(text) > _MOST_CHARACTERS:
            raise TooMuch(f"it has more than {_MOST_CHARACTERS:,} characters")
        _measure(text)
    except (yaml.YAMLError, TooMuch) as error:
        told = str(error).replace('in "<unicode string>", ', "in ")
        raise ForeignFileError(f"{path} cannot be read: {' '.join(told.split())}") from error


def _measure(text: str) -> None:
    size, depth, anchored = _Size(), 0, dict[str | None, str]()
    # The parser of the loaders that read the file later: another one may understand it otherwise.
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", *_TAGS):
            raise TooMuch(f"it has the tag {tag!r}")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise TooMuch(f"*{event.anchor} repeats a list or a mapping, or names nothing before it")
            size.add(anchored[event.anchor], depth)
        elif isinstance(event, yaml.ScalarEvent):
            if (tag is not None or event.style is None) and _LONG_NUMBER.match(event.value):
                raise TooMuch(f"{event.value[:20]}… is no number with {len(event.value):,} characters")
            size.add(event.value, depth)
            if event.anchor is not None:
                anchored[event.anchor] = event.value
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            size.add("", depth)
            anchored.pop(event.anchor, None)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def check_values(values: Any) -> None:
    """Refuses plain values, such as those of a JSON file, that a YAML file may not hold either.

    Raises:
        TooMuch: They are beyond the bounds.
    """
    size, rest = _Size(), [(values, 1)]
    while rest:
        value, depth = rest.pop()
        size.add(value if isinstance(value, str) else "", depth)
        if isinstance(value, dict):
            rest += [(member, depth + 1) for pair in value.items() for member in pair]
        elif isinstance(value, list):
            rest += [(member, depth + 1) for member in value]
