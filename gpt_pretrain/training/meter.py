"""What a run logs of its steps: loss, speed and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.config.derived import attended_length, flops_per_token
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.report.records import TrainRecord
from gpt_pretrain.run.gpus import bf16_peak_tflops
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.step import mean_loss


class Meter:
    """Adds up steps on the device. Reading the sums, at the logging interval, is when the host waits."""

    def __init__(self, spec: RunSpec) -> None:
        self._config = spec.config
        self._num_gpus = spec.launch.world_size
        self._platform = spec.platform
        self._peak_tflops = spec.config.logging.peak_tflops or bf16_peak_tflops(spec.platform.device_name)
        self.restart()

    def restart(self) -> None:
        """Begins a new interval."""
        # Sum of losses, tokens, skipped steps.
        self._sums = torch.zeros(3, device=torch.cuda.current_device())
        # Of the documents' squared lengths, where these do not see each other.
        self._squared_lengths: torch.Tensor | None = None
        self._num_steps = 0
        self.num_samples = 0
        """Of the interval's steps together."""
        self._started = time.monotonic()

    def add(self, result: StepResult, num_samples: int) -> None:
        """Counts a step of so many samples without waiting for it."""
        # A skipped step's loss may be NaN, and would make the mean NaN.
        seen = torch.where(result.skipped, 0.0, result.loss_sum_and_tokens)
        self._sums += torch.cat([seen, result.skipped.float().view(1)])
        if (squares := result.squared_lengths) is not None:
            # A skipped step takes its time, too. fp32 sums of fp32 squares are off by a millionth.
            self._squared_lengths = squares if self._squared_lengths is None else self._squared_lengths + squares
        self._num_steps += 1
        self.num_samples += num_samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps validation and checkpoints out of the step time."""
        torch.cuda.synchronize()
        began = time.monotonic()
        yield
        self._started += time.monotonic() - began

    def read(
        self,
        result: StepResult,
        progress: TrainingProgress,
        lr: float,
        decoupled_lr: float | None,
        hidden_lr: float | None,
        *,
        global_batch_size: int | None,
        samples_left: int,
    ) -> TrainRecord:
        """Waits for the device and begins the next interval; the same numbers on every rank.

        `samples_left` follow in this run; `global_batch_size` is the step's, None where all steps have the same.
        """
        loss = mean_loss(self._sums[:2])
        skipped_steps = round(self._sums[2].item())
        grad_norm = float(result.grad_norm)
        time_s = time.monotonic() - self._started
        step_time_s, eta_s = time_s / self._num_steps, samples_left * time_s / self.num_samples
        model = self._config.model
        num_tokens = self.num_samples * model.encoder_seq_length
        tokens_per_s, attended = num_tokens / time_s, None
        if self._squared_lengths is not None:
            attended = attended_length(self._squared_lengths.item(), num_tokens)
        flops = flops_per_token(model, attended)
        consumed_tokens = progress.consumed_tokens(model.encoder_seq_length)
        tflops = tokens_per_s * flops / self._num_gpus / 1e12
        self.restart()
        return TrainRecord(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=consumed_tokens,
            consumed_flops=consumed_tokens * flops,
            global_batch_size=global_batch_size,
            loss=loss,
            lr=lr,
            decoupled_lr=decoupled_lr,
            hidden_lr=hidden_lr,
            grad_norm=grad_norm,
            max_attention_logit=None if result.max_attention_logit is None else float(result.max_attention_logit),
            skipped_steps=skipped_steps,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / self._num_gpus,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            memory_gib=memory_gib(self._platform),
            eta_s=eta_s,
            time_unix=time.time(),
        )


def memory_gib(platform: Platform) -> float:
    """Peak memory of tensors on this GPU in GiB; without a GPU the process's resident memory."""
    used = torch.cuda.max_memory_allocated() if platform.cuda else psutil.Process().memory_info().rss
    return float(used) / 2**30
