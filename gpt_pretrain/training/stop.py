"""Why a run ends before its last step, or rolls back: signals, clocks, skipped steps, spikes and missing tokens.

Ctrl-C, SIGTERM, SIGHUP (the terminal has closed, or nobody reads the output any more), SIGUSR1 (which Slurm sends ahead
of a time limit: `sbatch --signal=USR1@300`) and `trainer.max_time` reach the ranks at different moments. So every rank
tells the others what it knows at the end of each step, through an asynchronous all-reduce between the CPUs (gloo), and
reads the answer one step later: all ranks see the same answer at the same step, and none waits for its GPU. At most the
present step, the next one and the save lie between a signal and the checkpoint. Later signals change nothing: launchers
repeat them, and they must not interrupt the save.

Each step's loss, gradient norm and skipped flag are copied to the host beside the computation and read one step later,
when they have long arrived. So the host is at most one step ahead of the GPU, and all ranks read the same numbers at
the same step. That is not too late: a step that is not finite has changed nothing (`megatron/optimizer.py`).
"""

import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar, Self

import torch

from gpt_pretrain.config.schema import TrainerConfig
from gpt_pretrain.launch.signals import INTERRUPTED, REQUEUE
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.report.records import EndReason, LossSpikeRecord, Record, SkippedStepRecord

EXIT_CODES: Mapping[EndReason, int] = {
    "max_steps": 0,
    "callback": 0,
    "max_time": REQUEUE,
    "terminated": REQUEUE,
    "warned": REQUEUE,
    "interrupted": INTERRUPTED,
    "not_finite": 1,
    "loss_spike": 1,
}
# If ranks disagree, the last of these counts.
_REASONS: tuple[EndReason | None, ...] = (None, "max_time", "callback", "interrupted", "warned", "terminated")
_SIGNALS: Mapping[int, EndReason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",
    signal.SIGUSR1: "warned",
}
# Reasons that end a whole sweep, not only the present run.
ASKED_FOR = frozenset(_SIGNALS.values())
# Losses that show how much a loss usually varies: enough for a median, few compared with a run.
SPIKE_WINDOW = 64
SPIKE_MIN_LOSSES = 16
# The median absolute deviation of a normal distribution is its standard deviation divided by this.
_MAD_TO_SIGMA = 1.4826
# On a batch that is repeated forever the loss hardly varies: a rounding difference is no spike.
_MIN_SIGMA = 0.01
# Tokens are counted in fp32, which has no odd numbers above 2^24.
_COUNT_ROUNDING = 1e-6


class StopRequest:
    """Collects reasons to stop, and knows when to save; a context manager that owns the signal handlers meanwhile.

    The run stops `max_time_s` from now, and saves `save_interval_s` from now and from each save; None: never.
    """

    def __init__(self, max_time_s: float | None, save_interval_s: float | None = None) -> None:
        self._deadline = None if max_time_s is None else time.monotonic() + max_time_s
        self._save_interval_s = save_interval_s
        self._saved_at = time.monotonic()
        self.save_is_due = False
        """Whether it is time to save, the same on all ranks; `poll` sets it, `saved` clears it."""
        self._signalled: EndReason | None = None
        self._asked_by_callback = False
        self._announces = torch.distributed.get_rank() == 0
        self._several_ranks = torch.distributed.get_world_size() > 1
        self._group = torch.distributed.new_group(backend="gloo") if self._several_ranks else None
        # A reason's number, and whether to save by rank 0's clock.
        self._asked = torch.zeros(2, dtype=torch.int32)
        self._pending: torch.distributed.Work | None = None
        self._saved_since_asked = False

    def __enter__(self) -> Self:
        # nohup ignores SIGHUP, and that must stay so.
        heard = [each for each in _SIGNALS if (each, signal.getsignal(each)) != (signal.SIGHUP, signal.SIG_IGN)]
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # Writing to the closed terminal would be an error, and would end the run before its save.
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                for descriptor in self._terminals:
                    os.dup2(nowhere.fileno(), descriptor)
        if self._signalled is None and self._announces:
            # Ctrl-C may have ended the reader of a pipe, too.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step\n")
        self._signalled = self._signalled or _SIGNALS[number]

    def ask(self) -> None:
        """A callback asks this rank to stop."""
        self._asked_by_callback = True

    def _own_reason(self) -> EndReason | None:
        if self._signalled is None and self._asked_by_callback:
            return "callback"
        if self._signalled is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "max_time"
        return self._signalled

    def _save_time_has_come(self) -> bool:
        return self._save_interval_s is not None and time.monotonic() >= self._saved_at + self._save_interval_s

    def saved(self) -> None:
        """Restarts the interval: a save has begun, for whatever reason. Every rank calls it after the same step."""
        self._saved_at = time.monotonic()
        self.save_is_due = False
        self._saved_since_asked = True

    def poll(self) -> EndReason | None:
        """Why to stop after this step, the same on all ranks; every rank calls it once a step."""
        if not self._several_ranks:
            self.save_is_due = self._save_time_has_come()
            return self._own_reason()
        agreed: EndReason | None = None
        if self._pending is not None:
            self._pending.wait()
            reason, save = self._asked.tolist()
            agreed = _REASONS[reason]
            # Rank 0 may have asked before a save that began for another reason.
            self.save_is_due = self.save_is_due or (bool(save) and not self._saved_since_asked)
        if agreed is None:
            self._saved_since_asked = False
            self._asked[0] = _REASONS.index(self._own_reason())
            self._asked[1] = self._announces and not self.save_is_due and self._save_time_has_come()
            self._pending = torch.distributed.all_reduce(
                self._asked, op=torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )
        return agreed


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step that went wrong."""

    step: int
    first_sample: int
    num_samples: int


class GivesUpError(Exception):
    """The run gives up because steps go wrong; raised on all ranks at the same step."""

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
        bad_step = BadStep(step=spike.step, first_sample=spike.first_sample, num_samples=spike.num_samples)
        super().__init__(bad_step, f"step {spike.step}: loss {spike.loss:.4f} is a spike, {why}")


class TokensMissingError(Exception):
    """A step's loss was not computed from the tokens of its samples: a defect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    step: int
    first_sample: int
    num_samples: int
    values: torch.Tensor
    """[4] on the host: sum of losses, tokens, gradient norm, skipped."""
    arrived: torch.cuda.Event | None


class StepGuard:
    """Counts skipped steps, finds loss spikes, and compares the number of a step's tokens with that of its samples.

    Checkpoints keep the losses that it has seen, so that a resumed run finds the same spikes as an uninterrupted one.
    A sample has `num_tokens`; None if a mask may leave out any number of them.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        *,
        num_tokens: int | None = None,
        losses: Iterable[float] = (),
        spikes: Iterable[int] = (),
    ) -> None:
        self._max_skipped_steps = trainer.max_skipped_steps
        self._spike_threshold = trainer.spike_threshold
        self._num_tokens = num_tokens
        self._pending: _Seen | None = None
        self._pinned: list[torch.Tensor] = []
        self._in_a_row = 0
        self.losses = deque(losses, maxlen=SPIKE_WINDOW)
        """The last ones."""
        self.spikes = deque(spikes, maxlen=SPIKE_WINDOW)
        """The last steps with a spike."""
        self._last_bad: BadStep | None = None

    def check(self) -> None:
        """Raises a NotFiniteError once `trainer.max_skipped_steps` steps in a row were skipped."""
        if self._last_bad is not None and self._in_a_row >= self._max_skipped_steps:
            raise NotFiniteError(
                self._last_bad,
                f"loss, gradient or FP8 tensors were not finite in {self._in_a_row} steps in a row, up to step "
                f"{self._last_bad.step} (trainer.max_skipped_steps={self._max_skipped_steps})",
            )

    def add(self, step: int, first_sample: int, num_samples: int, result: StepResult) -> list[Record]:
        """Notes a step and its samples; returns the records of the step before (`read`)."""
        records = self.read()
        values = torch.cat([result.loss_sum_and_tokens, result.grad_norm.view(1), result.skipped.float().view(1)])
        arrived = None
        if values.is_cuda:
            # Pinned, so that the copy waits in the GPU's queue instead of the host. One buffer is read while the other
            # is written.
            self._pinned = self._pinned or [torch.empty(4, pin_memory=True) for _ in range(2)]
            values = self._pinned[step % 2].copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending = _Seen(
            step=step, first_sample=first_sample, num_samples=num_samples, values=values, arrived=arrived
        )
        return records

    def read(self) -> list[Record]:
        """Records of the step noted last, at most one; waits for its numbers.

        Raises:
            TokensMissingError: The step saw fewer tokens than its samples have, or some of them twice.
        """
        seen, self._pending = self._pending, None
        if seen is None:
            return []
        if seen.arrived is not None:
            seen.arrived.synchronize()
        loss_sum, num_tokens, grad_norm, skipped = seen.values.tolist()
        loss = loss_sum / num_tokens if num_tokens else math.nan
        expected = None if self._num_tokens is None else seen.num_samples * self._num_tokens
        if expected is not None and abs(num_tokens / expected - 1) > _COUNT_ROUNDING:
            raise TokensMissingError(
                f"step {seen.step} computed its loss from {num_tokens:,.0f} tokens, and its {seen.num_samples:,} "
                f"samples have {expected:,}: its ranks did not share them; this is a bug in "
                "gpt_pretrain, and the run has learned something other than what was asked"
            )
        if not skipped:
            self._in_a_row = 0
            return self._find_spike(seen, loss)
        self._in_a_row += 1
        self._last_bad = BadStep(step=seen.step, first_sample=seen.first_sample, num_samples=seen.num_samples)
        return [
            SkippedStepRecord(
                step=seen.step,
                loss=loss,
                grad_norm=grad_norm,
                in_a_row=self._in_a_row,
                first_sample=seen.first_sample,
                num_samples=seen.num_samples,
            )
        ]

    def _find_spike(self, seen: _Seen, loss: float) -> list[Record]:
        """A spike lies above the median of the last losses by more than `trainer.spike_threshold` robust deviations.

        The median and the median absolute deviation (Rousseeuw and Croux 1993) do not follow the spikes themselves, as
        a mean would.
        """
        # If the mask leaves no token, there is no loss.
        if self._spike_threshold is None or math.isnan(loss):
            return []
        earlier = list(self.losses)
        self.losses.append(loss)
        if len(earlier) < SPIKE_MIN_LOSSES:
            return []
        median = statistics.median(earlier)
        sigma = _MAD_TO_SIGMA * statistics.median(abs(each - median) for each in earlier)
        limit = median + self._spike_threshold * max(sigma, _MIN_SIGMA)
        if loss > limit:
            self.spikes.append(seen.step)
            return [
                LossSpikeRecord(
                    step=seen.step,
                    loss=loss,
                    median=median,
                    limit=limit,
                    first_sample=seen.first_sample,
                    num_samples=seen.num_samples,
                )
            ]
        return []
