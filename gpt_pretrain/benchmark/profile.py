"""A few steps under torch's profiler: a trace to look at, and the kernels that their time went to."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpt_pretrain.benchmark.kinds import IDLE, kernel_kind
from gpt_pretrain.benchmark.results import Kernel, Part

# Kernels that are listed.
_MOST = 15


class StepProfiler:
    """Profiles the steps between its first and its last call.

    Args:
        trace: File that receives the trace, for https://ui.perfetto.dev or chrome://tracing; .gz packs it.
        num_steps: Steps to record.
        cuda: Whether kernels of a GPU are what counts, rather than operations of torch.
    """

    def __init__(self, trace: Path, num_steps: int, *, cuda: bool) -> None:
        self.kernels: tuple[Kernel, ...] = ()
        self.parts: tuple[Part, ...] = ()
        self._trace = trace
        self._num_steps = num_steps
        self._cuda = cuda
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities)

    def after_step(self, number: int) -> None:
        """Starts behind step 0 and ends, with the trace written, behind step `num_steps`."""
        if number == 0:
            self._profile.start()
        elif number == self._num_steps:
            torch.cuda.synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))
            self.kernels = longest_kernels(self._profile.key_averages(), self._num_steps, cuda=self._cuda)
            if self._cuda:
                self.parts = parts_of_a_step(self._profile.events(), self._num_steps)


def longest_kernels(events: Sequence[Any], num_steps: int, *, cuda: bool) -> tuple[Kernel, ...]:
    """The kernels that took longest, the longest first.

    Args:
        events: torch's averages by name (`FunctionEventAvg`), whose times are in microseconds.
        num_steps: Steps that they are the sum of.
        cuda: Whether the GPU's kernels count, or the processor's operations.
    """
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    times = [
        (event, event.self_device_time_total if cuda else event.self_cpu_time_total)
        for event in events
        # A GPU's annotations span the kernels within them, which are counted themselves.
        if event.device_type == device and not (cuda and event.is_user_annotation)
    ]
    total = sum(time for _, time in times)
    longest = sorted(times, key=lambda entry: entry[1], reverse=True)[:_MOST]
    return tuple(
        Kernel(
            name=event.key, calls=event.count / num_steps, time_ms=time / num_steps / 1e3, share=time / (total or 1.0)
        )
        for event, time in longest
        if time > 0
    )


def parts_of_a_step(events: Sequence[Any], num_steps: int) -> tuple[Part, ...]:
    """The time of a GPU's kernels by kind, and the time in which it had none, the longest first.

    Args:
        events: torch's single events (`FunctionEvent`), whose times are in microseconds.
        num_steps: Steps that they are the sum of.
    """
    kernels = sorted(
        (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation),
        key=lambda event: event.time_range.start,
    )
    times: Counter[str] = Counter()
    end = kernels[0].time_range.start if kernels else 0.0
    for kernel in kernels:
        times[kernel_kind(kernel.name)] += kernel.time_range.end - kernel.time_range.start
        times[IDLE] += max(0.0, kernel.time_range.start - end)
        end = max(end, kernel.time_range.end)
    return tuple(Part(kind=kind, time_ms=time / num_steps / 1e3) for kind, time in times.most_common())
