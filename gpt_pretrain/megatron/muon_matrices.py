"""The matrices that Muon orthogonalizes, and which ranks hold them.

They are the layers' weight matrices. Embeddings, the LM head, norms, biases and a mixture's router keep Adam.
megatron-core 0.19 hands every other matrix to Muon, and with it the router and learned positions.

A distributed optimizer gives each data-parallel rank a stretch of all parameters laid end to end, which cuts matrices
anywhere. Every rank of the group knows all stretches, so none has to ask.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.megatron.masters import masters_of

# Attributes of parameters: that they are Muon's, and how many rows of QKV are whose.
_ORTHOGONALIZED, _ROWS_OF_HEADS = "is_orthogonalized", "rows_of_heads"
_OF_LAYER = re.compile(r"decoder\.layers\.\d+\.(?!.*\brouter\.)")


@dataclass(frozen=True, slots=True)
class Form:
    """What matrices have in common that are orthogonalized in one batch."""

    shape: tuple[int, int]
    """Rows and columns on this tensor-parallel rank."""
    rows_of_heads: tuple[int, ...] | None
    """QKV: rows of queries, keys and values in each query group, which are matrices of their own."""
    cut: int | None
    """The dimension that tensor parallelism cuts; None: the whole matrix is here."""
    of_experts: bool

    @property
    def num_values(self) -> int:
        """Values on this tensor-parallel rank."""
        return self.shape[0] * self.shape[1]

    @property
    def tp_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that hold the other parts of the same matrices."""
        group: torch.distributed.ProcessGroup = (
            parallel_state.get_expert_tensor_parallel_group()
            if self.of_experts
            else parallel_state.get_tensor_model_parallel_group()
        )
        return group


@dataclass(frozen=True, eq=False, slots=True)
class Matrix:
    """A weight matrix, of which this rank may hold a stretch."""

    form: Form
    stretches: Mapping[int, tuple[int, int]]
    """Bounds of what each data-parallel rank holds of the flat matrix."""
    master: torch.Tensor | None
    """This rank's stretch; None if it has none."""


def is_orthogonalized(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is Muon's; `mark_matrices` comes first."""
    return getattr(parameter, _ORTHOGONALIZED, False)


def mark_matrices(chunks: Iterable[torch.nn.Module], rows_of_heads: tuple[int, ...] | None) -> None:
    """Marks the parameters that are Muon's.

    Args:
        chunks: The model's.
        rows_of_heads: Rows of queries, keys and values in each query group; None: QKV is one matrix.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.dim() == 2 and _OF_LAYER.search(name):
                setattr(parameter, _ORTHOGONALIZED, True)
                if name.endswith("linear_qkv.weight"):
                    setattr(parameter, _ROWS_OF_HEADS, rows_of_heads)


def matrices_of(
    part: Any, chunks: Iterable[torch.nn.Module]
) -> tuple[Sequence[Matrix], torch.distributed.ProcessGroup | None]:
    """The matrices of one of megatron-core's optimizers, the same in the same order on all ranks that share them.

    Args:
        part: The optimizer, with its masters.
        chunks: The model's.

    Returns:
        The matrices, and the ranks over which they are sharded; None: every rank has whole ones.
    """
    if isinstance(part, DistributedOptimizer):
        return list(_sharded(part, masters_of(part, chunks))), part.data_parallel_group
    whole = ((each, master) for each, master in masters_of(part, chunks).items() if is_orthogonalized(each))
    return [Matrix(_form(each), {0: (0, each.numel())}, master) for each, master in whole], None


def _sharded(part: DistributedOptimizer, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> Iterator[Matrix]:
    ranks = part.data_parallel_group.size()
    for buffer in part.buffers:
        for parameter, (start, end, bucket_index) in buffer.param_index_map.items():
            if not is_orthogonalized(parameter):
                continue
            bucket = buffer.buckets[bucket_index]
            size = bucket.grad_data.numel() // ranks
            bounds = ((rank, bucket.offset + rank * size) for rank in range(ranks))
            cuts = {rank: (max(start, first) - start, min(end, first + size) - start) for rank, first in bounds}
            stretches = {rank: (low, high) for rank, (low, high) in cuts.items() if low < high}
            yield Matrix(_form(parameter), stretches, masters.get(parameter))


def _form(parameter: torch.nn.Parameter) -> Form:
    of_experts = not getattr(parameter, "allreduce", True)
    rows, columns = parameter.shape
    # Layers of extensions may be any; megatron-core's tell how they are cut, even if one rank has all.
    cut = getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None
    form = Form((rows, columns), getattr(parameter, _ROWS_OF_HEADS, None), cut, of_experts)
    return form if form.tp_group.size() > 1 else replace(form, cut=None)
