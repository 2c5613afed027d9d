"""The end of a run: its last record, computed from its history, and the lines that show it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from gpt_pretrain.report.columns import UNKNOWN, format_count, format_duration, format_loss, format_percent, printable
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.records import EndReason, SummaryRecord

END_REASONS: dict[EndReason, str] = {
    "max_steps": "all steps done",
    "callback": "stopped by a callback",
    "max_time": "stopped: trainer.max_time is used up",
    "interrupted": "stopped by Ctrl-C",
    "terminated": "stopped by SIGTERM or SIGHUP",
    "warned": "stopped by SIGUSR1",
    "not_finite": "stopped: loss or gradient is not finite",
    "loss_spike": "stopped: the loss spikes again and again",
}


def mean_tokens_per_s(metrics: Metrics) -> float | None:
    """Tokens per second over all logged steps except warm-ups; None if nothing else was logged.

    This is tokens divided by seconds; the mean of the rates would count a short interval as much as a long one.
    """
    warm_ups = metrics.warm_up_steps()
    tokens, seconds = 0, 0.0
    for previous, record in pairwise(metrics.train):
        if record.step not in warm_ups:
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
    has_fp8: bool = False,
) -> SummaryRecord:
    """Summarizes a run from its whole history; most keywords are fields of `SummaryRecord`."""
    losses = [record.loss for record in metrics.train]
    validation_losses = [record.loss for record in metrics.validation]
    tokens_per_s = mean_tokens_per_s(metrics)
    slow_hosts = Counter(record.slow_host for record in metrics.rank_times if record.slow_host is not None)
    slow_host, times_slow = next(iter(slow_hosts.most_common(1)), (None, 0))
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
        fp8_proofs=len(metrics.fp8_proofs) if has_fp8 else None,
        fp8_proofs_with_warnings=sum(bool(each.warnings) for each in metrics.fp8_proofs) if has_fp8 else None,
        slow_host=slow_host,
        slow_host_share=times_slow / len(metrics.rank_times) if times_slow else None,
    )


def _lowest(losses: list[float]) -> float | None:
    # min() of numbers with NaN among them depends on their order.
    return min((loss for loss in losses if not math.isnan(loss)), default=None)


def summary_lines(summary: SummaryRecord, places: Mapping[str, str], *, max_steps: int) -> Iterator[str]:
    """The summary, line by line; a text sample may hold several."""
    yield f"end step {summary.step}/{max_steps}: {END_REASONS[summary.end_reason]}"
    for key, value in (_facts(summary) | dict(places)).items():
        yield f"  {key}: {value}"
    if summary.sample_text is not None:
        yield f"sample\n{printable((summary.sample_prompt or '') + summary.sample_text, keep='\n\t')}"


def _facts(summary: SummaryRecord) -> dict[str, str]:
    def losses(first: float | None, last: float | None, best: float | None) -> str:
        return f"{format_loss(first)} → {format_loss(last)}  (best {format_loss(best)})"

    facts = {"train loss": losses(summary.first_loss, summary.last_loss, summary.best_loss)}
    if summary.last_validation_loss is not None:
        facts["validation loss"] = losses(
            summary.first_validation_loss, summary.last_validation_loss, summary.best_validation_loss
        )
    per_gpu = summary.tokens_per_s_per_gpu
    rate = format_count(summary.tokens_per_s)
    if rate != UNKNOWN and per_gpu != summary.tokens_per_s:
        rate += f"  ({format_count(per_gpu)} per GPU)"
    facts["tokens/s"] = rate
    facts["tokens"] = format_count(summary.consumed_tokens)
    facts["time"] = format_duration(summary.wall_time_s)
    if summary.skipped_steps:
        facts["skipped steps"] = f"{summary.skipped_steps}, loss or gradient not finite"
    if summary.fp8_proofs is not None:
        facts["FP8 proofs"] = f"{summary.fp8_proofs}, {summary.fp8_proofs_with_warnings or 'none'} with warnings"
        if not summary.fp8_proofs:
            facts["FP8 proofs"] = "none, FP8 is unproven"
    if summary.slow_host is not None:
        share = format_percent(summary.slow_host_share)
        facts["slow host"] = f"{printable(summary.slow_host)}, in {share} of the logged steps"
    return facts
