"""Save a checkpoint with megatron-core's distributed format (torch_dist).

All ranks write their shards into a directory under a temporary name, which is renamed when it is complete.
"""

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from gpt_pretrain.checkpoint.description import architecture, layout
from gpt_pretrain.checkpoint.directory import POINTER, checkpoint_path
from gpt_pretrain.checkpoint.fp8_state import describe_fp8_state
from gpt_pretrain.checkpoint.state import METADATA, Progress, Trainable, sharded_state
from gpt_pretrain.config.schema import ModelConfig


def save_checkpoint(directory: Path, trainable: Trainable, progress: Progress, model: ModelConfig) -> Path:
    """Writes a checkpoint; every rank calls it.

    Args:
        directory: The run's checkpoints, `RUN_DIR/checkpoints`.
        trainable: What to save; its parameters gathered (`Model.gathered_parameters`).
        progress: How far the run is.
        model: Gives the parallel layout.

    Returns:
        The checkpoint's directory.
    """
    path = checkpoint_path(directory, progress.step)
    unfinished = directory / f".{path.name}.unfinished"
    writer = torch.distributed.get_rank() == 0
    if writer:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    state = sharded_state(trainable, is_loading=False)
    state["scheduler"] = trainable.scheduler.state_dict()
    state["progress"] = asdict(progress)
    state["architecture"] = architecture(model, trainable.model.transformer_config)
    state["layout"] = layout(model)
    state["fp8"] = describe_fp8_state(model)
    dist_checkpointing.save(state, str(unfinished), content_metadata=dict(METADATA))
    torch.distributed.barrier()
    if writer:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
        pointer = directory / f".{POINTER}.unfinished"
        pointer.write_text(path.name + "\n", encoding="utf-8")
        os.replace(pointer, directory / POINTER)
    torch.distributed.barrier()
    return path
