"""A rank's part of a parameter in a checkpoint.

A distributed optimizer lays all parameters end to end and gives each rank a stretch of that line. A stretch of a tensor
laid out row by row is a few boxes (the rest of a row, whole rows, the beginning of a row), and torch's checkpoint
format takes any boxes that make up the whole. So each rank writes and reads its own boxes in place, of optimizer states
(`optimizer_state`) and of sharded weights (`own_parts`). Readers assemble what they ask for, in any layout.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

type _Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensors_of(place: ShardedTensor | ShardedTensorFactory, prefix: str, dtype: torch.dtype) -> Iterator[ShardedTensor]:
    """The tensors of a parameter in a checkpoint, without values; a SwiGLU's gate and up are two.

    Their names begin with `prefix`.
    """
    shape = torch.empty(place.data.shape, dtype=dtype, device="meta")
    if isinstance(place, ShardedTensorFactory):
        built = replace(place, key=prefix + place.key, data=shape).build()
        yield from nested_values(built if isinstance(built, dict | list) else [built])
    else:
        yield replace(place, key=prefix + place.key, data=shape, dtype=dtype)


def boxes_of_part(place: ShardedTensor, values: torch.Tensor, start: int, instance: int) -> Iterator[ShardedTensor]:
    """The boxes of a tensor, a contiguous view into a parameter, that this rank's stretch of the parameter covers.

    `values`, [n], is the stretch, from `start` on. Ranks of other instances have the same.
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
            # No other data parallel rank of this instance has it.
            replica_id=(*place.replica_id[:-1], instance),
            allow_shape_mismatch=place.allow_shape_mismatch,
        )
        at += num_values


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[_Box]:
    """Cuts the stretch from `start` to `end` of a tensor laid out row by row into boxes (offsets, sizes), in order."""
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
