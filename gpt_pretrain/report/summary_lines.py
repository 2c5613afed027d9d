"""What the console shows of a run that has ended: what it reached, where things are, the loss curve, and the sample."""

from collections.abc import Iterator, Mapping

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.report.chart import VALIDATION_MARKER, draw_loss_chart
from gpt_pretrain.report.metrics_file import Metrics
from gpt_pretrain.report.numbers import UNKNOWN, format_count, format_duration, format_loss
from gpt_pretrain.report.records import EndReason, SummaryRecord

_END_REASONS: dict[EndReason, str] = {
    "max_steps": "all steps done",
    "max_time": "stopped: trainer.max_time is used up",
    "interrupted": "stopped by Ctrl-C",
    "terminated": "stopped by SIGTERM",
    "warned": "stopped by SIGUSR1",
    "not_finite": "stopped: loss or gradient is not finite",
    "loss_spike": "stopped: the loss spikes again and again",
}
# What a panel's frame takes of its width.
_FRAME = 4


def plain_summary_lines(
    summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str], *, max_steps: int, width: int
) -> Iterator[str]:
    """The summary as text, for a log.

    Args:
        summary: The run's last record.
        metrics: Its history, for the loss curve.
        places: Name → path or command: where things are.
        max_steps: Steps of the whole run.
        width: Columns of the loss curve and its frame.
    """
    yield f"end step {summary.step}/{max_steps}: {_END_REASONS[summary.end_reason]}"
    for key, value in (_facts(summary) | dict(places)).items():
        yield f"  {key}: {value}"
    chart = draw_loss_chart(metrics.train, metrics.validation, width=width - _FRAME)
    if chart is not None:
        yield f"loss over steps (line: train, {VALIDATION_MARKER}: validation)\n{chart}"
    if summary.sample_text is not None:
        yield f"sample\n{_printable((summary.sample_prompt or '') + summary.sample_text)}"


def summary_panels(
    summary: SummaryRecord, metrics: Metrics, places: Mapping[str, str], *, max_steps: int, width: int
) -> Iterator[Panel]:
    """The same for a terminal."""
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
        sample = Text.assemble(
            (_printable(summary.sample_prompt or ""), "bold"), _printable(summary.sample_text), overflow="fold"
        )
        yield Panel(sample, title=Text("sample", style="bold"), title_align="left", width=width)


def _facts(summary: SummaryRecord) -> dict[str, str]:
    facts = {
        "train loss": f"{format_loss(summary.first_loss)} → {format_loss(summary.last_loss)}"
        f"  (best {format_loss(summary.best_loss)})"
    }
    if summary.last_validation_loss is not None:
        facts["validation loss"] = (
            f"{format_loss(summary.first_validation_loss)} → {format_loss(summary.last_validation_loss)}"
            f"  (best {format_loss(summary.best_validation_loss)})"
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
    return facts


def _printable(text: str) -> str:
    """Text with control characters replaced: a model that writes an escape sequence must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _colored(chart: str) -> Text:
    text = Text(chart, style="dim", no_wrap=True, overflow="crop")
    text.highlight_regex(r"[\u2801-\u28ff]+", "not dim cyan")
    text.highlight_regex(VALIDATION_MARKER, "not dim bold green")
    return text
