"""Files that are on the disk when the call returns: after a power cut they are whole, or not there at all."""

import os
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


def write_durably(path: Path, text: str) -> None:
    """Writes a file beside its place, and puts it there in one piece: a reader finds the old text or the new one.

    Raises:
        OSError: The disk is full, or the directory cannot be written; the file is what it was before.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        fsync(unfinished)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    fsync(path.parent)
