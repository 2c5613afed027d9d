"""Where a run starts from (its newest checkpoint, one that it was given, the weights of another run), and restoring it.

Nothing is loaded from a checkpoint whose files are not, byte for byte, what was written. The checkpoint may come from
any layout of processes.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

from gpt_pretrain.checkpoint.data_changes import compare_data, compare_tokenizers
from gpt_pretrain.checkpoint.directory import (
    POINTER,
    FoundCheckpoints,
    complete_checkpoints,
    earlier_checkpoints,
    find_checkpoints,
    name_in,
    progress_since,
    step_of,
    time_after,
)
from gpt_pretrain.checkpoint.manifest import Manifest, TrainingProgress, check_files, read_manifest
from gpt_pretrain.checkpoint.state import (
    COMMON_STATE,
    EXTRA_STATE,
    FP8_DIGESTS,
    OPTIMIZER,
    OWN_PARTS,
    RANDOM_STATES,
    architecture,
    chunks_by_name,
    differences,
    keeps_fp8_state,
    layout,
    places_of_ranks,
    restore_random_states,
    sharded_model,
    sharded_state,
    take_extra_states,
)
from gpt_pretrain.config.derived import shards_weights
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schedule import rates_in_tokens
from gpt_pretrain.config.schema import CheckpointConfig, Config
from gpt_pretrain.megatron.optimizer_state import (
    is_average,
    is_moment,
    load_optimizer_state,
    make_masters_from_weights,
    share_weights_of_masters,
)
from gpt_pretrain.megatron.own_parts import take_own_parts
from gpt_pretrain.megatron.parallel import on_rank_zero, seed_dropout
from gpt_pretrain.megatron.pickles import harmless_state, restricted
from gpt_pretrain.megatron.stored_weights import StoredWeight
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.megatron.weight_average import drop_average, start_average

_PROBLEMS_SHOWN = 5
_KEYS_SHOWN = 20
# Parts of an architecture that decide the optimizer's tensors and the types of values, but not which weights exist.
_NOT_OF_WEIGHTS = (OPTIMIZER, "layers", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files match its manifest (`verify_checkpoint`)."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run starts from."""

    checkpoint: VerifiedCheckpoint
    weights_only: bool
    """Whether only its weights are taken (`checkpoint.init_from`); otherwise the run continues where it was saved."""
    warnings: Sequence[str] = ()
    """What went wrong in choosing it, for the user."""
    notes: Sequence[str] = ()
    """What else the user should know of the choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The result of loading a checkpoint."""

    progress: TrainingProgress
    """How far the saved run was; a run's start if only the weights were taken."""
    notes: Sequence[str]
    """Differences from the saved run, for the user."""
    fp8_digests: Mapping[str, str] | None = None
    """Digests of the FP8 state that was restored, by layer; None if none was, or the checkpoint is older than these."""


def verify_checkpoint(path: Path) -> VerifiedCheckpoint:
    """Reads every byte of a checkpoint, each rank its share; every rank calls it.

    Raises:
        UserError: It is not a checkpoint, or files are missing, truncated or changed; the same on all ranks.
    """
    manifest = on_rank_zero(lambda: read_manifest(path))
    world_size = torch.distributed.get_world_size()
    found: list[list[str]] = [[]] * world_size
    own = check_files(path, manifest, rank=torch.distributed.get_rank(), num_ranks=world_size)
    torch.distributed.all_gather_object(found, own)
    problems = [problem for of_rank in found for problem in of_rank]
    if problems:
        more = f"; {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
        raise UserError("; ".join(problems[:_PROBLEMS_SHOWN]) + more)
    return VerifiedCheckpoint(path=path, manifest=manifest)


def choose_start(config: CheckpointConfig, directory: Path) -> Start | None:
    """Finds and verifies what a run starts from, None for fresh weights; every rank calls it.

    A start from an earlier checkpoint gives up the later ones of the run's directory. The start's manifest says so in
    memory, and the manifests that the run will save on the disk.

    Raises:
        UserError: The checkpoint is missing or damaged and none may take its place, or `resume=never` would overwrite
            a run.
    """
    start = _find_start(config, directory)
    return start if start is None or start.weights_only else _give_up_others(start, directory)


def _find_start(config: CheckpointConfig, directory: Path) -> Start | None:
    if config.resume not in ("auto", "never"):
        return _resume_from_path(config, directory)
    found = on_rank_zero(lambda: find_checkpoints(directory))
    if config.resume == "never" and found.paths:
        raise UserError(
            f"checkpoint.resume=never, but run_dir={directory.parent} holds the checkpoints of a run; "
            "give another run_dir, or checkpoint.resume=auto to continue it"
        )
    if not found.paths:
        if config.init_from is None:
            return None
        return Start(checkpoint=verify_checkpoint(Path(config.init_from).absolute()), weights_only=True)
    start = _resume_from_own(config, found)
    if config.init_from is not None:
        # A requeued run starts with the same command.
        note = f"checkpoint.init_from={config.init_from} is ignored: this run has checkpoints of its own"
        start = replace(start, notes=[note])
    return start


def _resume_from_own(config: CheckpointConfig, found: FoundCheckpoints) -> Start:
    """From the newest checkpoint of the run's own directory."""
    # If nothing says which one is meant, the newest good one is the best answer.
    fall_back = config.fall_back or found.problem is not None
    start = resume_from(found.paths, fall_back=fall_back, afresh=_afresh(config))
    if found.problem is None:
        return start
    warning = f"{found.problem}; continuing from {start.checkpoint.path.name}, the newest one that verifies"
    return replace(start, warnings=[warning, *start.warnings])


def _resume_from_path(config: CheckpointConfig, directory: Path) -> Start:
    """From the checkpoint that `checkpoint.resume` names, unless the run has gone on from it before.

    A job that is requeued names it again, and must not lose what it has done since.
    """
    named = Path(config.resume).absolute()
    name = name_in(directory, named)
    since = on_rank_zero(lambda: progress_since(directory, named))
    if since is not None:
        start = _resume_from_own(config, since)
        again = "give another run_dir" if name == str(named) else f"write {name} into {directory / POINTER}"
        note = (
            f"checkpoint.resume={config.resume} is ignored: this run has gone on from there; to go back again, {again}"
        )
        return replace(start, notes=[note])
    candidates = [named, *on_rank_zero(lambda: earlier_checkpoints(named))]
    start = resume_from(candidates, fall_back=config.fall_back, afresh=_afresh(config))
    manifest = start.checkpoint.manifest
    manifest = replace(manifest, resumed_from=(*manifest.resumed_from, name))
    return replace(start, checkpoint=replace(start.checkpoint, manifest=manifest))


def _give_up_others(start: Start, directory: Path) -> Start:
    path, manifest = start.checkpoint.path, start.checkpoint.manifest
    # A run that starts from another run's checkpoint has no past in its own directory.
    first = manifest.step + 1 if path.parent.resolve() == directory.resolve() else 0

    def time_if_any() -> float | None:
        any_later = any(step_of(other) >= first for other in complete_checkpoints(directory))
        return time_after(directory, manifest.given_up) if any_later else None

    now = on_rank_zero(time_if_any)
    if now is None:
        return start
    before = [(step, saved) for step, saved in manifest.given_up if step < first]
    manifest = replace(manifest, given_up=(*before, (first, now)))
    return replace(start, checkpoint=replace(start.checkpoint, manifest=manifest))


def _afresh(config: CheckpointConfig) -> str:
    """What begins a run anew."""
    return "another run_dir" + ("" if config.resume in ("auto", "never") else " and checkpoint.resume=auto")


def resume_from(candidates: Sequence[Path], *, fall_back: bool, afresh: str = "another run_dir") -> Start:
    """Verifies the first candidate, or with `fall_back` finds the first one that verifies; every rank calls it.

    `afresh` is what an error message offers to begin anew.
    """
    passed_over: list[str] = []
    for path in candidates:
        try:
            checkpoint = verify_checkpoint(path)
        except UserError as error:
            if not fall_back:
                raise UserError(f"{error}. {_way_out(candidates, afresh)}") from None
            passed_over.append(f"{path} was skipped: {error}")
        else:
            return Start(checkpoint=checkpoint, weights_only=False, warnings=passed_over)
    raise UserError(f"no checkpoint verifies. {'. '.join(passed_over[:_PROBLEMS_SHOWN])}. {_way_out((), afresh)}")


def _way_out(candidates: Sequence[Path], afresh: str) -> str:
    if len(candidates) < 2:
        return f"Put the files back from a copy, or start afresh with {afresh}"
    return (
        "Put the files back from a copy, continue from the newest earlier checkpoint that verifies with "
        f"checkpoint.fall_back=true, or start afresh with {afresh}"
    )


def load_checkpoint(
    checkpoint: VerifiedCheckpoint, trainable: Trainable, config: Config, data: Mapping[str, str]
) -> Restored:
    """Restores all of a checkpoint, so that the run continues where it was saved; every rank calls it.

    Random states belong to a place in the layout: in another layout they are reseeded, from the run's seed and the
    step. `data` has `data.corpus.Corpus.fingerprints`.

    Raises:
        UserError: The checkpoint is of another model; of another optimizer, unless
            `checkpoint.allow_optimizer_change`; of another FP8 recipe with state, unless `checkpoint.reset_fp8_state`;
            or of other data, unless `checkpoint.allow_data_change`.
    """
    path, manifest, model = checkpoint.path, checkpoint.manifest, config.model
    notes = compare_data(path, data, manifest.data, allowed=config.checkpoint.allow_data_change)
    current = architecture(model, trainable.model.transformer_config)
    saved_optimizer = manifest.architecture.get(OPTIMIZER, "")
    changes_optimizer = current[OPTIMIZER] != saved_optimizer
    if changes_optimizer and config.checkpoint.allow_optimizer_change:
        change = differences({OPTIMIZER: current.pop(OPTIMIZER)}, manifest.architecture)
        notes.append(f"{change}: masters, schedule and step go on, and the optimizer's moments start at zero")
    if different := differences(current, manifest.architecture):
        way = "resume with the saved values"
        if changes_optimizer and not differences({**current, OPTIMIZER: saved_optimizer}, manifest.architecture):
            way += ", drop the optimizer's moments with checkpoint.allow_optimizer_change=true"
        raise UserError(f"{path} holds another model: {different}; {way}, or give {_afresh(config.checkpoint)}")
    restores_fp8 = keeps_fp8_state(
        path,
        trainable.model.spec.fp8,
        manifest.fp8,
        reset=config.checkpoint.reset_fp8_state,
        was_reset=manifest.has_reset_fp8_state,
    )
    places = places_of_ranks(layout(model, torch.distributed.get_world_size()))
    restores_random_states = places == places_of_ranks(manifest.layout)
    averages, had_average = model.optim.ema_decay is not None, _has_average(manifest)
    starts_average = averages and (changes_optimizer or not had_average)
    if starts_average:
        drop_average(trainable.optimizer)
        asked = f"model.optim.ema_decay={model.optim.ema_decay:g}"
        notes.append(f"{asked}: the average starts with the weights of {path.name}")
    elif had_average and not averages:
        notes.append(f"model.optim.ema_decay=null: the run goes on without the averaged weights of {path.name}")
    wanted = sharded_state(trainable, is_loading=True, masters_alone=changes_optimizer)
    if not restores_random_states:
        del wanted[RANDOM_STATES]
        notes.append(
            f"resharded: {differences(places, manifest.layout)}; random states are reseeded from "
            "model.seed and the step"
        )

    def left_out(key: str) -> bool:
        return (
            (key == RANDOM_STATES and not restores_random_states)
            or (EXTRA_STATE in key and not restores_fp8)
            or (is_moment(key) and changes_optimizer)
            or (is_average(key) and not averages)
        )

    progress = manifest.progress_at(model.encoder_seq_length)
    trained = progress.trained(model.encoder_seq_length)
    place = trained.tokens if rates_in_tokens(config) else trained.steps
    with restricted(path):
        state = _load(path, trainable, wanted, left_out)
        load_optimizer_state(trainable.optimizer, state["optimizer"] | ({"step": 0} if changes_optimizer else {}))
        share_weights_of_masters(trainable.optimizer, trainable.model)
        if starts_average:
            start_average(trainable.optimizer)
        # megatron-core adds the checkpoint's steps to those taken.
        trainable.scheduler.num_steps = 0
        # The configuration says whether rates follow steps or tokens; checkpoints hold what their runs followed.
        trainable.scheduler.load_state_dict(state["scheduler"] | {"num_steps": place})
        if restores_random_states:
            restore_random_states(state[RANDOM_STATES])
        else:
            _seed_anew(model.seed, manifest.step)
    digests = state.get(FP8_DIGESTS) if restores_fp8 else None
    if progress.earlier_lengths != manifest.earlier_lengths:
        notes.append(
            f"model.encoder_seq_length={model.encoder_seq_length} (saved with {manifest.sequence_length}): the samples "
            f"are cut anew, and the run goes on with sample {progress.consumed_samples:,} of the new ones; some "
            "documents of this epoch are read again, or not at all"
        )
    return Restored(progress=progress, notes=notes, fp8_digests=digests)


def load_weights(
    checkpoint: VerifiedCheckpoint, trainable: Trainable, config: Config, data: Mapping[str, str]
) -> Restored:
    """Takes the weights of a checkpoint, of any layout and optimizer, for a new run; every rank calls it.

    Schedule, moments, FP8 scales and position in the data start anew; masters and FP8 weights follow the weights.

    Raises:
        UserError: The checkpoint is of another model or tokenizer.
    """
    path, manifest, model = checkpoint.path, checkpoint.manifest, config.model
    notes = compare_tokenizers(path, data, manifest.data, allowed=config.checkpoint.allow_data_change)
    current = architecture(model, trainable.model.transformer_config)
    of_weights = {key: value for key, value in current.items() if key not in _NOT_OF_WEIGHTS}
    if different := differences(of_weights, manifest.architecture):
        raise UserError(f"{path} holds another model: {different}; use the saved values, or another checkpoint")

    def left_out(key: str) -> bool:
        return key == RANDOM_STATES or key.startswith("optimizer.") or EXTRA_STATE in key

    with restricted(path):
        state = _load(path, trainable, sharded_model(trainable.model), left_out)
        weights = state.get(OWN_PARTS) or {name: state[name] for name in chunks_by_name(trainable.model)}
        make_masters_from_weights(trainable.optimizer, trainable.model, weights)
    if model.optim.ema_decay is not None:
        start_average(trainable.optimizer)
    return Restored(progress=TrainingProgress(step=0, consumed_samples=0), notes=notes)


def _has_average(manifest: Manifest) -> bool:
    """Whether the run that saved averaged its weights; runs of earlier versions did not."""
    return manifest.config.get("model", {}).get("optim", {}).get("ema_decay") is not None


def _load(path: Path, trainable: Trainable, wanted: dict[str, Any], left_out: Callable[[str], bool]) -> dict[str, Any]:
    """Reads `wanted` and gives the chunks their weights; `left_out` says which keys of a checkpoint are not read.

    Ranks that hold the same tensors each read a part and hand it to the others. Of sharded weights each reads its own;
    what it has read is returned as `OWN_PARTS`. The caller has `restricted` the path.
    """
    chunks = chunks_by_name(trainable.model)
    parts = None
    if shards_weights(trainable.model.spec.model):
        parts = take_own_parts(trainable.model, {name: wanted[name] for name in chunks}, is_loading=True)
        wanted[OWN_PARTS] = parts.boxes
    not_restored = {name: take_extra_states(wanted[name]) if left_out(EXTRA_STATE) else [] for name in chunks}
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), replicas)
    _check_keys(path, wanted, left_out)
    for entry in nested_values({name: wanted[name] for name in chunks}):
        # An FP8 weight read in parts, as a SwiGLU's gate and up are, could not be cast; the chunk casts it whole.
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, StoredWeight):
            entry.data = entry.data.dequantize()
    state: dict[str, Any] = dist_checkpointing.load(wanted, str(path), strategy)
    for name, chunk in chunks.items():
        # A reader leaves out what is empty.
        read = state.get(name, {})
        scales = {key: harmless_state(key, value) for key, value in read.items() if EXTRA_STATE in key}
        restored = read | scales | dict.fromkeys(not_restored[name])
        missing, _ = chunk.load_state_dict(restored, strict=parts is None)
        if others := set(missing) - {weight for weight, _ in chunk.named_parameters(remove_duplicate=False)}:
            raise KeyError(f"{', '.join(sorted(others))} was not loaded")
    if parts is not None:
        parts.read(state[OWN_PARTS])
        state[OWN_PARTS] = parts.values
        for wrapped in trainable.model.chunks:
            wrapped.start_param_sync(force_sync=True)
    return state


def _check_keys(path: Path, wanted: dict[str, Any], left_out: Callable[[str], bool]) -> None:
    """Compares what all ranks ask for with what the checkpoint has; megatron-core checks only after the load."""
    parts, _ = extract_sharded_base(load_preprocess(wanted)[0])
    found: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, {part.key for part in nested_values(parts)})
    asked_for = set[str]().union(*found)
    saved = {part.key for part in load_sharded_metadata(str(path)).values()}
    surplus, lacking = {key for key in saved - asked_for if not left_out(key)} - {COMMON_STATE}, asked_for - saved
    if surplus or lacking:
        raise UserError(f"{path} holds another model: {_listed('it has', surplus)}{_listed('this model has', lacking)}")


def _listed(what: str, keys: set[str]) -> str:
    shown = ", ".join(sorted(keys)[:_KEYS_SHOWN])
    return f"{what} {len(keys)} more tensors ({shown}{', …' if len(keys) > _KEYS_SHOWN else ''}); " if keys else ""


def _seed_anew(seed: int, step: int) -> None:
    """Seeds this rank's generators from seed and step, with other numbers than at the run's start."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    fresh = int.from_bytes(digest[:4], "little") >> 1
    random.seed(fresh)
    np.random.seed(fresh)
    torch.manual_seed(fresh)
    seed_dropout(fresh)
