"""Watching a mixture of experts in the training loop: its auxiliary losses, and how evenly tokens are spread.

Everything adds up on the device, microbatch by microbatch, and is read where a step is logged, in one collective. What
it says does not depend on the parallel layout: a router's loss comes in parts from the ranks that share a sequence
(megatron-core's `MoEMetricsTracker`), and each of them counts the tokens that it routes itself.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import ExpertsRecord

# The tracker's names; a run has at most one of the two.
_BALANCE = ("load_balancing_loss", "seq_load_balancing_loss")
_Z_LOSS = "z_loss"


class ExpertWatch:
    """Follows all routers of a model from here on; does nothing where there are none.

    Args:
        config: The model's configuration.
        model: This rank's model.
        num_microbatches: Of a training step and data-parallel rank.
        step: Steps done.
    """

    def __init__(self, config: ModelConfig, model: Model, num_microbatches: int, *, step: int) -> None:
        self._num_layers = config.num_layers
        self._num_experts = config.num_moe_experts
        self._num_microbatches = num_microbatches
        self._step = step
        if self._num_experts is None:
            return
        # It may know another model of this process, with other layers.
        destroy_moe_metrics_tracker()
        device = torch.cuda.current_device()
        self._tokens = torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64, device=device)
        for chunk in model.gpt_chunks:
            for layer in chunk.decoder.layers:
                router = layer.mlp.router
                assert isinstance(router, TopKRouter)
                router.register_forward_hook(partial(self._count, layer.layer_number - 1))

    def restart(self, step: int) -> None:
        """Forgets what it has seen since the last record.

        Args:
            step: Steps done.
        """
        self._step = step
        if self._num_experts is not None:
            get_moe_metrics_tracker().clear()
            self._tokens.zero_()

    def _count(self, layer: int, router: TopKRouter, arguments: Any, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training:
            self._tokens[layer] += result[1].sum(dim=0)

    def records(self, step: int) -> Iterator[ExpertsRecord]:
        """A record of the training since the last call, if there are experts; waits for the device.

        Every rank calls it, and gets the same.

        Args:
            step: Steps done, more than at the last call.
        """
        if self._num_experts is None:
            return
        tracked = get_moe_metrics_tracker().metrics
        losses = torch.zeros(2, self._num_layers, dtype=torch.float64, device=self._tokens.device)
        for name, entry in tracked.items():
            losses[0 if name in _BALANCE else 1] += entry.values
        # Ranks of one sequence have parts of the balance and means of the z-loss, and replicas have all their own.
        total = torch.cat([losses.view(-1), self._tokens.view(-1)])
        torch.distributed.all_reduce(total)
        replicas = parallel_state.get_data_parallel_world_size()
        of_a_sequence = parallel_state.get_tensor_and_context_parallel_world_size()
        times = (step - self._step) * self._num_microbatches * self._num_layers * replicas
        balance, z_loss = total[: losses.numel()].view_as(losses).sum(dim=1).tolist()
        tokens = total[losses.numel() :].view_as(self._tokens)
        load = tokens / tokens.mean(dim=1, keepdim=True)
        self.restart(step)
        yield ExpertsRecord(
            step=step,
            load_balancing_loss=balance / times if tracked.keys() & set(_BALANCE) else None,
            z_loss=z_loss / times / of_a_sequence if _Z_LOSS in tracked else None,
            busiest_expert=load.max().item(),
            idlest_expert=load.min().item(),
        )
