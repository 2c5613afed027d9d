"""Norms by layer (`logging.norms`): of the gradients before clipping, and of the masters after the update.

They count what megatron-core's gradient norm counts: each value of the model once, however ranks share it. The root of
the sum of their squares is that norm.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.masters import masters_of
from gpt_pretrain.megatron.model import Model

_LAYER = re.compile(r"decoder\.layers\.(\d+)")


def norm_names(num_layers: int) -> Sequence[str]:
    """What `gradient_norms` and `weight_norms` are of."""
    return ["embedding", *(f"layers.{layer}" for layer in range(num_layers)), "final_layernorm", "output_layer"]


def gradient_norms(optimizer: MegatronOptimizer, model: Model) -> torch.Tensor:
    """L2 norms, fp32 [`norm_names`]; call it once gradients are reduced, before they are clipped, on all ranks."""
    return _norms(optimizer, model, lambda part, _, gradient: gradient)


def weight_norms(optimizer: MegatronOptimizer, model: Model) -> torch.Tensor:
    """L2 norms, fp32 [`norm_names`]; gradients must still be there, which tell the ranks' own parts from copies."""
    return _norms(optimizer, model, _master_values)


def _master_values(part: Any, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if (states := getattr(part.optimizer, "states", None)) is not None:
        # Stored in few bytes.
        values: torch.Tensor = states[master].master.read(0, master.numel())
        return values
    return master


@torch.no_grad()
def _norms(
    optimizer: MegatronOptimizer, model: Model, choose: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    names = norm_names(model.spec.model.num_layers)
    places = {
        parameter: names.index(_name(f"{module_name}."))
        for chunk in model.gpt_chunks
        for module_name, module in whole_model_modules(chunk)
        for parameter in module.parameters(recurse=False)
    }
    total = torch.zeros(len(names), device=torch.cuda.current_device())
    for part in optimizer.chained_optimizers:
        squares = torch.zeros_like(total)
        for parameter, master in ({} if part.optimizer is None else masters_of(part, model.chunks)).items():
            for gradient in part._filter_grads_for_norm([master]):
                norm = torch.linalg.vector_norm(choose(part, master, gradient), dtype=torch.float32)
                squares[places[parameter]] += norm.square()
        torch.distributed.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        total += squares
    return total.sqrt()


def _name(module: str) -> str:
    if match := _LAYER.match(module):
        return f"layers.{match[1]}"
    return "embedding" if module.startswith("embedding.") else module.split(".")[-2]
