"""`model.data_parallel_sharding_strategy`: gradients, or weights too, of which a rank keeps its part."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import ShardingStrategy
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.errors import show
from gpt_pretrain.features.feature import Feature, Obstacle, Resolved


class ShardedGradients(Feature):
    """Gradients that are reduced after each microbatch, to the rank that updates their weights."""

    key = "data_parallel_sharding_strategy"
    asked = ShardingStrategy.optim_grads
    off = "model.data_parallel_sharding_strategy=null"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if not uses_distributed_optimizer(model):
            why = "a rank would update weights whose gradients it does not have"
            setting = f"model.use_distributed_optimizer={show(model.use_distributed_optimizer)}"
            yield setting, why, "model.use_distributed_optimizer=true"
        if not model.overlap_grad_reduce:
            why = "layers give their memory to others as soon as their gradients are reduced"
            yield "model.overlap_grad_reduce=false", why, "model.overlap_grad_reduce=true"
        if model.overlap_moe_expert_parallel_comm:
            why = "a layer's weight gradients are put off until others' are computed, and they use its memory"
            yield "model.overlap_moe_expert_parallel_comm=true", why, "model.overlap_moe_expert_parallel_comm=false"


class ShardedWeights(ShardedGradients):
    """Weights that are gathered when their layer computes, too."""

    asked = ShardingStrategy.optim_grads_params
