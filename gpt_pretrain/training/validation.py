"""Validation between two steps: the loss over the same samples each time, in time that does not count as training's."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import Record, ValidationRecord
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.step import validate
from gpt_pretrain.training.watchdog import Watchdog


class Validation:
    """Validates a model; every rank has one.

    Args:
        config: The run's configuration.
        model: What is trained.
        batches: For each chunk of the model on this rank (`step.data_iterators`): the same samples at each validation.
        num_microbatches: Of a global batch on this rank.
        log: Receives the record.
        meter: Does not count the time.
        watchdog: Hears of each batch.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        batches: Sequence[Iterator[Batch] | None],
        num_microbatches: int,
        *,
        log: Callable[[Record], None],
        meter: Meter,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._model = model
        self._batches = batches
        self._num_microbatches = num_microbatches
        self._log = log
        self._meter = meter
        self._watchdog = watchdog

    def run(self, step: int) -> None:
        """Logs the loss over the first `trainer.limit_val_batches` global batches of the validation split.

        Args:
            step: Optimizer steps done.
        """
        num_batches = self._config.trainer.limit_val_batches
        with self._meter.paused(), self._model.gathered_parameters():
            began = time.monotonic()
            loss = validate(
                self._model,
                self._batches,
                self._config.model,
                self._num_microbatches,
                num_batches,
                on_batch=lambda: self._watchdog.progress("a batch of the validation"),
            )
            self._watchdog.progress("what follows the validation")
            self._log(
                ValidationRecord(
                    step=step,
                    loss=loss,
                    perplexity=math.inf if loss > 700 else math.exp(loss),
                    num_samples=num_batches * self._config.model.global_batch_size,
                    time_s=time.monotonic() - began,
                )
            )
