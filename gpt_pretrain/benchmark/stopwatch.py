"""The clock of a measured run, read at the end of steps: the same for the application's loop and the bare one.

The host waits for the device after the first step, after the warm-up and after each interval of timed steps, and at no
other step; so kernels queue up within an interval as they do in a run.
"""

import time

import torch

from gpt_pretrain.benchmark.profile import StepProfiler
from gpt_pretrain.config.schema_run import BenchmarkConfig
from gpt_pretrain.megatron.update import StepResult
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.training.performance import memory_gib
from gpt_pretrain.training.step import mean_loss


class Stopwatch:
    """Counts the steps of a run, and times those behind the warm-up.

    Args:
        benchmark: How many steps.
        platform: This machine, for its memory.
        launched_unix: When this process was started.
        profiler: Records the steps that follow the timed ones; None where there are none.
    """

    def __init__(
        self,
        benchmark: BenchmarkConfig,
        *,
        platform: Platform,
        launched_unix: float,
        profiler: StepProfiler | None,
    ) -> None:
        self.first_step_s: float | None = None
        self.step_times_s: list[float] = []
        self.memory_gib: float | None = None
        self.loss: float | None = None
        self.losses: tuple[float, ...] = ()
        self._benchmark = benchmark
        self._platform = platform
        self._launched_unix = launched_unix
        self._profiler = profiler
        self._last = benchmark.warmup_steps + benchmark.steps
        self._began = 0.0
        self._results: list[StepResult] = []

    def after_step(self, step: int, result: StepResult | None = None) -> None:
        """Takes note of a step, the first of which is 1.

        Args:
            step: Its number.
            result: What it computed, whose loss is then known.
        """
        if step == 1:
            torch.cuda.synchronize()
            self.first_step_s = time.time() - self._launched_unix
        if result is not None and step <= self._last:
            self._results.append(result)
        timed = step - self._benchmark.warmup_steps
        if timed == 0:
            torch.cuda.synchronize()
            self._began = time.monotonic()
        elif timed > 0 and step <= self._last:
            self._time(timed)
        if self._profiler is not None and step >= self._last:
            self._profiler.after_step(step - self._last)

    def _time(self, timed: int) -> None:
        if timed % self._benchmark.interval:
            return
        torch.cuda.synchronize()
        self.step_times_s.append((time.monotonic() - self._began) / self._benchmark.interval)
        if timed == self._benchmark.steps:
            self.memory_gib = memory_gib(self._platform)
            self._read_losses()
        self._began = time.monotonic()

    def _read_losses(self) -> None:
        if not self._results:
            return
        sums = torch.stack([result.loss_sum_and_tokens for result in self._results]).cpu()
        self.loss = mean_loss(sums[-self._benchmark.interval :].sum(dim=0))
        self.losses = tuple(map(mean_loss, sums))
