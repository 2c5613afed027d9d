"""Watching FP8 in the training loop: which steps are observed, and the records that they become."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

from gpt_pretrain.fp8.alarms import Alarms
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import Fp8Record, Fp8Tensor


class Fp8Watch:
    """Observes every `logging.fp8_statistics_interval`-th step; does nothing where it is null or FP8 is off.

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
