"""Experts in emulated FP8: each expert of megatron-core's local layers computes its own three products.

Transformer Engine computes a rank's experts in one grouped product, whose layer the plan names
"decoder.layers.3.mlp.experts.linear_fc1". Of local layers each expert has one, "…experts.local_experts.2.linear_fc1",
with its own scales, as each product of a group has; rows are not padded, since nothing here asks for multiples. An
expert without tokens computes nothing, casts nothing, and says so.
"""

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from gpt_pretrain.fp8 import local_layers
from gpt_pretrain.fp8.gemms import Phase
from gpt_pretrain.fp8.local_layers import Fp8ColumnParallelLinear, Fp8Layers, Fp8RowParallelLinear
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, Linear
from gpt_pretrain.spec.run_spec import RunSpec

_EXPERT = re.compile(r"\.local_experts\.\d+(?=\.)")


def planned_name(module: str) -> str:
    """The planned linear layer that a module is, or that an expert's module is part of."""
    return _EXPERT.sub("", module)


def expert_name(linear: Linear, expert: int) -> str:
    """The module of one expert, of a planned linear layer of experts."""
    return linear.module.replace(".experts.", f".experts.local_experts.{expert}.")


def live_linears(linears: Iterable[Linear], modules: Container[str], num_experts: int | None) -> Iterator[Linear]:
    """The planned linear layers by the modules that compute them: each expert's, where experts have their own.

    Args:
        linears: The planned ones.
        modules: Names of this rank's modules in the whole model.
        num_experts: Of a layer, over all ranks.
    """
    for linear in linears:
        own = []
        if linear.kind in (EXPERT_FC1, EXPERT_FC2) and linear.module not in modules:
            own = [name for name in (expert_name(linear, each) for each in range(num_experts or 0)) if name in modules]
        yield from (replace(linear, module=name, count=1) for name in own)
        if not own:
            yield linear


class _Idle:
    """What an expert's layer does without tokens, before an emulated layer's class in the bases."""

    idle_listener: Any = None
    """Told which products compute nothing (`te_products.IdleListener`, without the name)."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **kwargs: Any) -> Any:
        if input.numel() > 0:
            return super()._forward_impl(input, weight, bias, **kwargs)  # type: ignore[misc]
        if self.idle_listener is not None:
            for phase in Phase:
                self.idle_listener(phase)
        # No rows; the weight's gradient is zero, which the exchange of gradients waits for.
        return input @ weight.t()


class ExpertColumnParallelLinear(_Idle, Fp8ColumnParallelLinear):
    """An expert's linear layer whose outputs are split over the ranks that share it."""


class ExpertRowParallelLinear(_Idle, Fp8RowParallelLinear):
    """An expert's linear layer whose inputs are split over the ranks that share it."""


class Fp8ExpertLayers(Fp8Layers):
    """Emulated layers of a model with experts."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """What builds a layer's experts: one MLP each."""
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=partial(self._build, ColumnParallelLinear, ExpertColumnParallelLinear),
                linear_fc2=partial(self._build, RowParallelLinear, ExpertRowParallelLinear),
                activation_func=self.activation_func(),
            ),
        )


def fp8_layers(spec: RunSpec) -> Fp8Layers | None:
    """What a run's local layers are built from, with experts or without (`local_layers.fp8_layers`).

    Process groups must be open (`megatron.parallel.process_groups`).
    """
    settings, experts = spec.fp8, spec.model.num_moe_experts
    if settings is None or not settings.emulate or experts is None:
        return local_layers.fp8_layers(spec)
    in_fp8 = [linear for linear in spec.linears if linear.precision == "fp8"]
    # A rank numbers its own experts from 0 when it builds them.
    of_experts = {expert_name(linear, each) for linear in in_fp8 for each in range(experts)}
    return Fp8ExpertLayers(settings, frozenset(of_experts | {linear.module for linear in in_fp8}))
