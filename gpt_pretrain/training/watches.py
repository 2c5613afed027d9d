"""What the loop watches beside the loss: FP8's tensors at chosen steps, and the experts of a mixture.

A mixture's auxiliary losses and the spread of its tokens add up on the device, microbatch by microbatch, and are read
where a step is logged, in one collective. The numbers do not depend on the parallel layout: a router's loss comes in
parts from the ranks that share a sequence (megatron-core's `MoEMetricsTracker`), and each of them counts the tokens
that it routes itself.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

from gpt_pretrain.fp8.alarms import Alarms
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import ExpertsRecord, Fp8Record, Fp8Tensor

# The tracker's names; a run has at most one of the two.
_BALANCE = ("load_balancing_loss", "seq_load_balancing_loss")
_Z_LOSS = "z_loss"


class Fp8Watch:
    """Observes FP8 in every `logging.fp8_statistics_interval`-th step; does nothing if that is null or FP8 is off.

    Args:
        model: This rank's model.
    """

    def __init__(self, model: Model) -> None:
        spec = model.spec
        settings, logging = spec.fp8, spec.config.logging
        interval = logging.fp8_statistics_interval
        self._interval: int | None = None
        if settings is not None and interval is not None:
            self._interval = interval
            self._collector = StatisticsCollector(spec.linears, model.gpt_chunks, spec.platform.device)
            self._alarms = Alarms(settings, logging.fp8_saturation_threshold, interval)

    def step(self, step: int) -> AbstractContextManager[None]:
        """The context of a training step, by its number; every rank calls it."""
        if self._interval is None or step % self._interval:
            return nullcontext()
        return self._collector.observe(step)

    def records(self) -> Iterator[Fp8Record]:
        """A record of each step observed since the last call; waits for the device if there are any."""
        if self._interval is None:
            return
        for statistics in self._collector.read():
            yield Fp8Record(
                step=statistics.step,
                tensors=tuple(Fp8Tensor(**asdict(tensor)) for tensor in statistics.tensors),
                warnings=tuple(self._alarms.check(statistics)),
            )


class ExpertWatch:
    """Follows all routers of a model; does nothing without experts.

    Args:
        model: This rank's model.
        step: Steps done.
    """

    def __init__(self, model: Model, *, step: int) -> None:
        self._num_layers = model.spec.model.num_layers
        self._num_experts = model.spec.model.num_moe_experts
        self._num_microbatches = model.spec.layout.num_microbatches
        self._step = step
        if self._num_experts is None:
            return
        # An earlier model of this process may have had other layers.
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
        # Ranks of one sequence have parts of the balance and means of the z-loss; replicas have their own of both.
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
