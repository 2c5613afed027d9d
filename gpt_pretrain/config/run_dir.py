"""The run directory: the one that the user gave, or one named by the time of the start."""

import contextlib
import itertools
from datetime import datetime
from pathlib import Path

from gpt_pretrain.config.schema import Config


def make_run_dir(config: Config) -> Path:
    """Makes the directory that a run writes to, `run_dir` or `outputs/DATE/TIME_NAME`, and returns its full path."""
    if config.run_dir is None:
        return _new_directory(Path(f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}_{config.name}").absolute())
    run_dir = Path(config.run_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _new_directory(path: Path) -> Path:
    """The path, or the first of path_2, path_3, …: two runs that start in one second are two runs."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}_{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("itertools.count ends never")
