"""What a rank of a distributed optimizer holds of each parameter, as boxes of the whole tensor, to be saved as it lies.

A distributed optimizer lays all parameters end to end and gives each rank a stretch of that line. megatron-core 0.19
gathers the whole line on every rank before it saves: 12 bytes of host memory per parameter, and seconds in which
training stands still. But a stretch of a tensor laid out row by row is a few boxes of it (the rest of a row, whole
rows, the beginning of a row), and torch's checkpoint format takes any boxes that make up the whole. So each rank
describes its own, and nothing is gathered. Readers put together what they ask for, in whatever layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

type _Box = tuple[tuple[int, ...], tuple[int, ...]]


def own_shards(
    part: DistributedOptimizer,
    model_state: dict[str, Any],
    states_of: Callable[[torch.nn.Parameter], Mapping[str, torch.Tensor]],
) -> Iterator[ShardedTensor]:
    """Masters and moments of this rank, where they lie in the tensors of the parameters.

    Args:
        part: The optimizer, with its states.
        model_state: The sharded state of the model's chunks, which says where a parameter lies in the whole model.
        states_of: What this rank has of a parameter, each [n], by its kind in a checkpoint.
    """
    entries = nested_values(model_state)
    places = {entry.data: entry for entry in entries if isinstance(entry, ShardedTensor | ShardedTensorFactory)}
    buckets = [bucket for ranges in part.gbuf_ranges for of_dtype in ranges.values() for bucket in of_dtype]
    for bucket in buckets:
        for parameter, ranges in bucket["param_map"].items():
            for kind, values in states_of(parameter).items():
                for place in _tensors_of(places[parameter], f"optimizer.state.{kind}.", values.dtype):
                    yield from _shards(place, values, ranges["param"].start)


def _tensors_of(
    place: ShardedTensor | ShardedTensorFactory, prefix: str, dtype: torch.dtype
) -> Iterator[ShardedTensor]:
    """The tensors of a checkpoint that a parameter becomes (gate and up of a SwiGLU are two), without values."""
    shape = torch.empty(place.data.shape, dtype=dtype, device="meta")
    if isinstance(place, ShardedTensorFactory):
        built = replace(place, key=prefix + place.key, data=shape).build()
        yield from nested_values(built if isinstance(built, dict | list) else [built])
    else:
        yield replace(place, key=prefix + place.key, data=shape, dtype=dtype)


def _shards(place: ShardedTensor, values: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """What `values` hold of one tensor.

    Args:
        place: The tensor, a contiguous view into its parameter.
        values: This rank's stretch of the parameter: [n].
        start: Where in the parameter the stretch begins.
    """
    assert place.data.is_contiguous(), f"{place.key} does not lie row by row in its parameter"
    first = place.data.storage_offset()
    low, high = max(start, first), min(start + values.numel(), first + place.data.numel())
    at = low - start
    ones = (1,) * place.prepend_axis_num
    for offsets, sizes in boxes(tuple(place.local_shape), low - first, high - first):
        num_values = prod(sizes)
        own = (*(0,) * len(ones), *offsets)
        yield ShardedTensor(
            key=place.key,
            data=values.view(-1)[at : at + num_values].view(*ones, *sizes),
            dtype=values.dtype,
            local_shape=(*ones, *sizes),
            global_shape=place.global_shape,
            global_offset=tuple(whole + offset for whole, offset in zip(place.global_offset, own, strict=True)),
            axis_fragmentations=None,
            # Of the ranks of the data parallel group, this one alone has it.
            replica_id=(*place.replica_id[:-1], 0),
            allow_shape_mismatch=place.allow_shape_mismatch,
        )
        at += num_values


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[_Box]:
    """Cuts the stretch from `start` to `end` of a tensor laid out row by row into boxes, in its order.

    Yields:
        Offsets and sizes, one of each per axis.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    inner = prod(shape[1:])
    row, within = divmod(start, inner)
    if within or end - start < inner:
        stop = min(end, (row + 1) * inner)
        for offsets, sizes in boxes(shape[1:], within, stop - row * inner):
            yield (row, *offsets), (1, *sizes)
    else:
        num_rows = (end - start) // inner
        stop = start + num_rows * inner
        yield (row, *(0,) * len(shape[1:])), (num_rows, *shape[1:])
    yield from boxes(shape, stop, end)
