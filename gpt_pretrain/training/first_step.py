"""FP8 around the first step of a start: before it the run finds scales, and the step proves what runs in FP8.

Delayed scaling casts with the amaxes of earlier passes. Before the first pass there are none, and Transformer Engine
starts with scales of 1. Gradients shrink with the tokens of a batch, and E5M2's smallest number is 2^-16: under a scale
of 1 little or nothing of a gradient is left. A first step of one microbatch trains on that little: a seventh of the
gradient's norm with GPT-2 124M and 32,768 tokens, after which the loss was 0.4 to 2.4% above BF16's for fifteen steps
(benchmarks/fp8_h200.md#until-scales-have-settled).

One pass does not show all amaxes. The first shows the gradients that come down the residual stream, which is in BF16.
Gradients inside a layer come out of FP8 products of gradients that were flushed, and what they would add is missing
further down. The next pass shows more, and saturates where it does. After two passes over 131,072 tokens, gradients of
the lowest of twelve layers were still ten times beyond what their scales take (same file).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.proof import Proof
from gpt_pretrain.fp8.statistics import gradient_scales
from gpt_pretrain.megatron.optimizer import learning_rate
from gpt_pretrain.report.records import Fp8CoverageRecord, Record
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.step import compute_gradients
from gpt_pretrain.training.watchdog import Watchdog

# Scales follow each microbatch. Where they have not settled after so many, the training steps go on with it.
_MOST_MICROBATCHES = 8
# A scale that falls no further than this has saturated at most a few values in 100,000 (same file).
_SETTLED = 0.5


class FirstStep:
    """What FP8 asks of a start's first step, resumed or not; does nothing without FP8, or at later steps.

    Args:
        trainable: Model and optimizer.
        log: Receives the record of what was proven, on every rank.
        watchdog: Is told of what takes longer than a step.
        meter: Leaves out what is no part of the step.
    """

    def __init__(
        self, trainable: Trainable, *, log: Callable[[Record], None], watchdog: Watchdog, meter: Meter
    ) -> None:
        self._trainable = trainable
        self._log = log
        self._watchdog = watchdog
        self._meter = meter
        self._proof = Proof(trainable.model, trainable.optimizer) if trainable.model.spec.fp8 is not None else None
        self._scale_passes = 0

    def find_scales(self, iterators: Sequence[BatchIterator | None]) -> None:
        """With delayed scaling, finds the scales that no checkpoint has brought.

        Args:
            iterators: At the first step's batch, where they stay.
        """
        spec = self._trainable.model.spec
        if spec.fp8 is None or not spec.fp8.recipe.keeps_history:
            return
        # Experts, whose watch would count these passes, are refused with delayed scaling.
        with self._watchdog.busy("finding the first scales of FP8"), self._meter.paused():
            self._scale_passes = find_first_scales(self._trainable, iterators)

    @contextmanager
    def proven(self, step: int) -> Iterator[None]:
        """Around each training step: in the first one FP8 runs as configured, or the run ends.

        Args:
            step: Its number.
        """
        proof, self._proof = self._proof, None
        if proof is None:
            yield
            return
        with proof.watching():
            yield
        with self._meter.paused():
            proven = proof.judge(learning_rate(self._trainable.optimizer))
        self._log(
            Fp8CoverageRecord(
                step=step,
                gemm_flops_share=proven.fp8_flops_share,
                parameter_bytes_share=proven.fp8_parameter_bytes_share,
                time_s=proven.time_s,
                first_scale_passes=self._scale_passes,
            )
        )


def find_first_scales(trainable: Trainable, iterators: Sequence[BatchIterator | None]) -> int:
    """Passes over the batch of the next step, so that its gradients have scales; every rank calls it.

    Does nothing where there are scales, as in a resumed run. The passes change scales and histories, and random states
    where there is dropout; nothing else that a step changes.

    Args:
        trainable: Model and optimizer; gradients stay in their buffers, for the next step to clear.
        iterators: At the next step's batch, where they stay.

    Returns:
        The number of passes.
    """
    model = trainable.model
    # Of a pass as of a step, since they divide the gradients.
    num_microbatches = model.spec.layout.num_microbatches

    def run_pass() -> None:
        batches = [None if each is None else iter(each.peek(num_microbatches)) for each in iterators]
        compute_gradients(trainable, batches)

    return settle_scales(lambda: gradient_scales(model.gpt_chunks), run_pass, num_microbatches)


def settle_scales(read: Callable[[], torch.Tensor], run_pass: Callable[[], None], num_microbatches: int) -> int:
    """Runs passes until one halves no scale, or eight microbatches have passed; every rank calls it.

    Args:
        read: This rank's scales, 1 where no pass has shown an amax.
        run_pass: Runs a pass.
        num_microbatches: Of a pass.

    Returns:
        The number of passes; none where there are scales already.
    """
    scales = read()
    if _on_any_rank(scales != 1.0):
        return 0
    # Stands for all layers, those too for which Transformer Engine makes a scale in the first pass.
    before = scales.new_ones(())
    num_passes, settled = 0, False
    while not settled and num_passes * num_microbatches < _MOST_MICROBATCHES:
        run_pass()
        num_passes += 1
        scales = read()
        settled = not _on_any_rank((scales < before * _SETTLED) | ((before == 1.0) & (scales != 1.0)))
        before = scales
    return num_passes


def _on_any_rank(flags: torch.Tensor) -> bool:
    """Whether one of them is set on any rank; every rank calls it, and it waits for the device."""
    count = flags.sum()
    torch.distributed.all_reduce(count)
    return count.item() > 0
