"""Files: where `conf/` is, how this package writes files, and how it reads files from elsewhere.

Writes are atomic: after a crash or a power cut there is either the whole new file or directory, or the old one. Every
package may import `config`, so the only such writer is here. What stands in for a file is never written through: a
link, a pipe or a device under an unfinished name is removed, and one under the name of a log is refused.

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
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Never, TextIO

from gpt_pretrain.config.errors import ConfigError, InterruptedReadError, UserError

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


def expand_user(path: str | Path, key: str) -> Path:
    """A path whose leading `~` or `~USER` is replaced by that user's home.

    Raises:
        UserError: The home is unknown; the message names the key of the path.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise UserError(
            f"{key}={path}: this machine knows no home of {user}; write the directory out, or ./{path} for a file of "
            "that name"
        ) from error


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


def remove(path: Path) -> None:
    """Removes whatever has this name, if anything: a file, a link but not its target, or a directory and all in it.

    Raises:
        OSError: It cannot be removed.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def write_file(path: Path, text: str, *, wait_for_disk: bool = True) -> None:
    """Replaces a text file atomically; one process at a time may write it.

    `wait_for_disk` is not needed for a file that is worthless after a reboot.

    Raises:
        OSError: The disk is full, or the directory is not writable; the file is unchanged.
    """
    _replace(path, text.encode(), wait_for_disk=wait_for_disk)


def _replace(path: Path, content: bytes, *, wait_for_disk: bool = True) -> None:
    unfinished = unfinished_path(path)
    try:
        with named(path):
            remove(unfinished)
            # A new file ("x"), so that nothing that has come in between is followed.
            with unfinished.open("xb") as file:
                file.write(content)
            if wait_for_disk:
                fsync(unfinished)
            os.replace(unfinished, path)
    except OSError:
        # If it was not this process that could not write it, it may not be able to remove it either.
        with suppress(OSError):
            remove(unfinished)
        raise
    if wait_for_disk:
        fsync(path.parent)


def check_own_file(path: Path) -> None:
    """Refuses what stands in for a file that this package writes in place; a file that is missing passes.

    Raises:
        ForeignFileError: It is a link, a pipe, a device, a socket or a directory.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ForeignFileError(f"{path} is not a regular file, and a run writes a file of its own there; delete it")


def open_to_append(path: Path, *, replaces: bool = False) -> TextIO:
    """Opens a text file of this package's own to append to it, and to read it; makes it if it is missing.

    If it has another name too, as in a backup made of hard links, it becomes a copy: the other stays as it is. With
    `replaces` a link, a pipe or a device in its place is removed.

    Raises:
        ForeignFileError: Something else stands in for it (`check_own_file`).
        OSError: It cannot be opened.
    """
    try:
        check_own_file(path)
    except ForeignFileError:
        if not replaces or stat.S_ISDIR(path.lstat().st_mode):
            raise
        path.unlink()
    if os.path.lexists(path) and path.lstat().st_nlink > 1:
        _replace(path, read_regular(path))
    # Neither through a link nor waiting at a pipe that has come in between.
    in_place = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "a+", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | in_place, 0o666))


@contextmanager
def new_directory(path: Path, *, goes_on: bool = False) -> Iterator[Path]:
    """Creates a directory atomically: yields an unfinished one for its files, and renames it after the block.

    An error in the block removes it; leftovers of a killed process are removed first. With `goes_on` the block gets the
    leftovers, and those of a signal or of an `InterruptedReadError` stay. `path` must not exist or be an empty
    directory; one process at a time may write it.

    Raises:
        OSError: The disk cannot take it; nothing is left behind.
    """
    unfinished = unfinished_path(path)
    if not (goes_on and os.path.lexists(unfinished) and stat.S_ISDIR(unfinished.lstat().st_mode)):
        remove(unfinished)
    unfinished.mkdir(parents=True, exist_ok=goes_on)
    try:
        yield unfinished
        fsync_tree(unfinished)
        publish_directory(unfinished, path)
    except BaseException as error:
        if not (goes_on and isinstance(error, KeyboardInterrupt | SystemExit | InterruptedReadError)):
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


def read_regular(path: Path, *, most: int | None = None) -> bytes:
    """All bytes of a regular file, never waiting for a pipe's writer.

    Raises:
        ForeignFileError: It is something else, or has more than `most` bytes.
        OSError: It is missing or cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        check_regular(path, status)
        if most is not None and status.st_size > most:
            raise ForeignFileError(f"{path} cannot be read: {status.st_size:,} bytes are no file of its kind")
        return file.read()


def read_foreign_text(path: Path) -> str:
    """A whole file of UTF-8.

    Raises:
        FileNotFoundError: It is not there.
        ForeignFileError: It is a pipe, a device or a directory, huge, unreadable, or not UTF-8.
    """
    try:
        return read_regular(path, most=_LARGEST_BYTES).decode("utf-8")
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
        return parse_json(text)
    except ValueError as error:
        raise ForeignFileError(f"{path} cannot be read: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: It is no JSON (NaN and infinity are not), or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond any number")
    return value
