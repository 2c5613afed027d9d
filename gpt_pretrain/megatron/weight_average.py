"""Weights averaged over steps (`model.optim.ema_decay`): an exponential moving average of the fp32 masters.

    average ← decay · average + (1 − decay) · master        after each step that updates

A rank averages its own part of the masters. The average is one more state of the optimizer, fp32 in the master's shape:
it is sharded, saved and resharded like a moment, and no step gathers it. It starts with the weights that the run starts
with, as NeMo's does. A validation lets it change places with the masters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.megatron.model import Model

AVERAGE = "ema"
"""Its name among an optimizer's states."""


@torch.no_grad()
def start_average(optimizer: MegatronOptimizer) -> None:
    """Lets the average be the masters; what it was is forgotten. The optimizer has its other states already."""
    for master, states in _masters(optimizer):
        states[AVERAGE] = master.detach().clone()


def drop_average(optimizer: MegatronOptimizer) -> None:
    """Leaves no average, so that none is asked of a checkpoint."""
    for _, states in _masters(optimizer):
        states.pop(AVERAGE, None)


@torch.no_grad()
def update_average(optimizer: MegatronOptimizer, decay: float, skipped: torch.Tensor) -> None:
    """Takes the masters into the average; `skipped`, bool []: the step changed nothing, and neither does this."""
    weight = (1 - decay) * (~skipped).float()
    for master, states in _masters(optimizer):
        states[AVERAGE].lerp_(master, weight)


@contextmanager
def averaged_weights(optimizer: MegatronOptimizer, model: Model) -> Iterator[None]:
    """Inside, the model computes with the average; every rank calls it inside `Model.newest_parameters`."""
    _change_places(optimizer, model)
    try:
        yield
    finally:
        _change_places(optimizer, model)


@torch.no_grad()
def _change_places(optimizer: MegatronOptimizer, model: Model) -> None:
    for master, states in _masters(optimizer):
        held = master.clone()
        master.copy_(states[AVERAGE])
        states[AVERAGE].copy_(held)
    for part in _parts(optimizer):
        # fp32 weights that are not sharded are the masters themselves.
        if isinstance(part, MixedPrecisionOptimizer):
            part._copy_main_params_to_model_params()
    if uses_distributed_optimizer(model.spec.model):
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    return (part for part in optimizer.chained_optimizers if part.optimizer is not None)


def _masters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """This rank's parts of the masters, each with its states."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                yield master, part.optimizer.state[master]
