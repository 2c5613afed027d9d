"""Restore a checkpoint, saved by any layout of processes, into the objects of a run."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy, load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from gpt_pretrain.checkpoint.start import VerifiedCheckpoint
from gpt_pretrain.checkpoint.state import (
    EXTRA_STATE,
    RANDOM_STATES,
    Progress,
    Trainable,
    architecture,
    architecture_differences,
    differences,
    keeps_fp8_state,
    layout,
    model_keys,
    places_of_ranks,
    restore_random_states,
    sharded_model,
    sharded_state,
    take_extra_states,
)
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.optimizer_state import (
    load_optimizer_state,
    make_masters_from_weights,
    share_weights_of_masters,
)
from gpt_pretrain.megatron.parallel import seed_dropout
from gpt_pretrain.megatron.pickles import harmless_state, restricted
from gpt_pretrain.megatron.stored_weights import StoredWeight

_KEYS_SHOWN = 20
# megatron-core's name for what is not a tensor.
_COMMON = "common_state"
# Parts of an architecture that decide the optimizer's tensors and the types of values, but not which weights exist.
_NOT_OF_WEIGHTS = ("model.optim.name", "layers", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The result of loading a checkpoint."""

    progress: Progress
    """How far the saved run was; a run's start where only the weights were taken."""
    notes: Sequence[str]
    """What differs from the saved run, for the user."""


def load_checkpoint(
    checkpoint: VerifiedCheckpoint, trainable: Trainable, config: Config, data: Mapping[str, str]
) -> Restored:
    """Restores all of a checkpoint, so that the run goes on where it was saved; every rank calls it.

    The checkpoint may come from any layout. Random states belong to a place in the layout: in another one they are
    seeded anew, from the run's seed and the step. `data` has `data.corpus.Corpus.fingerprints`.

    Raises:
        UserError: The checkpoint is of another model; of another FP8 recipe with state, unless
            `checkpoint.reset_fp8_state`; or of other data, unless `checkpoint.allow_data_change`.
    """
    path, manifest, model = checkpoint.path, checkpoint.manifest, config.model
    notes = _compare_data(path, data, manifest.data, allowed=config.checkpoint.allow_data_change)
    current = architecture(model, trainable.model.transformer_config)
    different = architecture_differences(current, manifest.architecture)
    if different:
        raise UserError(
            f"{path} holds another model: {different}; resume with the saved values, or give another run_dir"
        )
    restores_fp8 = keeps_fp8_state(
        path, trainable.model.spec.fp8, manifest.fp8, reset=config.checkpoint.reset_fp8_state
    )
    places = places_of_ranks(layout(model))
    restores_random_states = places == places_of_ranks(manifest.layout)
    if not restores_random_states:
        notes.append(
            f"resharded: {differences(places, manifest.layout)}; random states are seeded anew from "
            "model.seed and the step"
        )
    wanted = sharded_state(trainable, is_loading=True)
    if not restores_random_states:
        del wanted[RANDOM_STATES]

    def left_out(key: str) -> bool:
        return (key == RANDOM_STATES and not restores_random_states) or (EXTRA_STATE in key and not restores_fp8)

    with restricted(path):
        state = _load(path, trainable, wanted, left_out)
        load_optimizer_state(trainable.optimizer, state["optimizer"])
        share_weights_of_masters(trainable.optimizer, trainable.model)
        # megatron-core adds the steps of the checkpoint to those that were taken.
        trainable.scheduler.num_steps = 0
        trainable.scheduler.load_state_dict(state["scheduler"])
        if restores_random_states:
            restore_random_states(state[RANDOM_STATES])
        else:
            _seed_anew(model.seed, manifest.step)
    progress = Progress(
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        rewinds=manifest.rewinds,
        passed_over=tuple((first, number) for first, number in manifest.passed_over),
        losses=tuple(manifest.losses),
        spikes=tuple(manifest.spikes),
        given_up=tuple((int(step), time) for step, time in manifest.given_up),
    )
    return Restored(progress=progress, notes=notes)


def load_weights(
    checkpoint: VerifiedCheckpoint, trainable: Trainable, config: Config, data: Mapping[str, str]
) -> Restored:
    """Takes the weights of a checkpoint, of any layout and optimizer, for a run of its own; every rank calls it.

    Schedule, moments, FP8 scales and position in the data start anew; masters and FP8 weights are made of the weights.

    Raises:
        UserError: The checkpoint is of another model or, unless `checkpoint.allow_data_change`, of another tokenizer.
    """
    path, manifest, model = checkpoint.path, checkpoint.manifest, config.model
    saved = {name: value for name, value in manifest.data.items() if name == "tokenizer"}
    own = {name: data[name] for name in saved if name in data}
    notes = _compare_data(path, own, saved, allowed=config.checkpoint.allow_data_change)
    current = architecture(model, trainable.model.transformer_config)
    different = architecture_differences(
        {key: value for key, value in current.items() if key not in _NOT_OF_WEIGHTS}, manifest.architecture
    )
    if different:
        raise UserError(f"{path} holds another model: {different}; use the saved values, or another checkpoint")

    def left_out(key: str) -> bool:
        return key == RANDOM_STATES or key.startswith("optimizer.") or EXTRA_STATE in key

    with restricted(path):
        state = _load(path, trainable, sharded_model(trainable.model), left_out)
        weights = {key: state[key] for key in model_keys(len(trainable.model.gpt_chunks))}
        make_masters_from_weights(trainable.optimizer, trainable.model, weights)
    return Restored(progress=Progress(step=0, consumed_samples=0), notes=notes)


def _compare_data(path: Path, current: Mapping[str, str], saved: Mapping[str, str], *, allowed: bool) -> list[str]:
    """Notes on what has changed, if a change is allowed."""
    changed = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    if not changed:
        return []
    what = f"{path} was saved with other data: {', '.join(changed)} changed"
    if not allowed:
        raise UserError(
            f"{what}; give the run what the saved one had (model.data and model.tokenizer), or go on with the new data "
            "on purpose: checkpoint.allow_data_change=true"
        )
    return [f"{what}; going on with the new (checkpoint.allow_data_change=true)"]


def _load(path: Path, trainable: Trainable, wanted: dict[str, Any], left_out: Callable[[str], bool]) -> dict[str, Any]:
    """Reads `wanted` and gives the chunks their weights; `left_out` says which keys of a checkpoint are not read.

    Ranks that hold the same tensors each read a part and hand it to the others. The caller has `restricted` the path.
    """
    keys = model_keys(len(trainable.model.gpt_chunks))
    not_restored = {key: take_extra_states(wanted[key]) if left_out(EXTRA_STATE) else [] for key in keys}
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), replicas)
    _check_keys(path, wanted, left_out)
    for entry in nested_values({key: wanted[key] for key in keys}):
        # An FP8 weight read in parts, as a SwiGLU's gate and up are, could not be cast; the chunk casts it whole.
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, StoredWeight):
            entry.data = entry.data.dequantize()
    state: dict[str, Any] = dist_checkpointing.load(wanted, str(path), strategy)
    for key, chunk in zip(keys, trainable.model.gpt_chunks, strict=True):
        scales = {name: harmless_state(name, value) for name, value in state[key].items() if EXTRA_STATE in name}
        chunk.load_state_dict(state[key] | scales | dict.fromkeys(not_restored[key]))
    return state


def _check_keys(path: Path, wanted: dict[str, Any], left_out: Callable[[str], bool]) -> None:
    """Compares what all ranks ask for with what the checkpoint has; megatron-core checks only after the load."""
    parts, _ = extract_sharded_base(load_preprocess(wanted)[0])
    found: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, {part.key for part in nested_values(parts)})
    asked_for = set[str]().union(*found)
    saved = {part.key for part in load_sharded_metadata(str(path)).values()}
    surplus, lacking = {key for key in saved - asked_for if not left_out(key)} - {_COMMON}, asked_for - saved
    if surplus or lacking:
        raise UserError(f"{path} holds another model: {_listed('it has', surplus)}{_listed('this model has', lacking)}")


def _listed(what: str, keys: set[str]) -> str:
    shown = ", ".join(sorted(keys)[:_KEYS_SHOWN])
    return f"{what} {len(keys)} tensors more ({shown}{', …' if len(keys) > _KEYS_SHOWN else ''}); " if keys else ""


def _seed_anew(seed: int, step: int) -> None:
    """Seeds this rank's generators from seed and step, with other numbers than at the run's start."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    fresh = int.from_bytes(digest[:4], "little") >> 1
    random.seed(fresh)
    np.random.seed(fresh)
    torch.manual_seed(fresh)
    seed_dropout(fresh)
