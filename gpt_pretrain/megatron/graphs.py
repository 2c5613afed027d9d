"""CUDA graphs of transformer layers: what a layer launches is recorded once and launched as a whole from then on.

A small model's kernels end sooner than the host can launch the next. With `model.cuda_graph_impl=local` megatron-core
(megatron.core.transformer.cuda_graphs) runs the first training step as it always does, records a graph of each layer's
forward and of its backward pass at the step's end, and replays them in the steps after it. Embedding, LM head, loss,
the exchange of gradients and the optimizer stay outside.

A replay reads and writes the addresses that were recorded and calls no Python. So only training steps are replayed,
with their one shape; whatever looks into the layers has them computed by their modules (`without_graphs`). The proof of
FP8 (`fp8/proof.py`) watches the first step, the recording included.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer

from gpt_pretrain.megatron.parallel import seed_dropout, track_random_states
from gpt_pretrain.megatron.patches import GRAPH_MEMORY, GRAPH_RECORDING, patch

# megatron-core's own, and the pool that it took memory from, once for each time.
_allocate = cuda_graphs.alloc_tensor_from_graph_mempool
_taken_from: list[tuple[int, int]] = []


class GraphedLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """A layer that is replayed in training steps, and computed by its modules otherwise."""

    is_replayed = True
    """Whether training steps take the graphs."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        # megatron-core would replay a validation, too, and has no graph for a text's length.
        return self.training and self.is_replayed and super()._should_call_local_cudagraph(*args, **kwargs)


def prepare_graphs(seed: int) -> None:
    """Called before the layers are built, on a GPU.

    An earlier job of a sweep may have left graphs of its own. megatron-core wants random states that graphs can hold.
    """
    cuda_graphs.delete_cuda_graphs()
    patch(GRAPH_RECORDING, create_cudagraphs=_create_graphs)
    patch(GRAPH_MEMORY, HAVE_TQDM=False, alloc_tensor_from_graph_mempool=_allocate_in_pool)
    track_random_states(in_graphs=True)
    seed_dropout(seed)


def _allocate_in_pool(meta: Any) -> torch.Tensor:
    """megatron-core's: a tensor in the pool of the graphs, which torch keeps for it until `release_graphs`."""
    _taken_from.append(cuda_graphs.CudaGraphManager.global_mempool)
    tensor: torch.Tensor = _allocate(meta)
    return tensor


def _create_graphs() -> None:
    """megatron-core's, called at the end of each step; what it does beside recording is undone.

    Its passes before a recording draw random numbers, which without graphs, or in a run that is resumed elsewhere,
    would not have been drawn. The memory of the first step, which no later one needs, was taken on another stream.
    """
    if not cuda_graphs._CudagraphGlobalRecord.cudagraph_record:
        return
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().values()
    generators = [torch.cuda.default_generators[torch.cuda.current_device()], *tracked]
    states = [generator.get_state() for generator in generators]
    try:
        cuda_graphs.create_cudagraphs()
    except BaseException:
        # megatron-core and Transformer Engine would take the next job of a sweep for a recording, and leave its
        # gradients out.
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
    """Inside, layers are computed by their modules, whose hooks are called."""
    layers = _graphed_layers(chunks)
    for layer in layers:
        layer.is_replayed = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_replayed = True


def release_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Lets go of the graphs of a run that has ended, and so of their memory, which no other tensor can have.

    Otherwise the next job of a sweep has to do without it: what replays a layer and what the replay puts out refer to
    each other through autograd's nodes, where Python's collector does not look. And torch counts who uses a pool, from
    `_cuda_beginAllocateCurrentThreadToPool` to `_cuda_releasePool`, which megatron-core 0.19 does not call.
    """
    for layer in _graphed_layers(chunks):
        for runner in layer.cudagraph_manager.cudagraph_runners:
            vars(runner).clear()
        layer.cudagraph_manager.cudagraph_runners.clear()
    while _taken_from:
        torch._C._cuda_releasePool(torch.cuda.current_device(), _taken_from.pop())


def _graphed_layers(chunks: Sequence[torch.nn.Module]) -> list[GraphedLayer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, GraphedLayer)]
