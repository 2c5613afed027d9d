"""Transformer Engine's experts with one kernel for each of their products (`model.moe_grouped_kernel=triton`).

`OneKernelExperts` multiplies always in BF16 (`kernels.grouped_products_triton`). It is built, stored and loaded like
megatron-core's. Import this file only where it is asked for: Triton is not installed everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.experts import TEGroupedMLP

from gpt_pretrain.kernels.grouped_products_triton import GroupedWeights, RowPlaces, multiply_by_experts


class OneKernelExperts(TEGroupedMLP):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's experts with one kernel for each product; rows are not padded for FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_one_kernel(self)
        if self.config.fp8:
            self.quantization_padding = _NoPadding()
            self.quantization_unpadding = _NothingToRemove()


def use_one_kernel(experts: Any) -> None:
    """Replaces the forward and backward passes of both linear layers that Transformer Engine built."""
    rows = RowPlaces()
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert not linear.use_bias, "experts have no biases"
        linear.kept = GroupedWeights(rows)
        linear.forward = partial(_multiply_by_experts, linear._parameters, linear.kept)


def _multiply_by_experts(
    weights: Mapping[str, torch.Tensor], kept: GroupedWeights, x: torch.Tensor, m_splits: Sequence[int]
) -> tuple[torch.Tensor, None]:
    """[rows, in] sorted by expert to [rows, out], and no bias; weights are in the experts' order."""
    # Asking a module for each by name takes the host longer than the launch.
    return multiply_by_experts(x, m_splits, tuple(weights.values()), kept), None


class _NoPadding(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return rows, counts


class _NothingToRemove(torch.nn.Module):
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows


def with_one_kernel(mlp: Any) -> Any:
    """A layer's spec of experts (`get_moe_module_spec_for_backend`) with `OneKernelExperts`."""
    parts = mlp.keywords["submodules"]
    experts = partial(OneKernelExperts, submodules=parts.experts.keywords["submodules"])
    return partial(mlp.func, submodules=replace(parts, experts=experts))


def announce_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Tells data parallelism with overlapped exchanges when these experts' gradients are complete.

    It listens to autograd, which does not see their weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, OneKernelExperts):
                for linear in (module.linear_fc1, module.linear_fc2):
                    linear.kept.gradients_added = partial(_register, chunk)


def _register(chunk: Any, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)
