"""Save and load a checkpoint with megatron-core's distributed format (torch_dist).

A checkpoint is a directory `RUN_DIR/checkpoints/step_00000300` that all ranks write their shards into. It is written
under a temporary name and renamed when it is complete, and `RUN_DIR/checkpoints/latest` names the newest one.
"""

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.checkpoint.differences import differences
from gpt_pretrain.checkpoint.fp8_state import EXTRA_STATE, describe_fp8_state, keeps_fp8_state, take_extra_states
from gpt_pretrain.config.derived import (
    ffn_hidden_size,
    kv_channels,
    num_query_groups,
    padded_vocab_size,
    uses_distributed_optimizer,
)
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import ModelConfig, PositionEmbedding
from gpt_pretrain.config.typed import written
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.optimizer import cast_masters_to_fp8_weights, load_optimizer_state, prepare_for_loading

_POINTER = "latest"
# Optimizer states by their place in the model's tensors, which takes 12 bytes of host memory per parameter on every
# rank while a distributed optimizer is saved. The other format, by a rank's buffers (dp_reshardable), loses torch's
# Adam's step count in megatron-core 0.19.2.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# What decides which tensors there are and what shape they have, and what they mean.
_ARCHITECTURE_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "position_embedding_type",
    "rotary_percentage",
    "rotary_base",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "bias",
    "qkv_bias",
    "share_embeddings_and_output_weights",
)
_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples seen."""


@dataclass(kw_only=True, slots=True)
class Trainable:
    """What a checkpoint holds and a run trains."""

    model: Model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def _described(model: ModelConfig, keys: Sequence[str]) -> dict[str, str]:
    """Keys and values as the user writes them; plain text, so that a checkpoint needs none of our classes."""
    return {f"model.{key}": written(getattr(model, key)) for key in keys}


def _architecture(model: ModelConfig, transformer_config: TransformerConfig) -> dict[str, str]:
    keys = list(_ARCHITECTURE_KEYS)
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        keys.append("max_position_embeddings")
    return _described(model, keys) | {
        "model.ffn_hidden_size": str(ffn_hidden_size(model)),
        "model.num_query_groups": str(num_query_groups(model)),
        "model.kv_channels": str(kv_channels(model)),
        "padded vocabulary": str(padded_vocab_size(model)),
        "model.optim.name": model.optim.name.name,
        # Layers of the other kind have other tensors beside their weights, and masters exist in BF16 only.
        "layers": transformer_config.transformer_impl,
        "parameters": str(transformer_config.params_dtype).removeprefix("torch."),
    }


def _layout(model: ModelConfig) -> dict[str, str]:
    return _described(model, _LAYOUT_KEYS) | {
        "model.use_distributed_optimizer": written(uses_distributed_optimizer(model)),
        "processes": str(torch.distributed.get_world_size()),
    }


def _listed(what: str, keys: set[str]) -> str:
    shown = ", ".join(sorted(keys)[:5])
    return f"{what} {len(keys)} tensors more ({shown}{', …' if len(keys) > 5 else ''}); " if keys else ""


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _model_keys(num_chunks: int) -> list[str]:
    """megatron-core's names: the optimizer looks its parameters' chunks up under them."""
    return ["model"] if num_chunks == 1 else [f"model{index}" for index in range(num_chunks)]


def _sharded_state(trainable: Trainable, *, is_loading: bool) -> dict[str, Any]:
    chunks = trainable.model.gpt_chunks
    state = {
        key: chunk.sharded_state_dict(metadata=dict(_METADATA))
        for key, chunk in zip(_model_keys(len(chunks)), chunks, strict=True)
    }
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state["optimizer"] = trainable.optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=dict(_METADATA)
    )
    state["random_states"] = ShardedObject("random_states", _random_states(), (world_size,), (rank,), replica_id=0)
    return state


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
    path = directory / f"step_{progress.step:08d}"
    unfinished = directory / f".{path.name}.unfinished"
    writer = torch.distributed.get_rank() == 0
    if writer:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    state = _sharded_state(trainable, is_loading=False)
    state["scheduler"] = trainable.scheduler.state_dict()
    state["progress"] = asdict(progress)
    state["architecture"] = _architecture(model, trainable.model.transformer_config)
    state["layout"] = _layout(model)
    state["fp8"] = describe_fp8_state(model)
    dist_checkpointing.save(state, str(unfinished), content_metadata=dict(_METADATA))
    torch.distributed.barrier()
    if writer:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
        pointer = directory / f".{_POINTER}.unfinished"
        pointer.write_text(path.name + "\n", encoding="utf-8")
        os.replace(pointer, directory / _POINTER)
    torch.distributed.barrier()
    return path


def complete_checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint of a run, oldest first, whether `latest` names it or not."""
    steps = {path: path.name.removeprefix("step_") for path in directory.glob("step_*")}
    complete = [
        path
        for path, step in steps.items()
        if step.isdecimal() and dist_checkpointing.check_is_distributed_checkpoint(str(path))
    ]
    return sorted(complete, key=lambda path: int(steps[path]))


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, if it is there."""
    name = _latest_name(directory)
    return directory / name if name and (directory / name).is_dir() else None


def _latest_name(directory: Path) -> str:
    pointer = directory / _POINTER
    return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""


def find_newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; None where no checkpoint was ever completed.

    Raises:
        UserError: The pointer names a checkpoint that is not there, or is missing where there are checkpoints.
    """
    newest = latest_checkpoint(directory)
    if newest is not None:
        return newest
    pointer, name, complete = directory / _POINTER, _latest_name(directory), complete_checkpoints(directory)
    if name:
        raise UserError(
            f"{pointer} names {name}, which is not in {directory}; write the name of one that is into it, "
            "or start anew with checkpoint.resume=never and another run_dir"
        )
    if complete:
        # Which of them is meant is not for us to guess: the newest may be what somebody wanted to go back behind.
        raise UserError(
            f"{directory} holds {len(complete)} complete checkpoint(s), and {pointer} does not name one of them; the "
            f"newest is {complete[-1].name}: write its name into that file, or use "
            f"checkpoint.resume={complete[-1]}; to start anew, give another run_dir"
        )
    return None


def load_checkpoint(path: Path, trainable: Trainable, model: ModelConfig, *, reset_fp8_state: bool = False) -> Progress:
    """Restores a checkpoint into freshly built objects; every rank calls it.

    Args:
        path: A checkpoint's directory.
        trainable: What to restore into.
        model: Gives the parallel layout and the FP8 recipe, which must be the checkpoint's.
        reset_fp8_state: Leave scales and amax histories at their start.

    Returns:
        How far the saved run was.

    Raises:
        UserError: The directory is no checkpoint, or was saved by another parallel layout, model or FP8 recipe.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise UserError(f"{path} is not a checkpoint of this application (no metadata.json in it)")
    common = dist_checkpointing.load_common_state_dict(str(path))
    if "architecture" not in common:
        raise UserError(f"{path} is a megatron-core checkpoint, but not one of this application")
    different = differences(_architecture(model, trainable.model.transformer_config), common["architecture"])
    if different:
        raise UserError(
            f"{path} holds another model: {different}; resume with the saved values, or give another run_dir"
        )
    different = differences(_layout(model), common["layout"])
    if different:
        raise UserError(f"{path} was saved by another parallel layout: {different}; resume with the saved one")
    restores_fp8 = keeps_fp8_state(path, describe_fp8_state(model), common.get("fp8", {}), reset=reset_fp8_state)
    prepare_for_loading(trainable.optimizer)
    # megatron-core's "missing" are keys of the checkpoint that were not asked for, "unexpected" those it does not have.
    wanted = _sharded_state(trainable, is_loading=True)
    keys = _model_keys(len(trainable.model.gpt_chunks))
    not_restored = {key: [] if restores_fp8 else take_extra_states(wanted[key]) for key in keys}
    state, not_asked_for, not_there = dist_checkpointing.load(wanted, str(path), strict=StrictHandling.RETURN_ALL)
    if not restores_fp8:
        not_asked_for = {key for key in not_asked_for if EXTRA_STATE not in key}
    # Each rank knows only of the keys that it asked for itself.
    found: list[tuple[set[str], set[str]]] = [(set(), set())] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (set(not_asked_for), set(not_there)))
    surplus, lacking = (set[str]().union(*sets) for sets in zip(*found, strict=True))
    if surplus or lacking:
        raise UserError(f"{path} holds another model: {_listed('it has', surplus)}{_listed('this model has', lacking)}")
    for key, chunk in zip(keys, trainable.model.gpt_chunks, strict=True):
        chunk.load_state_dict(state[key] | dict.fromkeys(not_restored[key]))
    load_optimizer_state(trainable.optimizer, state["optimizer"])
    cast_masters_to_fp8_weights(trainable.optimizer, trainable.model)
    trainable.scheduler.load_state_dict(common["scheduler"])
    _restore_random_states(state["random_states"])
    return Progress(**common["progress"])
