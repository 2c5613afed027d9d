"""Kernels that are asked for beside what they do not go with."""

from collections.abc import Iterable, Iterator

from gpt_pretrain.config.choices import CudaGraphImpl
from gpt_pretrain.spec.obstacles import (
    Obstacle,
    activation_cast_obstacles,
    embedding_gradient_obstacles,
    flash_attention_obstacles,
    graph_obstacles,
    qkv_rope_obstacles,
)
from gpt_pretrain.spec.resolved import Resolved


def _refusals(asked: str, obstacles: Iterable[Obstacle], instead: str) -> Iterator[str]:
    """A problem for each obstacle.

    Args:
        asked: The setting that asks for the optimisation, `model.key=value`.
        obstacles: What it does not go with here.
        instead: Its values that would go.
    """
    for setting, why in obstacles:
        yield f"{asked} does not go with {setting}: {why}; use {instead}"


def graph_problems(run: Resolved) -> Iterator[str]:
    """What `model.cuda_graph_impl` does not go with, where graphs are asked for."""
    if run.model.cuda_graph_impl is CudaGraphImpl.local:
        yield from _refusals("model.cuda_graph_impl=local", graph_obstacles(run), "null or none")


def fused_kernel_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """Fused kernels that are asked for beside what they do not go with.

    Args:
        run: The run.
        sizes_known: Whether all counts are positive; what a layer multiplies is divided by them.
    """
    model = run.model
    found = {
        "activation_cast_fusion": activation_cast_obstacles(run, sizes_known=sizes_known),
        "embedding_gradient_fusion": embedding_gradient_obstacles(run.config),
        "fused_single_qkv_rope": qkv_rope_obstacles(model),
        "use_flash_attention": flash_attention_obstacles(model) if sizes_known else (),
    }
    for key, obstacles in found.items():
        if getattr(model, key):
            yield from _refusals(f"model.{key}=true", obstacles, "null or false")
