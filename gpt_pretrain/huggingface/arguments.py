"""What exporting and importing take, and the directory that they write; checked before torch is imported."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import new_directory
from gpt_pretrain.huggingface.architectures import Architecture


class Format(Enum):
    """What is written."""

    hf = "hf"


class WeightType(Enum):
    """Type of the written weights; the values are torch's names."""

    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportArguments:
    """What `python -m gpt_pretrain.export` takes."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    out: str
    """The directory to write; it must not exist, or be empty."""
    format: Format = Format.hf
    """hf: a directory that Hugging Face `transformers` loads."""
    dtype: WeightType | None = None
    """Type of the weights; null: as in the checkpoint, where FP8 weights are BF16."""
    architecture: Architecture | None = None
    """Class in `transformers`; null: the one that the model's fields say, llama where mistral would do as well."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""
    max_shard_gib: float = 5.0
    """Most GiB of weights in one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """What `python -m gpt_pretrain.import_hf` takes."""

    path: str
    """A Hugging Face directory: config.json and safetensors, with or without a tokenizer.json."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""


def check_new_directory(path: Path) -> None:
    """Refuses a path where no directory can be made.

    Raises:
        UserError: Something is there already, or its parent is no directory.
    """
    if path.is_symlink():
        raise UserError(f"out={path} is a link, and a directory takes its name when it is finished; give its target")
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"out={path} exists and is not empty; nothing is overwritten: give another directory")
    elif os.path.lexists(path):
        raise UserError(f"out={path} is a file; give a directory that does not exist yet")
    parent = _nearest_existing(path.parent)
    if not parent.is_dir():
        raise UserError(f"out={path} cannot be made: {parent} is a file")


def check_disk_space(path: Path, num_bytes: int) -> None:
    """Raises a UserError with the bytes needed and the bytes free if the disk has less room than needed."""
    free = shutil.disk_usage(_nearest_existing(path.parent)).free
    if free < num_bytes:
        raise UserError(f"out={path} needs {num_bytes:,} bytes, and its disk has {free:,} free; give another place")


@contextmanager
def out_directory(path: Path) -> Iterator[Path]:
    """Makes a directory that `check_new_directory` has let through, in one piece (`config.files.new_directory`).

    Raises:
        UserError: The disk does not take it.
    """
    try:
        with new_directory(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror or error}; nothing is left there") from error


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path):
        path = path.parent
    return path
