"""What a checkpoint holds of a run, as megatron-core's sharded state: each rank names its parts of the whole."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import convert_cuda_rng_state

from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.optimizer_state import sharded_optimizer_state

# What a checkpoint tells megatron-core's readers: optimizer states lie where the model's tensors do.
METADATA: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

RANDOM_STATES = "random_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples behind the run in the data: those it was trained on, and those that it passed over."""
    rewinds: int = 0
    """Times that the run went back behind a loss spike (`trainer.max_spike_rewinds`)."""
    passed_over: tuple[tuple[int, int], ...] = ()
    """Samples that nothing was trained on, given up in rewinds: the first and the number of each range."""
    losses: tuple[float, ...] = ()
    """The last losses, which tell what a spike is (`training.guards`)."""
    spikes: tuple[int, ...] = ()
    """Steps with a spike that were trained on all the same."""
    given_up: tuple[tuple[int, float], ...] = ()
    """Which checkpoints beside the run's are none of its past (`checkpoint.directory.is_given_up`)."""


@dataclass(kw_only=True, slots=True)
class Trainable:
    """What a checkpoint holds and a run trains."""

    model: Model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def random_states() -> dict[str, Any]:
    """This rank's generators: what `restore_random_states` takes."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        # With CUDA graphs they are generators: written down like the others, a run may go on without graphs.
        "tracker": {name: convert_cuda_rng_state(state) for name, state in tracked.items()},
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets this rank's generators to where they were saved."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, state in states["tracker"].items():
        if isinstance(present[name], torch.Generator):
            # In place: graphs that have been recorded draw from this one.
            present[name].set_state(state)
        else:
            present[name] = state
    tracker.set_states(present)


def model_keys(num_chunks: int) -> list[str]:
    """megatron-core's names: the optimizer looks its parameters' chunks up under them."""
    return ["model"] if num_chunks == 1 else [f"model{index}" for index in range(num_chunks)]


def sharded_model(model: Model) -> dict[str, Any]:
    """This rank's parts of the model, by chunk (`model_keys`)."""
    return {
        key: chunk.sharded_state_dict(metadata=dict(METADATA))
        for key, chunk in zip(model_keys(len(model.gpt_chunks)), model.gpt_chunks, strict=True)
    }


def sharded_state(trainable: Trainable, *, is_loading: bool) -> dict[str, Any]:
    """This rank's parts of model, optimizer and random states, to be written from or read into."""
    state = sharded_model(trainable.model)
    state["optimizer"] = sharded_optimizer_state(trainable.optimizer, state, metadata=METADATA, is_loading=is_loading)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state[RANDOM_STATES] = ShardedObject(RANDOM_STATES, random_states(), (world_size,), (rank,), replica_id=0)
    return state
