"""Watching FP8 in the training loop: which steps are observed, and the records that they become."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch

from gpt_pretrain.config.schema import Config
from gpt_pretrain.fp8.alarms import Alarms
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import Fp8Record, Fp8Tensor
from gpt_pretrain.spec.fp8 import fp8_settings


class Fp8Watch:
    """Observes every `logging.fp8_statistics_interval`-th step; does nothing where it is null or FP8 is off.

    Args:
        config: The run's configuration.
        model: This rank's model.
        device: Where it is.
    """

    def __init__(self, config: Config, model: Model, device: torch.device) -> None:
        settings, interval = fp8_settings(config.model), config.logging.fp8_statistics_interval
        self._interval: int | None = None
        if settings is not None and interval is not None:
            self._interval = interval
            self._collector = StatisticsCollector(config.model, model.gpt_chunks, device)
            self._alarms = Alarms(settings, config.logging.fp8_saturation_threshold, interval)

    def step(self, step: int) -> AbstractContextManager[None]:
        """What the training step of this number runs in; every rank calls it."""
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
