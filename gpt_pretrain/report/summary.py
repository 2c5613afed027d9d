"""The end of a run: its last record, computed from its history, and how the console shows it.

The console shows what the run reached, where its files are, the loss curve, and the sample. plotext draws the curve as
text: a line for training, points for validation.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.report.columns import UNKNOWN, format_count, format_duration, format_loss, format_percent, printable
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.records import EndReason, SummaryRecord, TrainRecord, ValidationRecord

VALIDATION_MARKER = "●"
_END_REASONS: dict[EndReason, str] = {
    "max_steps": "all steps done",
    "max_time": "stopped: trainer.max_time is used up",
    "interrupted": "stopped by Ctrl-C",
    "terminated": "stopped by SIGTERM or SIGHUP",
    "warned": "stopped by SIGUSR1",
    "not_finite": "stopped: loss or gradient is not finite",
    "loss_spike": "stopped: the loss spikes again and again",
}
# Columns of a panel's frame.
_FRAME = 4
_CHART_HEIGHT = 14

type Point = tuple[float, float]


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


def plain_summary_lines(
    summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str], *, max_steps: int, width: int
) -> Iterator[str]:
    """The summary as the lines of a log."""
    yield f"end step {summary.step}/{max_steps}: {_END_REASONS[summary.end_reason]}"
    for key, value in (_facts(summary) | dict(places)).items():
        yield f"  {key}: {value}"
    chart = draw_loss_chart(metrics.train, metrics.validation, width=width - _FRAME)
    if chart is not None:
        yield f"loss over steps (line: train, {VALIDATION_MARKER}: validation)\n{chart}"
    if summary.sample_text is not None:
        yield f"sample\n{printable((summary.sample_prompt or '') + summary.sample_text, keep='\n\t')}"


def summary_panels(
    summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str], *, max_steps: int, width: int
) -> Iterator[Panel]:
    """The summary for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in (_facts(summary) | dict(places)).items():
        table.add_row(Text(key), Text(value))
    chart = draw_loss_chart(metrics.train, metrics.validation, width=width - _FRAME)
    parts = [table] if chart is None else [_colored(chart), Text(), table]
    title = Text.assemble(("loss  ", "bold"), ("─ train", "cyan"), (f"  {VALIDATION_MARKER} validation", "green"))
    end = f"step {summary.step}/{max_steps}, {_END_REASONS[summary.end_reason]}"
    yield Panel(
        Group(*parts),
        title=Text("summary", style="bold") if chart is None else title,
        title_align="left",
        subtitle=Text(end, style="bold green" if summary.end_reason == "max_steps" else "bold yellow"),
        subtitle_align="right",
        width=width,
    )
    if summary.sample_text is not None:
        prompt, text = (printable(each, keep="\n\t") for each in (summary.sample_prompt or "", summary.sample_text))
        sample = Text.assemble((prompt, "bold"), text, overflow="fold")
        yield Panel(sample, title=Text("sample", style="bold"), title_align="left", width=width)


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


def _colored(chart: str) -> Text:
    text = Text(chart, style="dim", no_wrap=True, overflow="crop")
    text.highlight_regex(r"[\u2801-\u28ff]+", "not dim cyan")
    text.highlight_regex(VALIDATION_MARKER, "not dim bold green")
    return text


def draw_loss_chart(train: Sequence[TrainRecord], validation: Sequence[ValidationRecord], *, width: int) -> str | None:
    """Draws loss over steps in lines of at most `width` columns; None with fewer than two finite training losses."""
    line = [(record.step, record.loss) for record in train if math.isfinite(record.loss)]
    points = [(record.step, record.loss) for record in validation if math.isfinite(record.loss)]
    if len(line) < 2:
        return None
    # It loads a native library that only the end of a run needs.
    import plotext

    # plotext would look up the terminal's width, but the console knows what it writes to.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _CHART_HEIGHT)
    for side_axis in ("x", "y"):
        figure.axes(False, axis=side_axis, side=1)
    # A braille character is two dots wide: with more points, noise would become a band.
    steps, losses = zip(*_average_to(line, 2 * width), strict=True)
    figure.draw(figure.signal(list(steps), list(losses), marker="braille").lines())
    if points:
        steps, losses = zip(*points, strict=True)
        figure.draw(figure.signal(list(steps), list(losses), marker=VALIDATION_MARKER))
    all_steps = [step for step, _ in (*line, *points)]
    ticks = _step_ticks(min(all_steps), max(all_steps))
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    drawn = str(figure.build().string(colorless=True))
    return "\n".join(row.rstrip() for row in drawn.rstrip("\n").splitlines())


def _average_to(points: Sequence[Point], num_points: int) -> list[Point]:
    """At most `num_points` points, each the mean of as many neighbors at the last one's step."""
    per_point = math.ceil(len(points) / num_points)
    groups = [points[start : start + per_point] for start in range(0, len(points), per_point)]
    return [(group[-1][0], fmean(loss for _, loss in group)) for group in groups]


def _step_ticks(first: int, last: int) -> list[int]:
    """First and last step, and between them round numbers (1, 2 or 5 × 10ⁿ apart) for about five intervals."""
    span, num_intervals = max(last - first, 1), 5
    magnitude = 10 ** math.floor(math.log10(span / num_intervals)) if span > num_intervals else 1
    spacing = next(multiple * magnitude for multiple in (1, 2, 5, 10) if span <= multiple * magnitude * num_intervals)
    inner = range(math.ceil(first / spacing) * spacing, last, spacing)
    # A tick closer to an end than half the spacing would overlap the end's number.
    return [first, *(step for step in inner if min(step - first, last - step) >= spacing / 2), last]
