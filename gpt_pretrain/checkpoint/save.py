"""Saves checkpoints beside the training loop, which stalls only while its state is copied.

    save()  plan who writes what → space on the disk? → copy to host memory ┬→ the loop goes on; poll() at each step
                                                                           └→ a thread writes, hashes, syncs, renames

megatron-core and torch plan which parts a rank holds, and which of the ranks with the same part writes it
(`FullyParallelSaveStrategyWrapper`: each about the same number of bytes). Their writers are not used: megatron-core's
starts a process that imports the program again, hands the bytes to a forked child, and reports that child's death only
at the next save. Here a thread writes: writing, hashing and waiting for the disk release Python's lock, nothing forks
beside CUDA, and the next step knows what went wrong.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from gpt_pretrain.checkpoint.directory import (
    KEEP_ALL,
    Destination,
    Place,
    Retention,
    checkpoint_path,
    latest_checkpoint,
    time_after,
)
from gpt_pretrain.checkpoint.manifest import Manifest, TrainingProgress, installed_versions
from gpt_pretrain.checkpoint.state import (
    COMMON_STATE,
    FP8_DIGESTS,
    METADATA,
    OWN_PARTS,
    architecture,
    chunks_by_name,
    describe_fp8_state,
    layout,
    sharded_state,
)
from gpt_pretrain.checkpoint.writing import HostBuffer, Item, SaveProblem, Share, write_checkpoint
from gpt_pretrain.config.derived import shards_weights
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config
from gpt_pretrain.fp8.delayed import join_present_amaxes, state_digests
from gpt_pretrain.fp8.own_layers import live_layers
from gpt_pretrain.megatron.own_parts import take_own_parts
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.megatron.trainable import Trainable

# Why a run should not write to its directory, or None.
type PlaceProblem = Callable[[], str | None]


class _Planned(FileSystemWriter):
    """Keeps the plan instead of writing it."""

    can_run_decentralized_global_plan = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.items = [Item(write, planner.resolve_data(write)) for write in plan.items]


class _Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's save up to the point where it would write."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = _Planned(checkpoint_dir)
        (_, metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key),
            writer,
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )
        self.share = Share(writer.items, metadata)


def _plan_share(trainable: Trainable, path: Path) -> Share:
    """What this rank writes of a checkpoint at a path; every rank calls it. The tensors are the run's own."""
    spec = trainable.model.spec
    keeps_history = spec.fp8 is not None and spec.fp8.recipe.keeps_history
    if keeps_history:
        join_present_amaxes(trainable.model.gpt_chunks)
    state = sharded_state(trainable, is_loading=False)
    if shards_weights(spec.model):
        chunks = {name: state[name] for name in chunks_by_name(trainable.model)}
        state[OWN_PARTS] = take_own_parts(trainable.model, chunks, is_loading=False).boxes
    # Values that are not sharded are the common state, where megatron-core's reader looks for its choice of formats.
    state |= {"scheduler": trainable.scheduler.state_dict(), "content_metadata": dict(METADATA)}
    if keeps_history:
        names = {linear.module for linear in live_layers(trainable.model)}
        state[FP8_DIGESTS] = state_digests(trainable.model.gpt_chunks, names)
    sharded, common = save_preprocess(state)
    sharded[COMMON_STATE] = ShardedObject(
        COMMON_STATE, common, global_shape=(1,), global_offset=(0,), replica_id=torch.distributed.get_rank()
    )
    strategy = _Strategy()
    # Ranks with the same tensors differ only in their samples and their part of the sequence.
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(strategy, replicas).save(sharded, path)
    return strategy.share


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOutcome:
    """The result of a save, the same on all ranks except for the times."""

    step: int
    path: Path
    problem: str | None
    """Why it failed, and which checkpoint is the newest; None if it is complete."""
    num_bytes: int
    """Of all files; 0 with a problem."""
    stall_s: float
    """Seconds for which the training loop waited."""
    time_s: float
    """Seconds until the checkpoint was on the disk, or had failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """A save that is being written."""

    progress: TrainingProgress
    began: float
    stall_s: float
    written: futures.Future[tuple[int, float]]
    """Bytes, and when it ended."""


class CheckpointSaver:
    """Saves a run's checkpoints, one at a time; a context manager that waits for the last one. Every rank has one.

    `data` has the fingerprints of tokenizer and tokens (`data.corpus.Corpus.fingerprints`), `extensions` the digests of
    the run's own code. Rank 0 asks `place_problem` before each save.
    """

    def __init__(
        self,
        directory: Path,
        trainable: Trainable,
        config: Config,
        data: Mapping[str, str],
        *,
        extensions: Mapping[str, str] | None = None,
        place_problem: PlaceProblem = lambda: None,
    ) -> None:
        self.directory = directory
        self._place_problem = place_problem
        self._place = Place.of(directory)
        self._trainable = trainable
        self._config = config.checkpoint
        self._retention = Retention(
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            keep_best=config.checkpoint.keep_best,
        )
        # A checkpoint by the clock only guards against a crash before the next one. The disk need not hold them all,
        # and they must not displace those of `save_interval`, which a rewind may need.
        self._has_stopgaps = config.checkpoint.keep_last is None or config.checkpoint.save_interval is not None
        num_ranks = torch.distributed.get_world_size()
        self._described: dict[str, Any] = {
            "versions": installed_versions(),
            "config": config_to_dict(config),
            "data": dict(data),
            "extensions": None if extensions is None else dict(extensions),
            "architecture": architecture(config.model, trainable.model.transformer_config),
            "layout": layout(config.model, num_ranks),
            "fp8": describe_fp8_state(trainable.model.spec.fp8),
        }
        self._buffer = HostBuffer()
        self._running: _Running | None = None
        self._waited_s = 0.0
        # Two threads must not share a group: one is the writers', over the other the loop asks whether they are done.
        self._writers = torch.distributed.new_group(backend="gloo") if num_ranks > 1 else None
        self._loop = torch.distributed.new_group(backend="gloo") if num_ranks > 1 else None
        self._is_done = torch.zeros(1, dtype=torch.int32)
        self._asked: torch.distributed.Work | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error of this rank alone the others may not get here, but their writers answer this one's.
        if self._running is not None:
            futures.wait([self._running.written])
        self._buffer.release()

    def reserve(self) -> None:
        """Takes the host memory that saves copy into; every rank calls it inside `Model.newest_parameters`."""
        self._buffer.reserve(_plan_share(self._trainable, checkpoint_path(self.directory, 0)))

    def save(self, progress: TrainingProgress, *, by_clock: bool = False) -> list[SaveOutcome]:
        """Begins to save; every rank calls it inside `Model.newest_parameters`.

        The caller has waited for the save before. `by_clock`: only `checkpoint.save_interval_minutes` asks for one.
        The outcome is returned if the save has ended: it was refused, or `checkpoint.async_save` is off.
        """
        assert self._running is None, "one save at a time"
        began = time.monotonic() - self._waited_s
        self._waited_s = 0.0
        is_stopgap = by_clock and self._has_stopgaps
        retention = KEEP_ALL if is_stopgap else self._retention
        destination = Destination(directory=self.directory, step=progress.step, retention=retention)
        gives_way = is_stopgap and not self._retention.keeps_forever(destination.path)
        share = _plan_share(self._trainable, destination.path)
        problem = self._begin(destination, share)
        written: futures.Future[tuple[int, float]] = futures.Future()
        if problem is None:
            arguments = destination, progress, gives_way, self._staged(share), written
            # A daemon: if another rank is lost, this process must not wait for the writers' exchange when it ends.
            threading.Thread(target=self._write, args=arguments, name="checkpoint writer", daemon=True).start()
        else:
            written.set_exception(SaveProblem(problem))
        goes_on = problem is None and self._config.async_save
        if not goes_on:
            futures.wait([written])
        stall_s = time.monotonic() - began
        self._running = _Running(progress=progress, began=began, stall_s=stall_s, written=written)
        return [] if goes_on else self.wait()

    def poll(self) -> list[SaveOutcome]:
        """The outcome of a save that has ended on all ranks, at the same step; every rank calls it once a step."""
        if self._running is None:
            return []
        if self._loop is None:
            return self.wait() if self._running.written.done() else []
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            if int(self._is_done):
                return self.wait()
        # The answer is read a step later.
        self._is_done.fill_(self._running.written.done())
        self._asked = torch.distributed.all_reduce(
            self._is_done, op=torch.distributed.ReduceOp.MIN, group=self._loop, async_op=True
        )
        return []

    def wait(self) -> list[SaveOutcome]:
        """Waits for the save in progress, if any; every rank calls it."""
        running, self._running = self._running, None
        if running is None:
            return []
        began = time.monotonic()
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
        problem, num_bytes = None, 0
        try:
            num_bytes, ended = running.written.result()
            self._place = replace(self._place, newest=checkpoint_path(self.directory, running.progress.step))
        except Exception as error:  # whatever the writer died of
            ended = time.monotonic()
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, SaveProblem):
                # All ranks have met it. A directory that was moved meanwhile says more than a file that is missing.
                why = on_rank_zero(self._place_problem) or str(error)
            newest = latest_checkpoint(self.directory)
            none = "there is none yet" if self.directory.parent.is_dir() else f"{self.directory.parent} is gone"
            stands = none if newest is None else f"the newest complete one is {newest}"
            problem = f"the checkpoint of step {running.progress.step} could not be saved: {why}; {stands}"
        # This wait counts towards the stall of the next save.
        self._waited_s = time.monotonic() - began
        return [
            SaveOutcome(
                step=running.progress.step,
                path=checkpoint_path(self.directory, running.progress.step),
                problem=problem,
                num_bytes=num_bytes,
                stall_s=running.stall_s,
                time_s=ended - running.began,
            )
        ]

    def _begin(self, destination: Destination, share: Share) -> str | None:
        """Makes the directory to write into; returns why that is impossible, the same on all ranks."""
        num_bytes = torch.tensor([share.num_bytes], device=torch.cuda.current_device())
        torch.distributed.all_reduce(num_bytes)
        needed = int(num_bytes)

        def begin() -> str | None:
            try:
                problem = self._place_problem() or self._place.problem()
                if problem is not None:
                    return problem
                destination.clear()
                self._place = Place.of(self.directory)
                free = shutil.disk_usage(self.directory).free
                if free < needed:
                    return (
                        f"{self.directory} has {free:,} bytes free, and the checkpoint needs {needed:,}; make room, or "
                        "keep fewer checkpoints (checkpoint.keep_last)"
                    )
                destination.unfinished.mkdir()
            except OSError as error:
                return f"{error.filename or self.directory}: {error.strerror or error}"
            return None

        return on_rank_zero(begin)

    def _staged(self, share: Share) -> Share | str:
        """The share in host memory, or why it does not fit, which this rank's writer tells the other ranks."""
        try:
            return self._buffer.copy(share)
        except MemoryError as error:
            return f"rank {torch.distributed.get_rank()} has no {share.num_bytes:,} bytes of host memory: {error}"

    def _write(
        self,
        destination: Destination,
        progress: TrainingProgress,
        gives_way: bool,
        share: Share | str,
        written: futures.Future[tuple[int, float]],
    ) -> None:
        """Runs in the thread."""
        try:
            now = time_after(destination.directory, progress.given_up)
            manifest = Manifest(time_unix=now, files={}, gives_way=gives_way, **asdict(progress), **self._described)
            num_bytes = write_checkpoint(destination, share, manifest, self._writers)
        except BaseException as error:  # `wait` raises it again, in the loop's thread
            written.set_exception(error)
        else:
            written.set_result((num_bytes, time.monotonic()))
