"""Transformer layers without Transformer Engine, each compiled as a whole by torch.compile (`model.compile`).

A training step runs a layer as one graph: TorchInductor fuses norms, residuals, rotation and activation into a few
kernels between the matrix products. All layers of a run have the same shapes and share the graph, which is compiled
once, in the first step. Nothing falls back: where a layer breaks the graph, or asks for a second one, the run ends.

What of megatron-core 0.19.2 would break the graph, and what stands in its place:

- linear layers in an autograd function that exchanges asynchronously, and that warns on rank 0: the same exchange by
  megatron-core's own mapping, before `torch.nn.functional.linear`;
- attention that writes its scores into a buffer of the whole process: `layers.TorchAttention`;
- exchanges along the sequence, whose gradients torch 2.11 traces wrongly (`rules.model`): refused;
- weight gradients that a kernel adds to `main_grad`, activations and residuals that are compiled by themselves, dropout
  from megatron-core's own random states, hooks that gather parameters: refused, or left out (`spec.kernels`).

Validation and sampling run the same modules uncompiled: their shapes are others.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.compile_fx import compile_fx

from gpt_pretrain.config.errors import RunError, reason
from gpt_pretrain.megatron.cpu import let_compiler_see_twins
from gpt_pretrain.megatron.graphs import WholeLayer
from gpt_pretrain.megatron.layers import LocalLayers
from gpt_pretrain.megatron.patches import COMPILED_GRAPHS, COMPILED_SHAPES, patch

# Graphs of one function. Those of all runs of one process count, such as the jobs of a sweep; and TorchAO's functions
# are compiled for the shapes of four linear layers, three tensors of each along two dimensions, also in validation.
_MOST_GRAPHS = 64


def prepare_compiler() -> None:
    """Lets torch.compile keep as many graphs as a run needs, each for the instruction set that it was made for."""
    patch(COMPILED_SHAPES, recompile_limit=_MOST_GRAPHS)
    asked = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    patch(COMPILED_GRAPHS, cache_key_tag=asked + torch.backends.cpu.get_cpu_capability())


class _Linear(torch.nn.Module):
    """What column- and row-parallel layers have in common, before megatron-core's class in the bases."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """x·wᵀ + b; the other arguments belong to what is off."""
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return torch.nn.functional.linear(input, weight, bias)


class _ColumnParallelLinear(_Linear, ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer whose outputs are split over the tensor parallel ranks."""


class _RowParallelLinear(_Linear, RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are split over the tensor parallel ranks."""


class CompiledLayer(WholeLayer):
    """A layer that training steps run as one graph."""

    run_compiled: Callable[..., Any]
    """`TransformerLayer.forward`, compiled; set by `CompiledLayers.attach`."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """megatron-core's forward pass of hidden states [s, b, h].

        Raises:
            RunError: torch.compile does not take the layer whole, or asks for a second graph.
        """
        if not (self.is_replayed and self.training and torch.is_grad_enabled()):
            return super().forward(hidden_states, *args, **kwargs)
        # A batch of one has any stride: the embedding's transpose leaves another than layers do, and a graph is made
        # for strides.
        hidden_states = hidden_states.flatten(0, 1).view(hidden_states.shape)
        try:
            return self.run_compiled(self, hidden_states, *args, **kwargs)
        except TorchDynamoException as error:
            # What a backend raised, torch hands on inside of its own.
            why = reason(getattr(error, "inner_exception", error))
            raise RunError(
                f"model.compile=true: torch.compile did not make one graph of a layer: {why}; use model.compile=false"
            ) from error


class _SecondGraphError(Exception):
    """Layers that should share a graph do not."""


class CompiledLayers(LocalLayers):
    """megatron-core's local layers, made to be compiled, and compiled; process groups must be open."""

    layer = CompiledLayer

    def __init__(self) -> None:
        super().__init__(apex_layer_norm=False)
        prepare_compiler()
        let_compiler_see_twins()
        self._num_graphs = 0
        # Not the name of torch's backend: another run's graphs would be taken for this one's.
        backend = partial(self._compile)
        self._run = torch.compile(TransformerLayer.forward, fullgraph=True, dynamic=False, backend=backend)

    def column_parallel_linear(self) -> type:
        """The class of column-parallel layers."""
        return _ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The class of row-parallel layers."""
        return _RowParallelLinear

    def attach(self, chunk: MegatronModule) -> None:
        """Lets the layers of a model chunk run compiled."""
        for layer in chunk.decoder.layers:
            layer.run_compiled = self._run

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        self._num_graphs += 1
        if self._num_graphs > 1:
            raise _SecondGraphError("its layers differ, or its microbatches do")
        compiled: Any = compile_fx(graph, inputs)
        return compiled  # type: ignore[no-any-return]
