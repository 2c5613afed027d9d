"""Which tensor of megatron-core's optimizers a parameter is updated through: its master, or this rank's part of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def masters_of(part: Any, chunks: Iterable[torch.nn.Module]) -> Mapping[torch.nn.Parameter, torch.Tensor]:
    """The masters of one of megatron-core's optimizers by their parameters, in the order of the parameters.

    fp32 weights that are not sharded are masters themselves. A distributed optimizer has only what is this rank's.

    Args:
        part: The optimizer.
        chunks: The model's.
    """
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        places = part.model_param_group_index_map
        return {parameter: groups[group]["params"][index] for parameter, (group, index) in places.items()}
    own = {master for group in groups for master in group["params"]}
    pairs = ((each, getattr(each, "main_param", each)) for chunk in chunks for each in chunk.parameters())
    return {parameter: master for parameter, master in pairs if master in own}
