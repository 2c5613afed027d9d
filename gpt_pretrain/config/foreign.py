"""Files that others wrote, read within bounds: JSON and YAML that are deep, huge, a pipe or no text are told in a line.

What is read here is data. Nothing of it is looked up in the environment, resolved or run.
"""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, Never

from omegaconf import DictConfig, ListConfig, OmegaConf

from gpt_pretrain.config.errors import UserError

# The index of a model of thousands of experts has a few MiB; a tokenizer.json has up to 40.
_LARGEST_BYTES = 256 * 1024 * 1024
# A file of values has few anchors. Aliases of aliases double at each step.
_MOST_ALIASES = 16
# Behind an even number of backslashes.
_LOOKED_UP = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


class ForeignFileError(UserError):
    """A file that cannot be read as what it should be: names it and the reason."""


def check_regular(path: Path) -> None:
    """Refuses what would never end or never begin to be read.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is a pipe, a device or a directory.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ForeignFileError(f"{path} cannot be read: it is no regular file")


def read_foreign_text(path: Path) -> str:
    """A whole file of UTF-8.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is a pipe, a device or a directory; it is huge; it cannot be read, or is no UTF-8.
    """
    try:
        # A pipe that nobody writes to is opened at once, and refused.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ForeignFileError(f"{path} cannot be read: it is no regular file")
            if status.st_size > _LARGEST_BYTES:
                raise ForeignFileError(f"{path} cannot be read: {status.st_size:,} bytes are no file of its kind")
            return file.read().decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ForeignFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_foreign_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object; see `read_foreign_value` for the errors."""
    values = read_foreign_value(path)
    if not isinstance(values, dict):
        raise ForeignFileError(f"{path} cannot be read: it holds no JSON object")
    return values


def read_foreign_value(path: Path) -> Any:
    """A file that holds JSON.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It cannot be read, is no JSON (NaN and infinity are not), or is nested too deeply.
    """
    try:
        return json.loads(read_foreign_text(path), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ForeignFileError):
            raise
        raise ForeignFileError(f"{path} cannot be read: {error}") from error


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond any number")
    return value


def check_yaml(path: Path) -> None:
    """Refuses YAML whose aliases would multiply, and what is no file of text.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is such a file.
    """
    text = read_foreign_text(path)
    if re.search(r"(?:^|[\s\[{,:-])&\w", text) and len(re.findall(r"(?:^|[\s\[{,:-])\*\w", text)) > _MOST_ALIASES:
        raise ForeignFileError(f"{path} cannot be read: it has more than {_MOST_ALIASES} aliases of YAML")


def interpolations(node: DictConfig | ListConfig, path: str = "") -> list[str]:
    """Dotted keys of values that would be looked up elsewhere, such as in the environment: `${…}`."""
    found: list[str] = []
    names: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for name in names:
        child: Any = node._get_node(name)
        where = f"{path}{name}"
        if OmegaConf.is_interpolation(node, name):
            # OmegaConf takes an escaped one, which stands for its own text, for one as well.
            if _LOOKED_UP.search(child._value()):
                found.append(where)
        elif isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_missing():
            found += interpolations(child, f"{where}.")
    return found
