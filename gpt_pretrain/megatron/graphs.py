"""CUDA graphs: training steps replay what was recorded of a layer.

A layer's kernels are recorded once and from then on launched together, because those of a small model end sooner than
the host can launch the next. With `model.cuda_graph_impl=local` megatron-core (megatron.core.transformer.cuda_graphs)
runs the first training step as usual, records a graph of each layer's forward pass and one of its backward pass at the
end of the step, and replays them in later steps. Embedding, LM head, loss, the exchange of gradients and the optimizer
stay outside.

A replay reads and writes the recorded addresses and calls no Python. So only training steps, which have one shape, are
replayed; `without_graphs` has the layers computed by their modules for whatever looks into them. The proof of FP8
(`fp8/proof.py`) watches the first step, the recording included.
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

# megatron-core's own; and the pool that it took memory from, listed once per call.
_allocate = cuda_graphs.alloc_tensor_from_graph_mempool
_taken_from: list[tuple[int, int]] = []


class WholeLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """A layer that training steps run by what was recorded or compiled of it; otherwise its modules compute it."""

    is_replayed = True
    """Whether training steps do so: hooks of modules, such as those that search for NaN, are not called then."""


class GraphedLayer(WholeLayer):
    """A layer that training steps replay."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        # megatron-core would also replay validations, and has no graph for the length of a sampled text.
        return self.training and self.is_replayed and super()._should_call_local_cudagraph(*args, **kwargs)


def prepare_graphs(seed: int) -> None:
    """Prepares megatron-core for graphs, before the layers are built, on a GPU.

    An earlier job of a sweep may have left graphs behind. Graphs also need random states that they can hold.
    """
    cuda_graphs.delete_cuda_graphs()
    patch(GRAPH_RECORDING, create_cudagraphs=_create_graphs)
    patch(GRAPH_MEMORY, HAVE_TQDM=False, alloc_tensor_from_graph_mempool=_allocate_in_pool)
    track_random_states(in_graphs=True)
    seed_dropout(seed)


def _allocate_in_pool(meta: Any) -> torch.Tensor:
    """A tensor in the graphs' memory pool, which torch keeps until `release_graphs`."""
    _taken_from.append(cuda_graphs.CudaGraphManager.global_mempool)
    tensor: torch.Tensor = _allocate(meta)
    return tensor


def _create_graphs() -> None:
    """Records graphs at the end of a step like megatron-core's function, and undoes the rest of what that does.

    Before a recording it runs passes that draw random numbers, which a run without graphs, or one that is resumed
    elsewhere, would not draw. The first step took memory on another stream, which no later step needs.
    """
    if not cuda_graphs._CudagraphGlobalRecord.cudagraph_record:
        return
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().values()
    generators = [torch.cuda.default_generators[torch.cuda.current_device()], *tracked]
    states = [generator.get_state() for generator in generators]
    try:
        cuda_graphs.create_cudagraphs()
    except BaseException:
        # Otherwise megatron-core and Transformer Engine would take the next job of a sweep for a recording, and leave
        # out its gradients.
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
    """Inside, modules compute the layers, and their hooks are called."""
    layers = _layers_of(WholeLayer, chunks)
    for layer in layers:
        layer.is_replayed = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_replayed = True


def release_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the graphs of a run that has ended, and their memory, which no other tensor can use.

    Otherwise the next job of a sweep has to do without that memory: a layer's runner and the outputs of its replay
    refer to each other through autograd's nodes, which Python's collector does not see. torch also counts the users of
    a pool, from `_cuda_beginAllocateCurrentThreadToPool` to `_cuda_releasePool`, which megatron-core 0.19 never calls.
    """
    for layer in _layers_of(GraphedLayer, chunks):
        for runner in layer.cudagraph_manager.cudagraph_runners:
            vars(runner).clear()
        layer.cudagraph_manager.cudagraph_runners.clear()
    while _taken_from:
        torch._C._cuda_releasePool(torch.cuda.current_device(), _taken_from.pop())


def _layers_of[Layer: WholeLayer](kind: type[Layer], chunks: Sequence[torch.nn.Module]) -> list[Layer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)]
