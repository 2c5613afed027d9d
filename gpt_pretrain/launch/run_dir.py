"""The run directory: the one that the user gave, or one named by the time of the start."""

import contextlib
import itertools
import os
import tempfile
from datetime import datetime
from pathlib import Path

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config


def check_run_dir(config: Config) -> None:
    """Whether the run directory can be made and written, asked before anything expensive; makes nothing.

    Raises:
        UserError: It cannot.
    """
    place = Path(config.run_dir or "outputs").absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    _probe(config, place)


def make_run_dir(config: Config) -> Path:
    """Makes the directory that a run writes to, `run_dir` or `outputs/DATE/TIME_NAME`, and returns its full path.

    Raises:
        UserError: It cannot be made or written.
    """
    try:
        if config.run_dir is None:
            run_dir = _new_directory(Path(f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}_{config.name}").absolute())
        else:
            run_dir = Path(config.run_dir).absolute()
            run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_refusal(config, error)) from error
    _probe(config, run_dir)
    return run_dir


def _probe(config: Config, directory: Path) -> None:
    # Permission bits do not tell of read-only mounts, quotas or file systems that take no files: a nameless file does.
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(_refusal(config, error, directory)) from error


def _refusal(config: Config, error: OSError, place: Path | None = None) -> str:
    given = "run_dir=null (outputs/DATE/TIME_NAME)" if config.run_dir is None else f"run_dir={config.run_dir}"
    reason = f"{error.strerror or error} at {place or error.filename}"
    return f"{given} cannot be written: {reason}; give another one with run_dir=DIRECTORY"


def _new_directory(path: Path) -> Path:
    """The path, or the first of path_2, path_3, …: two runs that start in one second are two runs."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}_{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("itertools.count ends never")
