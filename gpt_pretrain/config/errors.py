"""What a user can mend: the errors, and how their messages write values, numbers and ways out.

The door (`commands.door`) prints these errors without a traceback.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any


class UserError(ValueError):
    """A mistake in what the user gave: the message names the key or file, the value, the rule and the way out."""


class ConfigError(UserError):
    """One or more configuration mistakes, listed together so that they can be mended together.

    Args:
        problems: One message per mistake; never empty.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ConfigError lists at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """What ended a run although nothing that was given is wrong: printed without a traceback, exit code 1."""


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


def one_of(values: Sequence[object]) -> str:
    """Values as a message offers them: "1, 2 or 4"."""
    shown = list(values) if len(values) <= 12 else [*values[:11], values[-1]]
    return " or ".join(filter(None, [", ".join(map(str, shown[:-1])), str(shown[-1])]))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def multiples_near(number: int, of: int) -> list[int]:
    """The multiples of `of` on both sides of `number`; the lower one only if it is positive."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def format_bytes(num_bytes: int) -> str:
    """A size on a disk with three significant digits, in units of powers of two: 512 B, 1.5 MiB, 19.6 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


# The commands of docs/gpu.md. The package is on no registry, so an extra is installed from the checkout.
_INSTALL_COMMANDS = {
    # Built against the PyTorch that is there, hence no build isolation.
    "te": "python -m pip install --no-build-isolation -c constraints.txt -e '.[te]'",
    # Its wheel for CUDA 13.
    "flash": "python -m pip install -c constraints.txt -e '.[flash]'",
    "wandb": "python -m pip install -c constraints.txt -e '.[wandb]'",
    "plot": "python -m pip install -c constraints.txt -e '.[plot]'",
}


def install_command(extra: str) -> str:
    """The command that installs an extra from the checkout."""
    return _INSTALL_COMMANDS[extra]


def how_to_install(extra: str) -> str:
    """The way out of a message about a missing extra."""
    return f"install it from the checkout with {install_command(extra)}"
