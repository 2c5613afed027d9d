"""Transformer layers that a training step launches as a whole: replayed as CUDA graphs, or compiled by torch.compile.

**CUDA graphs** (`model.cuda_graph_impl=local`): a small model's kernels end sooner than the host can launch the next.
megatron-core records each layer's forward and backward pass at the end of the first training step and replays them in
later ones, without Python (megatron.core.transformer.cuda_graphs). Everything outside of the layers runs as usual.

**Compiled layers** (`model.compile`, without Transformer Engine): TorchInductor fuses what lies between the matrix
products. All layers have the same shapes and share one graph, compiled in the first step. Nothing falls back: a graph
break or a second graph ends the run. What would break the graph in megatron-core 0.19.2, and what replaces it:

- linear layers in an autograd function that exchanges asynchronously and warns on rank 0: the same exchange by
  megatron-core's own mapping, before `torch.nn.functional.linear`;
- attention that writes its scores into a process-wide buffer: `layers.TorchAttention`;
- everything else: refused (`features.compile`), or left out (`features.resolve`).

Only training steps, which have one shape, run so. Validation and sampling run the layers' modules, and so does all that
looks into them inside `without_graphs`. The proof of FP8 (`fp8/proof.py`) watches the first step and its recording.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, override

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.compile_fx import compile_fx

from gpt_pretrain.config.errors import RunError, reason
from gpt_pretrain.launch.patches import COMPILED_GRAPHS, COMPILED_SHAPES, GRAPH_MEMORY, GRAPH_RECORDING, patch
from gpt_pretrain.megatron.cpu import let_compiler_see_twins
from gpt_pretrain.megatron.layers import GraphedLayer, LocalLayers, WholeLayer
from gpt_pretrain.megatron.parallel import seed_dropout, track_random_states

# megatron-core's own, and the pool it took memory from, once per call.
_allocate = cuda_graphs.alloc_tensor_from_graph_mempool
_taken_from: list[tuple[int, int]] = []
# Graphs of one compiled function, over all runs of the process, such as a sweep's jobs. TorchAO's functions are
# compiled for four linear layers' shapes, three tensors each along two dimensions, and again for validation.
_MOST_GRAPHS = 64


def prepare_graphs(seed: int) -> None:
    """Prepares megatron-core for graphs on a GPU, before the layers are built."""
    # An earlier job of a sweep may have left some.
    cuda_graphs.delete_cuda_graphs()
    patch(GRAPH_RECORDING, create_cudagraphs=_create_graphs)
    patch(GRAPH_MEMORY, HAVE_TQDM=False, alloc_tensor_from_graph_mempool=_allocate_in_pool)
    # Graphs need random states that they can hold.
    track_random_states(in_graphs=True)
    seed_dropout(seed)


def _allocate_in_pool(meta: Any) -> torch.Tensor:
    """A tensor in the graphs' memory pool, which torch keeps until `release_graphs`."""
    _taken_from.append(cuda_graphs.CudaGraphManager.global_mempool)
    tensor: torch.Tensor = _allocate(meta)
    return tensor


def _create_graphs() -> None:
    """megatron-core's recording at the end of a step, without its side effects.

    It first runs passes that draw random numbers, which a run without graphs or one resumed elsewhere would not draw.
    Memory that the first step took on another stream is freed, because no later step needs it.
    """
    if not cuda_graphs._CudagraphGlobalRecord.cudagraph_record:
        return
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().values()
    generators = [torch.cuda.default_generators[torch.cuda.current_device()], *tracked]
    states = [generator.get_state() for generator in generators]
    try:
        cuda_graphs.create_cudagraphs()
    except BaseException:
        # Otherwise megatron-core and Transformer Engine would treat a sweep's next job as a recording, without
        # gradients.
        cuda_graphs._set_capture_end()
        if cuda_graphs.HAVE_TE_GRAPHS:
            cuda_graphs.te_set_capture_end()
        torch.cuda.set_stream(torch.cuda.default_stream())
        raise
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    torch.cuda.empty_cache()


@contextmanager
def without_graphs(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, the layers' modules run, and their hooks are called."""
    layers = _layers_of(WholeLayer, chunks)
    for layer in layers:
        layer.is_replayed = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_replayed = True


def release_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the graphs of a finished run and their memory, which a sweep's next job could not use otherwise.

    A layer's runner and its replay's outputs refer to each other through autograd's nodes, which Python's collector
    does not see. torch also counts a pool's users, from `_cuda_beginAllocateCurrentThreadToPool` to
    `_cuda_releasePool`, which megatron-core 0.19 never calls.
    """
    for layer in _layers_of(GraphedLayer, chunks):
        for runner in layer.cudagraph_manager.cudagraph_runners:
            vars(runner).clear()
        layer.cudagraph_manager.cudagraph_runners.clear()
    while _taken_from:
        torch._C._cuda_releasePool(torch.cuda.current_device(), _taken_from.pop())


def _layers_of[Layer: WholeLayer](kind: type[Layer], chunks: Sequence[torch.nn.Module]) -> list[Layer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)]


def prepare_compiler() -> None:
    """Lets torch.compile keep as many graphs as a run needs, each under its instruction set."""
    patch(COMPILED_SHAPES, recompile_limit=_MOST_GRAPHS)
    asked = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    patch(COMPILED_GRAPHS, cache_key_tag=asked + torch.backends.cpu.get_cpu_capability())


class _Linear(torch.nn.Module):
    """What column- and row-parallel layers share; it precedes megatron-core's class among the bases."""

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
        """x·wᵀ + b; the other arguments are for features that are off."""
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
            RunError: torch.compile breaks the graph, or asks for a second one.
        """
        if not (self.is_replayed and self.training and torch.is_grad_enabled()):
            return super().forward(hidden_states, *args, **kwargs)
        # Graphs are made for strides, and in a batch of one the embedding's transpose leaves other strides than layers.
        hidden_states = hidden_states.flatten(0, 1).view(hidden_states.shape)
        try:
            return self.run_compiled(self, hidden_states, *args, **kwargs)
        except TorchDynamoException as error:
            # torch wraps what a backend raises.
            why = reason(getattr(error, "inner_exception", error))
            raise RunError(
                f"model.compile=true: torch.compile did not make one graph of a layer: {why}; use model.compile=false"
            ) from error


class _SecondGraphError(Exception):
    """Layers need more than the graph that they should share."""


class CompiledLayers(LocalLayers):
    """megatron-core's local layers, compiled; process groups must be open."""

    layer = CompiledLayer

    def __init__(self) -> None:
        super().__init__(apex_layer_norm=False)
        prepare_compiler()
        let_compiler_see_twins()
        self._num_graphs = 0
        # Under the name of torch's backend another run's graphs would be taken for this one's.
        backend = partial(self._compile)
        self._run = torch.compile(TransformerLayer.forward, fullgraph=True, dynamic=False, backend=backend)

    @override
    def column_parallel_linear(self) -> type:
        return _ColumnParallelLinear

    @override
    def row_parallel_linear(self) -> type:
        return _RowParallelLinear

    @override
    def attach(self, chunk: MegatronModule) -> None:
        for layer in chunk.decoder.layers:
            layer.run_compiled = self._run

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        self._num_graphs += 1
        if self._num_graphs > 1:
            raise _SecondGraphError("its layers differ, or its microbatches do")
        compiled: Any = compile_fx(graph, inputs)
        return compiled  # type: ignore[no-any-return]
