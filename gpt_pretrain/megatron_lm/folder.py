"""Where a distributed checkpoint of Megatron-LM or NeMo lies, and what its folder holds beside tensors.

    Megatron-LM    latest_checkpointed_iteration.txt, iter_0001000/ or release/
    NeMo 2         weights/, beside context/; the names of tensors begin with "module."
    NeMo 1         model_weights/ of an unpacked .nemo; they begin with "model."

(NeMo's are `NEMO_WEIGHT_DIR_NAMES` in Megatron-LM's megatron/post_training/checkpointing.py.) Inside lie metadata.json,
.metadata, *.distcp and, before megatron-core 0.19, common.pt. Anything else that a user names is refused by name.
"""

import argparse
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import safe_globals
from megatron.core.dist_checkpointing.serialization import load_common_state_dict

from gpt_pretrain.checkpoint.manifest import MANIFEST
from gpt_pretrain.config.errors import UserError, reason, show
from gpt_pretrain.config.files import read_foreign_json, read_foreign_text, read_regular
from gpt_pretrain.megatron.pickles import refused_name, restricted

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
_CONFIG = "metadata.json"
_INDEX = ".metadata"
_IN_NEMO = ("weights", "model_weights")
_MOST_BYTES = 2**30
_OTHERS: tuple[tuple[str, Callable[[Path], bool], str], ...] = (
    (
        "a checkpoint of this program",
        lambda path: (path / MANIFEST).is_file(),
        "checkpoint.init_from takes it as it is",
    ),
    (
        "a checkpoint with a file for each model-parallel rank (mp_rank_…), whose layout no file states",
        lambda path: any(path.glob("mp_rank_*")),
        "have Megatron-LM write it anew: --load THERE --ckpt-convert-format torch_dist --ckpt-convert-save NEW, with "
        "the run's own options",
    ),
    (
        "a model of transformers",
        lambda path: (path / "config.json").is_file(),
        "python -m gpt_pretrain.import_hf imports it",
    ),
    (
        "a checkpoint of torch (torch_dcp, fsdp_dtensor or another program's), whose tensors have other names",
        lambda path: (path / _INDEX).is_file(),
        "have Megatron-LM save it with --ckpt-format torch_dist; python -m gpt_pretrain.import_torchtitan imports "
        "torchtitan's Llama 3",
    ),
)


def find_checkpoint(path: Path) -> Path:
    """The folder with the tensors of a checkpoint, of which the user may have named one above.

    Raises:
        UserError: There is none, or it is in another format.
    """
    if path.suffix == ".nemo" and path.is_file():
        raise UserError(f"path={path} is an archive; unpack it (tar -xf {path.name}), and name the folder")
    if not path.is_dir():
        raise UserError(f"path={path} is no folder; name iter_… of Megatron-LM, or the one above it")
    tracker = path / TRACKER
    if tracker.is_file() and not (path / _CONFIG).is_file():
        path = path / _newest(tracker)
        if not path.is_dir():
            raise UserError(f"{tracker} names {path.name}, which is not there; name another iter_… as path")
    inside = next((path / name for name in _IN_NEMO if (path / name / _CONFIG).is_file()), path)
    if not (inside / _CONFIG).is_file():
        raise UserError(_what_it_is(path))
    backend = read_foreign_json(inside / _CONFIG).get("sharded_backend")
    if backend != "torch_dist":
        raise UserError(
            f"{inside / _CONFIG}: sharded_backend={show(backend)} is not read; have the program that wrote it save it "
            "as torch_dist (--ckpt-format torch_dist)"
        )
    if (inside / MANIFEST).is_file() or not (inside / _INDEX).is_file():
        raise UserError(_what_it_is(inside))
    return inside


def _newest(tracker: Path) -> str:
    text = read_foreign_text(tracker).strip()
    if text != "release" and not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{tracker} holds {show(text[:40])} instead of an iteration; name iter_… as path")
    return text if text == "release" else f"iter_{int(text):07d}"


def _what_it_is(path: Path) -> str:
    for what, matches, way in _OTHERS:
        if matches(path):
            return f"path={path} is {what}; {way}"
    missing = f"no {_INDEX}" if (path / _CONFIG).is_file() else f"neither {_CONFIG} nor {TRACKER}"
    below = sorted(path.glob(f"iter_*/{_CONFIG}"))
    way = f", such as {below[-1].parent}" if below else ", or copy it again if files are missing"
    return f"path={path} is no whole checkpoint of Megatron-LM or NeMo: {missing} is in it; name iter_… itself{way}"


def read_arguments(folder: Path, *, in_index: bool) -> Mapping[str, Any] | None:
    """Megatron-LM's arguments in a checkpoint, by name; None if it has none.

    They are in common.pt, or from megatron-core 0.19 on among the objects, `in_index`. Both are pickles, of which
    torch's and megatron-core's lists say what they may name.

    Raises:
        UserError: They name something else, or cannot be read.
    """
    file = folder / COMMON
    if file.is_file():
        safe_globals.register_safe_globals()
        try:
            common = torch.load(io.BytesIO(read_regular(file, most=_MOST_BYTES)), map_location="cpu", weights_only=True)
        except Exception as error:  # a garbled pickle raises almost anything
            why = refused_name(error) if isinstance(error, pickle.UnpicklingError) else reason(error)
            raise UserError(
                f"{file} cannot be read: {why}; move it away, and give the model with overrides=[…]"
            ) from error
    elif in_index:
        with restricted(folder):
            common = load_common_state_dict(folder)
    else:
        return None
    arguments = common.get("args") if isinstance(common, dict) else None
    return vars(arguments) if isinstance(arguments, argparse.Namespace) else None
