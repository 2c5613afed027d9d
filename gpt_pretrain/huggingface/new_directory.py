"""A directory that appears when all of it is on the disk, where nothing was before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gpt_pretrain.checkpoint.durable import fsync
from gpt_pretrain.config.errors import UserError


def check_new_directory(path: Path) -> None:
    """Whether a directory can be made at a place.

    Raises:
        UserError: Something is there already, or what would hold it is no directory.
    """
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"out={path} exists and is not empty; nothing is overwritten: give another directory")
    elif os.path.lexists(path):
        raise UserError(f"out={path} is a file; give a directory that does not exist yet")
    parent = _nearest_existing(path.parent)
    if not parent.is_dir():
        raise UserError(f"out={path} cannot be made: {parent} is a file")


def check_disk_space(path: Path, num_bytes: int) -> None:
    """Whether a directory of that size has room at a place.

    Raises:
        UserError: It has not; tells the bytes that are needed and those that are free.
    """
    free = shutil.disk_usage(_nearest_existing(path.parent)).free
    if free < num_bytes:
        raise UserError(f"out={path} needs {num_bytes:,} bytes, and its disk has {free:,} free; give another place")


def write_new_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Makes a directory in one piece: killed half-way, its name does not exist.

    Args:
        path: Where; what `check_new_directory` has let through.
        write: Writes the content into the directory that it is given.

    Raises:
        UserError: The disk does not take it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        if unfinished.exists():
            # Left by a process that was killed.
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            fsync(unfinished)
            # In place of an empty directory too.
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        fsync(path.parent)
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror or error}; nothing is left there") from error


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path):
        path = path.parent
    return path
