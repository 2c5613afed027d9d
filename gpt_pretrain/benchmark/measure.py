"""What runs in a measured process: the bare loop, the clock, the profiler, and the machine's own ceiling.

The bare loop is the yardstick: megatron-core's own pieces in the shortest loop that trains, built from the
application's translated configuration, without data loading, logging, validation, schedule or signals. Optimizer and
loss are megatron-core's own, so the comparison shows what the application's gain. Both loops use the kernels that
`features.resolve` chooses, so it does not show what those gain.

Both loops have the same clock. The host waits for the device after the first step, after the warm-up and after each
interval of timed steps, and at no other step, so kernels queue up as they do in a run.

No GPU sustains the clock of its data sheet under load, so a run is measured against what square products reach on this
machine, in a process of their own.
"""

import platform as python_platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from gpt_pretrain.benchmark.results import GemmCeiling, Machine
from gpt_pretrain.config.choices import CrossEntropyFusion
from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.schedule import last_step
from gpt_pretrain.config.schema import BenchmarkConfig
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.launch.environment import ask_driver, library_versions
from gpt_pretrain.megatron.model import build_model, translate_optimizer
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.megatron.parallel import process_groups, user_buffers
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.meter import memory_gib
from gpt_pretrain.training.step import mean_loss


def run_bare_loop(spec: RunSpec, after_step: Callable[[int], None]) -> None:
    """Trains `trainer.max_steps` steps on this rank and calls `after_step` with the number of each.

    Raises `ConfigError` if the machine refuses the configuration or this loop lacks a feature.
    """
    check_machine(spec)
    with process_groups(spec.model, spec.launch, spec.platform), user_buffers(spec):
        step = build_bare_step(spec)
        for number in range(1, last_step(spec.config) + 1):
            step()
            after_step(number)


def build_bare_step(spec: RunSpec) -> Callable[[], None]:
    """Builds model and optimizer in open process groups and returns a function that trains them for one step."""
    config, platform = spec.config, spec.platform
    lacks = {
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "overlap_moe_expert_parallel_comm": False,
        "data_parallel_sharding_strategy": None,
        "data.inter_document_masking": False,
        "use_mup": False,
    }
    problems = [
        f"the bare loop cannot run model.{name}={show(value)}; use {show(without)}, or leave `bare` out of "
        "benchmark.variants"
        for name, without in lacks.items()
        if (value := attrgetter(name)(config.model)) != without
    ]
    if problems:
        raise ConfigError(problems)
    kernels = spec.kernels
    if kernels.cross_entropy_fusion_impl is CrossEntropyFusion.linear:
        kernels = replace(kernels, cross_entropy_fusion_impl=CrossEntropyFusion.native if platform.cuda else None)
    model = build_model(replace(spec, kernels=kernels), fp8_layers(spec))
    assert model.transformer_config.finalize_model_grads_func is finalize_model_grads
    optimizer = get_megatron_optimizer(translate_optimizer(spec), model.chunks, use_gloo_process_groups=False)
    chunk = model.chunks[0]
    micro_batch_size, length = config.model.micro_batch_size, config.model.encoder_seq_length
    shape = (micro_batch_size, length)
    tokens = torch.randint(config.model.vocab_size, shape, device=platform.device)
    labels = torch.randint(config.model.vocab_size, shape, device=platform.device)
    positions = torch.arange(length, device=platform.device).expand(shape)

    def forward_step(_: None, model_chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        losses = model_chunk(tokens, positions, None, labels=labels)
        return losses, lambda output: (output.float().mean(), {})

    forward_backward = get_forward_backward_func()

    def step() -> None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=None,
            model=chunk,
            num_microbatches=spec.layout.num_microbatches,
            seq_length=length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )
        optimizer.step()

    return step


# Large enough to fill a GPU; on a CPU small enough for a second.
_SIDE_GPU, _SIDE_CPU = 8192, 512
_NUM_KERNELS = 15


class StepProfiler:
    """Profiles the steps between its first and last call into a trace for https://ui.perfetto.dev.

    Without `cuda`, it counts torch's operations instead of a GPU's kernels.
    """

    def __init__(self, trace: Path, kernels: Path, num_steps: int, *, cuda: bool) -> None:
        self._trace, self._kernels = trace, kernels
        self._num_steps = num_steps
        self._cuda = cuda
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities)

    def after_step(self, number: int) -> None:
        """Starts after step 0; ends and writes the trace after step `num_steps`."""
        if number == 0:
            self._profile.start()
        elif number == self._num_steps:
            torch.cuda.synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))
            order = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
            table = self._profile.key_averages().table(sort_by=order, row_limit=_NUM_KERNELS)
            write_file(self._kernels, table, wait_for_disk=False)


class Stopwatch:
    """Counts a run's steps, times those after the warm-up, and hands the rest to the profiler."""

    def __init__(
        self, benchmark: BenchmarkConfig, *, platform: Platform, launched_unix: float, profiler: StepProfiler | None
    ) -> None:
        self.first_step_s: float | None = None
        self.step_times_s: list[float] = []
        self.memory_gib: float | None = None
        self.loss: float | None = None
        self.squared_lengths: float | None = None
        """Sum of the squared lengths of a timed step's documents, the mean; None where they see each other."""
        self._benchmark = benchmark
        self._platform = platform
        self._launched_unix = launched_unix
        self._profiler = profiler
        self._last = benchmark.warmup_steps + benchmark.steps
        self._began = 0.0
        self._results: list[StepResult] = []

    def after_step(self, step: int, result: StepResult | None = None) -> None:
        """Takes note of a step; the first is 1."""
        if step == 1:
            torch.cuda.synchronize()
            self.first_step_s = time.time() - self._launched_unix
        timed = step - self._benchmark.warmup_steps
        if result is not None and timed > 0 and step <= self._last:
            self._results.append(result)
        if timed == 0:
            torch.cuda.synchronize()
            self._began = time.monotonic()
        elif timed > 0 and step <= self._last and timed % self._benchmark.interval == 0:
            self._end_interval(is_last=step == self._last)
        if self._profiler is not None and step >= self._last:
            self._profiler.after_step(step - self._last)

    def _end_interval(self, *, is_last: bool) -> None:
        torch.cuda.synchronize()
        self.step_times_s.append((time.monotonic() - self._began) / self._benchmark.interval)
        if is_last:
            self.memory_gib = memory_gib(self._platform)
            if self._results:
                last = [result.loss_sum_and_tokens for result in self._results[-self._benchmark.interval :]]
                self.loss = mean_loss(torch.stack(last).sum(dim=0))
                squares = [each.squared_lengths for each in self._results if each.squared_lengths is not None]
                self.squared_lengths = torch.cat(squares).mean().item() if squares else None
        self._began = time.monotonic()


def _tflops(product: Callable[[], object], side: int) -> float:
    """Median TFLOP/s of a square product: 2·side³ operations each."""
    timer = Timer("product()", globals={"product": product}, num_threads=torch.get_num_threads())
    return 2 * side**3 / timer.blocked_autorange().median / 1e12


def measure_gemms(platform: Platform) -> tuple[GemmCeiling, ...]:
    """TFLOP/s of square products: BF16 and, if the GPU has it, FP8; FP32 and BF16 on a CPU.

    FP8 is E4M3 times E4M3 with one scale per tensor and fast accumulation into BF16, as in a forward pass.
    """
    side = _SIDE_GPU if platform.cuda else _SIDE_CPU
    ceilings = []
    for dtype in (torch.bfloat16,) if platform.cuda else (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=platform.device).to(dtype) for _ in range(2))
        tflops = _tflops(lambda a=a, b=b: a @ b, side)  # type: ignore[misc]
        ceilings.append(GemmCeiling(dtype=str(dtype).removeprefix("torch."), side=side, tflops=tflops))
    if platform.cuda and platform.has_fp8:
        a, b = (torch.randn(side, side, device=platform.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=platform.device)

        def product() -> torch.Tensor:
            # Hopper multiplies only if the second operand is column-major.
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        ceilings.append(GemmCeiling(dtype="fp8", side=side, tflops=_tflops(product, side)))
    return tuple(ceilings)


def describe_machine(platform: Platform) -> Machine:
    """Device, driver, versions, and the ceilings of its products."""
    driver = None
    # nvidia-smi may be missing, or fail.
    with suppress(OSError, RuntimeError):
        driver = ask_driver()[0] if platform.cuda else None
    return Machine(
        device=platform.device_name if platform.cuda else python_platform.machine(),
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if platform.cuda else None,
        driver=driver,
        versions=tuple(library_versions()),
        gemms=measure_gemms(platform),
    )
