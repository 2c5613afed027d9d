"""Sections of a model, whose gradients are complete together, and the memory that they share in turn.

With `model.data_parallel_sharding_strategy=optim_grads` a rank holds the whole gradients of two sections at most: of
the one that the backward pass computes, and of the one before it, whose gradients the ranks exchange meanwhile. In the
order of the backward pass the sections are the LM head, groups of whole layers from the last to the first, and the
embedding. `megatron.sharded_gradients` trains with them, and `plan.memory` counts them.
"""

from collections.abc import Sequence
from itertools import pairwise


def group_layers(layer_sizes: Sequence[int], bucket_size: int) -> list[list[int]]:
    """Indices of consecutive layers that are one section: as few as hold `bucket_size` values, the last ones fewer."""
    groups: list[list[int]] = []
    values = bucket_size
    for index, size in enumerate(layer_sizes):
        if values >= bucket_size:
            groups.append([])
            values = 0
        groups[-1].append(index)
        values += size
    return groups


def place_in_turn(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where sections lie that follow each other, and the length of the space: neighbors never overlap.

    Sections start at the first end of the space and at the other one in turn.
    """
    length = max([*map(sum, pairwise(sizes)), *sizes], default=0)
    return [0 if index % 2 == 0 else length - size for index, size in enumerate(sizes)], length
