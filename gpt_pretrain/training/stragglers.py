"""Which rank is slow, and on which host: how long each rank's own passes take, beside those of its replicas.

A slow rank makes a step equally long on all ranks, since they wait for each other. So each logged step measures what a
rank does between the exchanges: the backward passes, and the forward passes too unless they wait for parameters
(`model.overlap_param_gather`). megatron-core's schedules mark both where it would start its own timers. Stages have
received their input by then, and replicas reduce gradients later or beside the pass. CUDA events also count the time in
which a GPU has nothing to do because its host is slow; nothing waits for them before the logger does. On a CPU it is
the processor's time of the rank's thread.

GPUs that exchange within a layer (tensor, context and expert parallel ones) take as long as their slowest member, and
stages have different work. So a rank is compared with the same stage in other replicas; without replicas nothing is
measured. megatron-core's `StragglerDetector` compares all ranks, opens a port and asks the driver each time.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.launch.process import this_process
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.report.records import RankTime, RankTimesRecord

# A rank is slow if its fastest step of this many logged ones …
_NUM_STEPS = 10
# … over at least this long is slower than its replicas' by so much. Chance only ever adds time, and rarely to each of
# the steps. GPUs of one kind differ by a few percent, processors that share caches with other programs by more.
LEAST_S = 30.0
_SLOW, _SLOW_ON_CPU = 1.1, 1.5
# Ranks that a record names.
_NUM_NAMED = 3


class _PassClock:
    """Stands in for megatron-core's timers (`TransformerConfig.timers`) and measures the named ones together."""

    def __init__(self, names: set[str], *, cuda: bool) -> None:
        self._names = names
        self._cuda = cuda
        # CUDA events, or seconds.
        self._marks: list[Any] = []
        self._ignores = True

    def __call__(self, name: str, log_level: int | None = None) -> "_PassClock":
        self._ignores = name not in self._names
        return self

    def start(self, barrier: bool = False) -> None:
        """Marks the beginning of a pass; does not wait for the device."""
        if self._ignores:
            return
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            # Without the time in which other processes have the core: ranks may outnumber the cores.
            self._marks.append(time.thread_time())

    # The end of a pass.
    stop = start

    def read(self) -> float:
        """Seconds of all passes; the device must be done with them."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return float(sum(begin.elapsed_time(end) / 1000 if self._cuda else end - begin for begin, end in pairs))


class Stragglers:
    """Finds slow ranks; idle in a run without replicas. Every rank builds it and calls its methods."""

    def __init__(self, model: Model) -> None:
        layout, config = model.spec.layout, model.spec.config
        self._transformer_config = model.transformer_config
        self._interval = config.trainer.log_every_n_steps
        self._num_ranks = layout.world_size
        in_step = max(layout.tp * layout.cp, layout.ep * layout.etp)
        # Where two microbatches pass at once to overlap exchanges, neither's pass ends before they do.
        overlapped = config.model.overlap_moe_expert_parallel_comm
        self._watches = layout.world_size // layout.pp // in_step > 1 and not overlapped
        if not self._watches:
            return
        self._passes = {"backward-compute"}
        if not config.model.overlap_param_gather:
            self._passes.add("forward-compute")
        self._cuda = model.spec.platform.cuda
        self._slow_from = _SLOW if self._cuda else _SLOW_ON_CPU
        places: list[Any] = [None] * self._num_ranks
        stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.distributed.all_gather_object(places, (this_process().host, stage))
        self._hosts: list[str] = [host for host, _ in places]
        self._stages: list[int] = [stage for _, stage in places]
        self._slow: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self._num_steps, self._began = 0, time.monotonic()
        self._fastest = [float("inf")] * self._num_ranks

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Encloses a training step, and measures it if it will be logged by its number."""
        if not self._watches or step % self._interval:
            yield
            return
        # A new one each time: a step after which the run goes back is never read.
        self._clock = self._transformer_config.timers = _PassClock(self._passes, cuda=self._cuda)
        try:
            yield
        finally:
            self._transformer_config.timers = None

    def records(self, step: int) -> Iterator[RankTimesRecord]:
        """The record of a step that was measured; waits for the device."""
        if not self._watches or step % self._interval:
            return
        own = torch.zeros(self._num_ranks, dtype=torch.float64, device=torch.cuda.current_device())
        own[torch.distributed.get_rank()] = self._clock.read()
        torch.distributed.all_reduce(own)
        times: list[float] = own.tolist()
        warnings = tuple(self._judge(times))
        ratios = self._over_median(times)
        slowest = sorted(range(self._num_ranks), key=lambda rank: -ratios[rank])[:_NUM_NAMED]
        yield RankTimesRecord(
            step=step,
            slowest_over_median=ratios[slowest[0]],
            slowest=tuple(
                RankTime(
                    rank=rank,
                    host=self._hosts[rank],
                    time_s=times[rank],
                    over_median=ratios[rank],
                    is_slow=rank in self._slow,
                )
                for rank in slowest
            ),
            warnings=warnings,
        )

    def _over_median(self, times: Sequence[float]) -> list[float]:
        """Each rank's time over the median of its stage: of two replicas, over the faster one's."""
        of_stage: dict[int, list[float]] = defaultdict(list)
        for stage, seconds in zip(self._stages, times, strict=True):
            of_stage[stage].append(seconds)
        medians = {stage: median_low(each) for stage, each in of_stage.items()}
        # A coarse clock may see no time pass.
        return [
            seconds / medians[stage] if medians[stage] else 1.0
            for stage, seconds in zip(self._stages, times, strict=True)
        ]

    def _judge(self, times: Sequence[float]) -> Iterator[str]:
        """Finds the slow ranks once there are enough steps; warns of each host when it gets its first."""
        self._fastest = list(map(min, self._fastest, times))
        self._num_steps += 1
        if self._num_steps < _NUM_STEPS or time.monotonic() - self._began < LEAST_S:
            return
        ratios = self._over_median(self._fastest)
        told = {self._hosts[rank] for rank in self._slow}
        self._slow = {rank for rank, ratio in enumerate(ratios) if ratio >= self._slow_from}
        for host in sorted({self._hosts[rank] for rank in self._slow} - told):
            ranks = [rank for rank in sorted(self._slow) if self._hosts[rank] == host]
            worst = max(ranks, key=lambda rank: ratios[rank])
            others = f", like {len(ranks) - 1} more there" if len(ranks) > 1 else ""
            yield (
                f"slowest: rank {worst} on {host}, {ratios[worst]:.2f} × the median even in its fastest of the last "
                f"{self._num_steps} logged steps{others}"
            )
        self._begin()
