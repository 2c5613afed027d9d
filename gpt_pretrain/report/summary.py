"""From a run's history to its last record: first, last and best losses, and the speed without the warm-up."""

import math

from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.records import EndReason, SummaryRecord


def mean_tokens_per_s(metrics: Metrics) -> float | None:
    """Tokens per second over all logged steps but the warm-up; None if nothing else was logged.

    The first record of each start covers compilation, autotuning and allocation, and that after a rewind counts samples
    that were passed over. Rates are averaged by time, as
    tokens divided by seconds: the mean of the rates would count a short interval as much as a long one.
    """
    warm_up_steps = {
        min(record.step for record in metrics.train if record.step > start.step)
        for start in (*metrics.starts, *metrics.rewinds)
        if any(record.step > start.step for record in metrics.train)
    }
    tokens, seconds = 0, 0.0
    for previous, record in zip(metrics.train, metrics.train[1:], strict=False):
        if record.step in warm_up_steps:
            continue
        interval = record.consumed_tokens - previous.consumed_tokens
        tokens += interval
        seconds += interval / record.tokens_per_s
    return tokens / seconds if seconds > 0 else None


def build_summary(
    metrics: Metrics,
    *,
    step: int,
    consumed_samples: int,
    consumed_tokens: int,
    num_gpus: int,
    end_reason: EndReason,
    exit_code: int,
    wall_time_s: float,
    checkpoint: str | None,
    sample_prompt: str | None = None,
    sample_text: str | None = None,
) -> SummaryRecord:
    """Sums up a run from its records, those before a resume included.

    Args:
        metrics: What `load_metrics` read.
        step: Optimizer steps done.
        consumed_samples: Training samples seen.
        consumed_tokens: Training tokens seen.
        num_gpus: Ranks of the run.
        end_reason: Why it ended.
        exit_code: What the process will end with.
        wall_time_s: Seconds of training in this process.
        checkpoint: The newest checkpoint, if there is one.
        sample_prompt: Prompt of the text sample, if there is one.
        sample_text: What the model wrote after it.
    """
    losses = [record.loss for record in metrics.train]
    validation_losses = [record.loss for record in metrics.validation]
    tokens_per_s = mean_tokens_per_s(metrics)
    return SummaryRecord(
        step=step,
        consumed_samples=consumed_samples,
        consumed_tokens=consumed_tokens,
        end_reason=end_reason,
        exit_code=exit_code,
        skipped_steps=len(metrics.skipped_steps),
        wall_time_s=wall_time_s,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        best_loss=_lowest(losses),
        first_validation_loss=validation_losses[0] if validation_losses else None,
        last_validation_loss=validation_losses[-1] if validation_losses else None,
        best_validation_loss=_lowest(validation_losses),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=None if tokens_per_s is None else tokens_per_s / num_gpus,
        checkpoint=checkpoint,
        sample_prompt=sample_prompt,
        sample_text=sample_text,
    )


def _lowest(losses: list[float]) -> float | None:
    # min() would answer a NaN that comes first, and skip one that comes later: leave them out.
    return min((loss for loss in losses if not math.isnan(loss)), default=None)
