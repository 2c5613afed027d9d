"""The saves of a training loop: begun, waited for, logged; and what a failed one means for the run."""

from collections.abc import Callable, Sequence

from gpt_pretrain.checkpoint.save import CheckpointSaver, SaveOutcome
from gpt_pretrain.checkpoint.state import Progress
from gpt_pretrain.config.choices import OnSaveError
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.schema import CheckpointConfig
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import CheckpointRecord, Record
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.watchdog import Watchdog


class Saves:
    """Saves what is trained, beside the loop or while it waits; every rank has one and calls it at the same steps.

    A save that begins is settled at a later step: all methods but `reserve` raise a RunError if a save has failed and
    `checkpoint.on_save_error` is stop.

    Args:
        saver: Writes the checkpoints.
        model: What is saved.
        config: How.
        log: Receives a record of each save.
        watchdog: Hears what takes longer than a step.
        meter: Keeps saves out of the step time.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        model: Model,
        config: CheckpointConfig,
        *,
        log: Callable[[Record], None],
        watchdog: Watchdog,
        meter: Meter,
    ) -> None:
        self._saver = saver
        self._model = model
        self._config = config
        self._log = log
        self._watchdog = watchdog
        self._meter = meter
        self.problem: str | None = None
        """Why the newest save has failed; None if it has not."""

    def reserve(self) -> None:
        """Takes host memory before the first step, lest the first save waits for it.

        A run that saves only by the clock may end sooner: its first save takes the memory.
        """
        if self._config.async_save and self._config.save_interval is not None:
            with self._watchdog.busy("reserving host memory"), self._model.gathered_parameters():
                self._saver.reserve()

    def begin(self, progress: Progress, *, by_clock: bool) -> None:
        """Begins to save; an earlier save that has failed ends the run before that.

        Args:
            progress: How far the run is.
            by_clock: See `CheckpointSaver.save`.
        """
        with self._watchdog.busy("saving a checkpoint"), self._meter.paused(), self._model.gathered_parameters():
            self._settle(self._saver.wait(), progress.step)
            outcomes = self._saver.save(progress, by_clock=by_clock)
        self._settle(outcomes, progress.step)

    def poll(self, step: int) -> None:
        """Settles the save that has ended, if one has; call it after every step."""
        self._settle(self._saver.poll(), step)

    def wait(self, step: int) -> None:
        """Waits for the save that is being written, if one is."""
        with self._watchdog.busy("waiting for a checkpoint"):
            outcomes = self._saver.wait()
        self._settle(outcomes, step)

    def _settle(self, outcomes: Sequence[SaveOutcome], step: int) -> None:
        for outcome in outcomes:
            self.problem = outcome.problem
            self._log(
                CheckpointRecord(
                    step=step,
                    saved_step=outcome.step,
                    num_bytes=outcome.num_bytes,
                    stall_s=outcome.stall_s,
                    time_s=outcome.time_s,
                    problem=outcome.problem,
                )
            )
            if outcome.problem is not None and self._config.on_save_error is OnSaveError.stop:
                raise RunError(outcome.problem)
