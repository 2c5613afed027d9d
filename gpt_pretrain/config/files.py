"""Files and directories that appear in one piece: a reader, or a power cut, finds all of one or what was there before.

This is the package's only such writer. It lives in `config`, the one room that every other room may import.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a directory's names.

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
    """Inside, an error of the file system says which file it is of; the system's own does not once a file is open.

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
    """Replaces a text file in one piece; one process at a time may write it.

    With `wait_for_disk` it returns only when the disk has the file: not worth it for one that a reboot makes worthless.

    Raises:
        OSError: The disk is full, or the directory cannot be written; the file is what it was before.
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
    """Makes a directory in one piece: gives the unfinished one, for its files to be written.

    Leaving the block without an error gives the directory its name; an error removes it. What a killed process has left
    is removed first. Nothing or an empty directory may be at `path`, and one process at a time may write it.

    Raises:
        OSError: The disk does not take it; nothing is left behind.
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
    """Waits until the disk has a directory and every file below it.

    Raises:
        OSError: The disk could not take one of them.
    """
    for path in (*directory.rglob("*"), directory):
        fsync(path)


def publish_directory(unfinished: Path, path: Path) -> None:
    """Gives a directory that is on the disk (`fsync_tree`) its final name, and waits until the disk has the name.

    Raises:
        OSError: It cannot be renamed, as where something is there already.
    """
    unfinished.rename(path)
    fsync(path.parent)
