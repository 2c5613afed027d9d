"""FP8 around the first step of a start: its scales are found before, and the step proves what runs in FP8."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.proof import Proof
from gpt_pretrain.megatron.optimizer import learning_rate
from gpt_pretrain.report.records import Fp8CoverageRecord, Record
from gpt_pretrain.training.first_scales import find_first_scales
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.watchdog import Watchdog


class FirstStep:
    """What FP8 asks of the first step, of resumed runs too; does nothing where it is off, or later.

    Args:
        trainable: Model and optimizer.
        log: Receives the record of what was proven, on every rank.
        watchdog: Hears of what takes longer than a step.
        meter: Leaves out what is no part of the step.
    """

    def __init__(
        self,
        trainable: Trainable,
        *,
        log: Callable[[Record], None],
        watchdog: Watchdog,
        meter: Meter,
    ) -> None:
        self._trainable = trainable
        self._log = log
        self._watchdog = watchdog
        self._meter = meter
        self._proof = Proof(trainable.model, trainable.optimizer) if trainable.model.spec.fp8 is not None else None
        self._scale_passes = 0

    def find_scales(self, iterators: Sequence[BatchIterator | None], num_microbatches: int) -> None:
        """With delayed scaling, finds the scales that no checkpoint has brought.

        Args:
            iterators: At the first step's batch, where they stay.
            num_microbatches: Of a step and data-parallel rank.
        """
        spec = self._trainable.model.spec
        if spec.fp8 is None or not spec.fp8.recipe.keeps_history:
            return
        # Experts, whose watch would count these passes, are refused with delayed scaling.
        with self._watchdog.busy("finding the first scales of FP8"), self._meter.paused():
            self._scale_passes = find_first_scales(self._trainable, iterators, spec.model, num_microbatches)

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
