"""Restore a checkpoint into freshly built objects."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from gpt_pretrain.checkpoint.description import architecture, layout
from gpt_pretrain.checkpoint.differences import differences
from gpt_pretrain.checkpoint.fp8_state import EXTRA_STATE, describe_fp8_state, keeps_fp8_state, take_extra_states
from gpt_pretrain.checkpoint.state import Progress, Trainable, model_keys, restore_random_states, sharded_state
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.optimizer import cast_masters_to_fp8_weights, load_optimizer_state, prepare_for_loading


def _listed(what: str, keys: set[str]) -> str:
    shown = ", ".join(sorted(keys)[:5])
    return f"{what} {len(keys)} tensors more ({shown}{', …' if len(keys) > 5 else ''}); " if keys else ""


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
    different = differences(architecture(model, trainable.model.transformer_config), common["architecture"])
    if different:
        raise UserError(
            f"{path} holds another model: {different}; resume with the saved values, or give another run_dir"
        )
    different = differences(layout(model), common["layout"])
    if different:
        raise UserError(f"{path} was saved by another parallel layout: {different}; resume with the saved one")
    restores_fp8 = keeps_fp8_state(path, describe_fp8_state(model), common.get("fp8", {}), reset=reset_fp8_state)
    prepare_for_loading(trainable.optimizer)
    # megatron-core's "missing" are keys of the checkpoint that were not asked for, "unexpected" those it does not have.
    wanted = sharded_state(trainable, is_loading=True)
    keys = model_keys(len(trainable.model.gpt_chunks))
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
    restore_random_states(state["random_states"])
    return Progress(**common["progress"])
