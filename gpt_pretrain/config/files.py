"""Files: where `conf/` is, how this package writes files, and how it reads files from elsewhere.

Writes are atomic: after a crash or a power cut there is either the whole new file or directory, or the old one. Every
package may import `config`, so the only such writer is here.

Reads are bounded: a pipe, a file that is no text, and JSON that is huge or deep end in a one-line error (YAML:
`yaml_files`).
Nothing in a file is looked up in the environment, resolved or run.
"""

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Never

from gpt_pretrain.config.errors import ConfigError, UserError

# The index of a model with thousands of experts has a few MiB, a tokenizer.json up to 40.
_LARGEST_BYTES = 256 * 1024 * 1024
# In JSON. The index of a model with thousands of experts names a few hundred thousand tensors.
_MOST_VALUES = 1_000_000


def find_conf_dir() -> Path:
    """The folder `conf` that belongs to this package."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError([f"the package in {package} has no conf/ beside it; install gpt_pretrain again"])


@cache
def group_names() -> frozenset[str]:
    """The groups of `conf/`: the names of its folders."""
    return frozenset(path.name for path in find_conf_dir().iterdir() if path.is_dir())


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's names, are on the disk.

    Raises:
        OSError: The disk could not take them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished_path(path: Path) -> Path:
    """The hidden name beside `path` under which its content is written first."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Inside, file system errors name the file; the system's own do not once a file is open.

    Raises:
        OSError: With its `filename`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, text: str, *, wait_for_disk: bool = True) -> None:
    """Replaces a text file atomically; one process at a time may write it.

    `wait_for_disk` is not needed for a file that is worthless after a reboot.

    Raises:
        OSError: The disk is full, or the directory is not writable; the file is unchanged.
    """
    unfinished = unfinished_path(path)
    try:
        with named(path):
            unfinished.write_text(text, encoding="utf-8")
            if wait_for_disk:
                fsync(unfinished)
            os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    if wait_for_disk:
        fsync(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Creates a directory atomically: yields an unfinished one for its files, and renames it after the block.

    An error in the block removes it; leftovers of a killed process are removed first. `path` must not exist or be an
    empty directory; one process at a time may write it.

    Raises:
        OSError: The disk cannot take it; nothing is left behind.
    """
    unfinished = unfinished_path(path)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        fsync_tree(unfinished)
        publish_directory(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def fsync_tree(directory: Path) -> None:
    """Waits until a directory and every file below it are on the disk.

    Raises:
        OSError: The disk could not take one of them.
    """
    for path in (*directory.rglob("*"), directory):
        fsync(path)


def publish_directory(unfinished: Path, path: Path) -> None:
    """Renames a directory that is on the disk (`fsync_tree`), and waits until its new name is there, too.

    Raises:
        OSError: It cannot be renamed, for example because something of that name exists.
    """
    unfinished.rename(path)
    fsync(path.parent)


class ForeignFileError(UserError):
    """A file that is not what it should be; the message names the file and the reason."""


def check_regular(path: Path, status: os.stat_result | None = None) -> None:
    """Refuses files that would block or never end; `status` is that of an open file.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is a pipe, a device or a directory.
    """
    if not stat.S_ISREG((status or path.stat()).st_mode):
        raise ForeignFileError(f"{path} cannot be read: it is not a regular file")


def read_foreign_text(path: Path) -> str:
    """A whole file of UTF-8.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is a pipe, a device or a directory, huge, unreadable, or not UTF-8.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            check_regular(path, status)
            if status.st_size > _LARGEST_BYTES:
                raise ForeignFileError(f"{path} cannot be read: {status.st_size:,} bytes are no file of its kind")
            return file.read().decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ForeignFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_foreign_json(path: Path, most_values: int = _MOST_VALUES) -> dict[str, Any]:
    """A file that holds a JSON object; see `read_foreign_value` for the bound and the errors."""
    values = read_foreign_value(path, most_values)
    if not isinstance(values, dict):
        raise ForeignFileError(f"{path} cannot be read: it holds no JSON object")
    return values


def read_foreign_value(path: Path, most_values: int = _MOST_VALUES) -> Any:
    """A file that holds JSON, with at most about `most_values` values.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It cannot be read, is no JSON (NaN and infinity are not), is huge, or is nested too deeply.
    """
    text = read_foreign_text(path)
    # Those in strings count, too. Each value takes up to 200 bytes and half a microsecond once it is read.
    if sum(map(text.count, ",[{")) > most_values:
        raise ForeignFileError(f"{path} cannot be read: it has more than {most_values:,} values")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path} cannot be read: {error}") from error


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond any number")
    return value
