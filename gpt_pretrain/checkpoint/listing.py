"""A run's checkpoints as a table, read from their manifests."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gpt_pretrain.checkpoint.directory import complete_checkpoints, latest_checkpoint, step_of
from gpt_pretrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from gpt_pretrain.config.errors import UserError, format_bytes


def find_directory(path: Path) -> Path:
    """The directory of checkpoints that is meant.

    Args:
        path: A run's directory, or its `checkpoints`.

    Raises:
        UserError: It is neither.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name a run's directory, or its checkpoints/")
    if (path / MANIFEST).is_file():
        raise UserError(f"{path} is a single checkpoint; name its run's directory, or check it with verify {path}")
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not complete_checkpoints(directory):
        raise UserError(f"{directory} holds no complete checkpoint (step_…/{MANIFEST})")
    return directory


def list_checkpoints(directory: Path) -> Table:
    """A row for each complete checkpoint, in the order in which they were saved."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for name, justify in (("step", "right"), ("saved", "left"), ("size", "right"), ("layout", "left"), ("fp8", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # rich knows the words
    table.add_column("", overflow="fold")
    newest = latest_checkpoint(directory)
    for path in complete_checkpoints(directory):
        mark = Text("latest", style="bold green") if path == newest else Text()
        try:
            manifest = read_manifest(path)
        except UserError as error:
            table.add_row(str(step_of(path)), "", "", "", "", Text(str(error), style="bold red"))
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_unix))
        table.add_row(
            str(manifest.step), saved, format_bytes(manifest.num_bytes), describe_layout(manifest), _fp8(manifest), mark
        )
    return table


def describe_layout(manifest: Manifest) -> str:
    """How a checkpoint was spread: "8 ranks: TP2 PP2 DP2, distributed optimizer"."""
    layout = manifest.layout
    ranks = int(layout["processes"])
    sizes = {name: int(layout[f"model.{key}_parallel_size"]) for name, key in _SIZES.items()}
    sizes["DP"] = ranks // (sizes["TP"] * sizes["PP"] * sizes["CP"])
    spread = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    described = f"{ranks} ranks: {spread}" if ranks > 1 else "1 rank"
    distributed = layout["model.use_distributed_optimizer"] == "true"
    return described + (", distributed optimizer" if distributed else "")


_SIZES = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context"}


def _fp8(manifest: Manifest) -> str:
    model: Mapping[str, Any] = manifest.config["model"]
    if not model["fp8"]:
        return "off"
    emulated = ", emulated" if model["fp8_emulate"] else ""
    return (model["fp8_recipe"] or "delayed") + (", weights in FP8" if model["fp8_params"] else "") + emulated


def unfinished_saves(directory: Path) -> list[Path]:
    """What killed saves have left; the next save removes it."""
    return sorted(directory.glob(".step_*.unfinished"))
