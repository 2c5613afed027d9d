"""Experts whose products are one kernel each: `model.moe_grouped_kernel=triton`.

megatron-core's experts on Transformer Engine with the same parameters under the same names. Only who multiplies is
another (`kernels.grouped_products_triton`), in BF16 whatever the precision of other layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from megatron.core.transformer.moe.experts import TEGroupedMLP

from gpt_pretrain.kernels.grouped_products_triton import GroupedWeights, RowPlaces, multiply_by_experts


class _OneKernel(torch.nn.Module):
    """What these layers do in place of Transformer Engine's forward pass."""

    kept: GroupedWeights

    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, None]:
        """[rows, in] sorted by expert to [rows, out], and no bias."""
        own: Any = self
        # In the order of the experts; to ask a module for each by its name takes the host longer than the launch.
        return multiply_by_experts(x, m_splits, tuple(own._parameters.values()), own.kept), None


class ColumnParallelExperts(_OneKernel, TEColumnParallelGroupedLinear):  # type: ignore[misc]  # no types there
    """The first projections of a rank's experts."""


class RowParallelExperts(_OneKernel, TERowParallelGroupedLinear):  # type: ignore[misc]
    """The second ones."""


class OneKernelExperts(TEGroupedMLP):  # type: ignore[misc]
    """megatron-core's experts with these layers; rows are not padded for FP8 where the rest of the model runs in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = RowPlaces()
        for linear in (self.linear_fc1, self.linear_fc2):
            assert not linear.use_bias, "experts have no biases"
            linear.kept = GroupedWeights(rows)
        if self.config.fp8:
            self.quantization_padding = _NoPadding()
            self.quantization_unpadding = _NothingToRemove()


class _NoPadding(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return rows, counts


class _NothingToRemove(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows


def with_one_kernel(mlp: Any) -> Any:
    """The spec of a layer's experts (`get_moe_module_spec_for_backend`) with these in their place."""
    parts = mlp.keywords["submodules"]
    linears = replace(
        parts.experts.keywords["submodules"], linear_fc1=ColumnParallelExperts, linear_fc2=RowParallelExperts
    )
    return partial(mlp.func, submodules=replace(parts, experts=partial(OneKernelExperts, submodules=linears)))


def announce_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Tells data parallelism that exchanges gradients behind the backward pass when those of these experts are there.

    It listens to autograd, which does not see these weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, _OneKernel):
                module.kept.gradients_added = partial(_register, chunk)


def _register(chunk: Any, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)
