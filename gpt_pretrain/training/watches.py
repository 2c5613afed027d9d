"""What the loop watches beside the loss: FP8, from the first step on, and the experts of a mixture.

Delayed scaling casts with the amaxes of earlier passes. Before the first pass there are none, scales are 1, and E5M2
loses most of a gradient. One pass does not show all amaxes: gradients inside a layer come out of FP8 products of
gradients that were flushed. So a start without scales repeats its first batch, without updating weights, until no
scale halves (benchmarks/fp8_h200.md, "Until scales have settled": after two passes over 131,072 tokens the lowest
layer's gradients were still ten times beyond what their scales take).

A mixture's auxiliary losses and token counts add up on the device, microbatch by microbatch, and are read when a step
is logged, in one collective. The numbers do not depend on the parallel layout: the ranks that share a sequence each
have a part of a router's loss (megatron-core's `MoEMetricsTracker`), and each counts the tokens that it routes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.alarms import Alarms
from gpt_pretrain.fp8.delayed import gradient_scales
from gpt_pretrain.fp8.own_layers import live_layers
from gpt_pretrain.fp8.statistics import StatisticsCollector, TensorStatistics
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.report.records import ExpertsRecord, Fp8Record, Fp8Tensor
from gpt_pretrain.training.step import compute_gradients

# The tracker's names of the load-balancing loss; a run has at most one of the two.
_BALANCE = ("load_balancing_loss", "seq_load_balancing_loss")
_Z_LOSS = "z_loss"
# Scales follow each microbatch. Training steps stabilize what is not stable after this many.
_MOST_MICROBATCHES = 8
# A scale that falls to no less than this share has saturated at most a few values in 100,000 (same file).
_STABLE = 0.5


def find_first_scales(
    trainable: Trainable,
    iterators: Sequence[BatchIterator | None],
    num_samples: int | None = None,
    sequence_length: int | None = None,
) -> int:
    """Repeats the batch of the next step until its gradients have scales; returns the number of passes.

    Every rank calls it, with `num_samples` and `sequence_length` as in `train_step`. It does nothing if there are
    scales, as in a resumed run. The passes change scales, histories and, with dropout, random states. Gradients stay
    in their buffers, for the next step to clear, and the iterators stay at the next step's batch.
    """
    model = trainable.model
    # As many in a pass as in a step: gradients are divided by their number.
    layout = model.spec.layout
    num_microbatches = layout.num_microbatches if num_samples is None else model.spec.microbatches_of(num_samples)

    def run_pass() -> None:
        batches = [None if each is None else iter(each.peek(num_microbatches)) for each in iterators]
        compute_gradients(trainable, batches, num_samples, sequence_length)

    return stabilize_scales(lambda: gradient_scales(model.gpt_chunks), run_pass, num_microbatches)


def stabilize_scales(read: Callable[[], torch.Tensor], run_pass: Callable[[], None], num_microbatches: int) -> int:
    """Runs passes until one halves no scale, at most eight microbatches; returns the number of passes.

    Every rank calls it. `read` returns this rank's scales, 1 where no pass has shown an amax. If there are scales
    already, no pass runs.
    """
    scales = read()
    if _on_any_rank(scales != 1.0):
        return 0
    # A scalar for all layers: Transformer Engine makes some layers' scales only in the first pass.
    before = scales.new_ones(())
    num_passes, stable = 0, False
    while not stable and num_passes * num_microbatches < _MOST_MICROBATCHES:
        run_pass()
        num_passes += 1
        scales = read()
        stable = not _on_any_rank((scales < before * _STABLE) | ((before == 1.0) & (scales != 1.0)))
        before = scales
    return num_passes


def _on_any_rank(flags: torch.Tensor) -> bool:
    """Whether any flag is set on any rank; every rank calls it and waits for the device."""
    count = flags.sum()
    torch.distributed.all_reduce(count)
    return count.item() > 0


class Fp8Watch:
    """Samples FP8 tensors in steps that are logged, for its warnings; idle without FP8 and with CUDA graphs.

    Every `logging.fp8_statistics_interval`-th step is counted in full and recorded. A replayed graph reports no
    products.
    """

    def __init__(self, model: Model) -> None:
        spec = model.spec
        settings, config = spec.fp8, spec.config
        self._watches = settings is not None and spec.kernels.cuda_graph_impl is None
        self._statistics_interval = config.logging.fp8_statistics_interval
        self._log_interval = config.trainer.log_every_n_steps
        if settings is not None and self._watches:
            self._collector = StatisticsCollector(live_layers(model), model.gpt_chunks, spec.platform.device)
            self._alarms = Alarms(settings, config.logging.fp8_saturation_threshold)

    def _records(self, step: int) -> bool:
        return self._statistics_interval is not None and step % self._statistics_interval == 0

    def step(self, step: int) -> AbstractContextManager[None]:
        """Encloses a training step; every rank calls it."""
        records = self._records(step)
        if not self._watches or not (records or step % self._log_interval == 0):
            return nullcontext()
        return self._collector.observe(step, sampled=not records)

    def records(self) -> Iterator[Fp8Record]:
        """Records of the steps observed since the last call; waits for the device if there are any.

        A sampled step's record has warnings only; without warnings there is no record.
        """
        if not self._watches:
            return
        for statistics in self._collector.read():
            warnings, is_recorded = tuple(self._alarms.check(statistics)), self._records(statistics.step)
            if is_recorded or warnings:
                tensors = tuple(map(_recorded, statistics.tensors)) if is_recorded else ()
                yield Fp8Record(step=statistics.step, tensors=tensors, warnings=warnings)


def _recorded(tensor: TensorStatistics) -> Fp8Tensor:
    return Fp8Tensor(**{field.name: getattr(tensor, field.name) for field in fields(Fp8Tensor)})


class ExpertWatch:
    """Follows all routers of a model; idle without experts."""

    def __init__(self, model: Model, *, step: int) -> None:
        self._num_layers = model.spec.model.num_layers
        self._num_experts = model.spec.model.num_moe_experts
        self._spec = model.spec
        self._step = step
        if self._num_experts is None:
            return
        # An earlier model in this process may have had other layers.
        destroy_moe_metrics_tracker()
        device = torch.cuda.current_device()
        self._tokens = torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64, device=device)
        for chunk in model.gpt_chunks:
            for layer in chunk.decoder.layers:
                router = layer.mlp.router
                assert isinstance(router, TopKRouter)
                router.register_forward_hook(partial(self._count, layer.layer_number - 1))

    def restart(self, step: int) -> None:
        """Begins a new interval."""
        self._step = step
        if self._num_experts is not None:
            get_moe_metrics_tracker().clear()
            self._tokens.zero_()

    def _count(self, layer: int, router: TopKRouter, arguments: Any, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training:
            self._tokens[layer] += result[1].sum(dim=0)

    def records(self, step: int, num_samples: int | None = None) -> Iterator[ExpertsRecord]:
        """A record of the steps since the last call, the same on all ranks; every rank calls it and waits.

        These steps had so many samples; None: model.global_batch_size each.
        """
        if self._num_experts is None:
            return
        tracked = get_moe_metrics_tracker().metrics
        losses = torch.zeros(2, self._num_layers, dtype=torch.float64, device=self._tokens.device)
        for name, entry in tracked.items():
            losses[0 if name in _BALANCE else 1] += entry.values
        # Ranks that share a sequence have parts of its balance and means of its z-loss; replicas have their own.
        total = torch.cat([losses.view(-1), self._tokens.view(-1)])
        torch.distributed.all_reduce(total)
        replicas = parallel_state.get_data_parallel_world_size()
        of_a_sequence = parallel_state.get_tensor_and_context_parallel_world_size()
        if num_samples is None:
            num_samples = (step - self._step) * self._spec.model.global_batch_size
        times = self._spec.microbatches_of(num_samples) * self._num_layers * replicas
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
            idle_experts=int((tokens == 0).sum().item()),
        )
