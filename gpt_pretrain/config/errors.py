"""Mistakes that a user can fix: the errors, and how their messages show values and ways out.

`commands.command` prints these errors without a traceback.
"""

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any

# Of a value in a message: a file's own may have megabytes.
_LONGEST_VALUE = 1000
# Read by Hydra and by a shell as it stands.
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)


class UserError(ValueError):
    """A user's mistake: the message names the key or file, the value, the rule and the way out."""


class ConfigError(UserError):
    """All mistakes in a configuration, one message each, so that the user can fix them together."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ConfigError lists at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class InterruptedReadError(UserError):
    """A source that stopped answering: what was made of it so far stays, and the same command goes on."""


class RunError(RuntimeError):
    """A failure that is no mistake of the user: printed without a traceback, exit code 1."""


class RankError(RunError):
    """A failure that a rank met alone, such as memory that ran out: its message names the rank."""


def reason(error: BaseException) -> str:
    """One line about an error of other code, whose message may be empty or very long."""
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def show(value: Any) -> str:
    """A value as messages print it: strings quoted, null, true and false as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"


def visible(text: str, keep: str = "") -> str:
    """Text with control characters, line ends among them, as escapes: names must steer neither terminal nor file."""
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def shell_word(text: str) -> str:
    """Text as one word of a command to paste, in one line."""
    if text.isprintable():
        return shlex.quote(text)
    special = {"'": "\\'", "\\": "\\\\"}
    return "$'" + "".join(special.get(each, each) if each.isprintable() else _in_bytes(each) for each in text) + "'"


def _in_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def override_word(key: str, value: str) -> str:
    """An override of a string as one word of a command to paste."""
    return f"{key}={value}" if _PLAIN.fullmatch(value) else shell_word(f"{key}={hydra_quoted(value)}")


def list_argument(key: str, values: Sequence[str]) -> str:
    """A list of strings as commands with a few arguments read it, with quotes where needed; not yet a shell's word."""
    doubled = (value.replace('"', '""') for value in values)
    shown = (value if _PLAIN.fullmatch(value) else f'"{value}"' for value in doubled)
    return f"{key}=[{','.join(shown)}]"


def hydra_quoted(text: str) -> str:
    """A string in Hydra's quotes, in which a backslash is special only before a quote."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def written(value: Any) -> str:
    """A value as on a command line: null, true and false as in YAML, strings unquoted where possible."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, str):
        return f'"{value}"' if not value or value != value.strip() else value
    return show(value)


def one_of(values: Sequence[object]) -> str:
    """Values as messages offer them: "1, 2 or 4"."""
    shown = list(values) if len(values) <= 12 else [*values[:11], values[-1]]
    return " or ".join(filter(None, [", ".join(map(str, shown[:-1])), str(shown[-1])]))


def refusal(asked: str, setting: str, why: str, *ways: str) -> str:
    """The message about two settings that exclude each other, and what to use instead."""
    return f"{asked} cannot be combined with {setting}: {why}; use {', or '.join(ways)}"


def indivisible(product: str, divisor: str, *ways: str) -> str:
    """The message about a number that must be a multiple of another, and what to use instead."""
    return f"{product} is not divisible by {divisor}; use {', or '.join(ways)}"


def refusals(asked: str, obstacles: Iterable[Sequence[str]], instead: str) -> Iterator[str]:
    """A message for each obstacle: a setting that excludes what was asked for, why, and ways out besides `instead`."""
    for setting, why, *ways in obstacles:
        yield refusal(asked, setting, why, instead, *ways)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def multiples_near(number: int, of: int) -> list[int]:
    """The positive multiples of `of` next to `number`, below and above."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number of things: "1 node", "2 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def format_bytes(num_bytes: int) -> str:
    """A file size with three significant digits, in binary units: 512 B, 1.5 MiB, 19.6 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_short(value: float) -> str:
    """A number with three significant digits and a unit: 987, 12.3k, 1.5M, 2.25B."""
    if not math.isfinite(value):
        return str(value)
    # A value that rounds up to 1000 of a unit takes the next one: 999,960 is 1M, not 1000k.
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    unit, name = next((each for each in units if abs(value) >= each[0] * 0.9995), (1, ""))
    return format_digits(value / unit) + name


def format_digits(value: float) -> str:
    """A finite number with three significant digits and no exponent: 0.052, 12.3, 712."""
    # A Decimal's format f never writes an exponent; adding 0.0 turns -0 into 0.
    return f"{Decimal(f'{value + 0.0:.3g}'):f}"


def install_command(extra: str) -> str:
    """The command of docs/install.md that installs an extra. The package is on no registry, only in the checkout."""
    # Transformer Engine is built against the installed PyTorch.
    isolation = "--no-build-isolation " if extra == "te" else ""
    return f"python -m pip install {isolation}-c constraints.txt -e '.[{extra}]'"


def how_to_install(extra: str) -> str:
    """The way out of a message about a missing extra."""
    return f"install it from the checkout with {install_command(extra)}"
