"""Finds skipped steps, loss spikes and missing tokens without waiting for the GPU.

Each step's loss, gradient norm and skipped flag are copied to the host beside the computation. The host reads them one
step later, when they have long arrived: it is then at most one step ahead of the GPU, which still has a whole step to
compute, and all ranks read the same numbers at the same step. A step whose loss, gradient or FP8 tensors are not
finite has changed nothing (`megatron/optimizer.py`), so learning of it late does no harm.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from gpt_pretrain.config.schema import TrainerConfig
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.report.records import EndReason, LossSpikeRecord, Record, SkippedStepRecord

# Losses that show how much a loss usually varies: enough for a median, few compared with a run.
SPIKE_WINDOW = 64
SPIKE_MIN_LOSSES = 16
# The median absolute deviation of a normal distribution is its standard deviation divided by this.
_MAD_TO_SIGMA = 1.4826
# Tokens are counted in fp32, which has no odd numbers above 2^24.
_COUNT_ROUNDING = 1e-6
# On a batch repeated for ever the loss hardly varies: a rounding difference is no spike.
_MIN_SIGMA = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    step: int
    first_sample: int
    values: torch.Tensor
    """[4] on the host: sum of losses, tokens, gradient norm, whether it was skipped."""
    arrived: torch.cuda.Event | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step that went wrong."""

    step: int
    first_sample: int


class GivesUpError(Exception):
    """The run gives up on steps that go wrong; raised on all ranks at the same step."""

    reason: ClassVar[EndReason]

    def __init__(self, bad_step: BadStep, why: str) -> None:
        self.bad_step = bad_step
        super().__init__(why)


class NotFiniteError(GivesUpError):
    """Loss, gradient or weights are not finite."""

    reason = "not_finite"


class TooManySpikesError(GivesUpError):
    """The loss spiked, and the run may not or cannot go back again; `why` ends the message."""

    reason = "loss_spike"

    def __init__(self, spike: LossSpikeRecord, why: str) -> None:
        bad_step = BadStep(step=spike.step, first_sample=spike.first_sample)
        super().__init__(bad_step, f"step {spike.step}: loss {spike.loss:.4f} is a spike, {why}")


class TokensMissingError(Exception):
    """A step's loss was not computed from its samples' tokens: a defect, and the run has learnt something else."""


class StepGuard:
    """Counts skipped steps, finds loss spikes, and compares the number of a step's tokens with its samples.

    The losses it has seen are part of a checkpoint, so that a resumed run finds the spikes that an uncut one does.
    `num_tokens` counts those of all ranks; None where a mask may leave out any number of them.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        num_samples: int,
        *,
        num_tokens: int | None = None,
        losses: Iterable[float] = (),
        spikes: Iterable[int] = (),
    ) -> None:
        self._max_skipped_steps = trainer.max_skipped_steps
        self._spike_threshold = trainer.spike_threshold
        self._num_samples = num_samples
        self._num_tokens = num_tokens
        self._pending: _Seen | None = None
        self._pinned: list[torch.Tensor] = []
        self._in_a_row = 0
        self._losses = deque(losses, maxlen=SPIKE_WINDOW)
        self._spikes = deque(spikes, maxlen=SPIKE_WINDOW)
        self._last_bad: BadStep | None = None

    @property
    def losses(self) -> tuple[float, ...]:
        """The last losses that were read, at most `SPIKE_WINDOW`."""
        return tuple(self._losses)

    @property
    def spikes(self) -> tuple[int, ...]:
        """The last steps with a spike, at most `SPIKE_WINDOW`."""
        return tuple(self._spikes)

    def check(self) -> None:
        """Whether the run can go on.

        Raises:
            NotFiniteError: `trainer.max_skipped_steps` steps in a row were skipped.
        """
        if self._last_bad is not None and self._in_a_row >= self._max_skipped_steps:
            raise NotFiniteError(
                self._last_bad,
                f"loss, gradient or FP8 tensors were not finite in {self._in_a_row} steps in a row, up to step "
                f"{self._last_bad.step} (trainer.max_skipped_steps={self._max_skipped_steps})",
            )

    def add(self, step: int, first_sample: int, result: StepResult) -> list[Record]:
        """Notes a step; returns the records of the step before (`read`)."""
        told = self.read()
        values = torch.cat([result.loss_sum_and_tokens, result.grad_norm.view(1), result.skipped.float().view(1)])
        arrived = None
        if values.is_cuda:
            # Pinned, so that the copy waits in the GPU's queue instead of the host. One buffer is read while the other
            # is written.
            self._pinned = self._pinned or [torch.empty(4, pin_memory=True) for _ in range(2)]
            values = self._pinned[step % 2].copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending = _Seen(step=step, first_sample=first_sample, values=values, arrived=arrived)
        return told

    def read(self) -> list[Record]:
        """What there is to say of the step that was noted last; waits for it.

        Raises:
            TokensMissingError: That step saw fewer tokens than its samples have, or some of them twice.
        """
        seen, self._pending = self._pending, None
        if seen is None:
            return []
        if seen.arrived is not None:
            seen.arrived.synchronize()
        loss_sum, num_tokens, grad_norm, skipped = seen.values.tolist()
        loss = loss_sum / num_tokens if num_tokens else math.nan
        if self._num_tokens is not None and abs(num_tokens / self._num_tokens - 1) > _COUNT_ROUNDING:
            raise TokensMissingError(
                f"step {seen.step} computed its loss from {num_tokens:,.0f} tokens, and its {self._num_samples:,} "
                f"samples have {self._num_tokens:,}: its ranks did not share them out; this is a "
                "defect of gpt_pretrain, and what the run has learnt is not what was asked of it"
            )
        if skipped:
            self._in_a_row += 1
            self._last_bad = BadStep(step=seen.step, first_sample=seen.first_sample)
            return [
                SkippedStepRecord(
                    step=seen.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    in_a_row=self._in_a_row,
                    first_sample=seen.first_sample,
                    num_samples=self._num_samples,
                )
            ]
        self._in_a_row = 0
        return self._find_spike(seen, loss)

    def _find_spike(self, seen: _Seen, loss: float) -> list[Record]:
        """A spike lies above the median of the last losses by more than `trainer.spike_threshold` robust deviations.

        A median and the median absolute deviation (Rousseeuw and Croux 1993) do not follow the spikes themselves, as a
        mean would.
        """
        # Where the mask leaves no token there is no loss.
        if self._spike_threshold is None or math.isnan(loss):
            return []
        told: list[Record] = []
        if len(self._losses) >= SPIKE_MIN_LOSSES:
            median = statistics.median(self._losses)
            sigma = _MAD_TO_SIGMA * statistics.median(abs(earlier - median) for earlier in self._losses)
            limit = median + self._spike_threshold * max(sigma, _MIN_SIGMA)
            if loss > limit:
                self._spikes.append(seen.step)
                told.append(
                    LossSpikeRecord(
                        step=seen.step,
                        loss=loss,
                        median=median,
                        limit=limit,
                        first_sample=seen.first_sample,
                        num_samples=self._num_samples,
                    )
                )
        self._losses.append(loss)
        return told
