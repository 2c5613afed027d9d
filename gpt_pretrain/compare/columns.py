"""The table of a comparison's variants: the same columns and the same words on the console and on the page."""

from collections.abc import Iterator

from gpt_pretrain.compare.document import Answer, Comparison, Figures, Interval
from gpt_pretrain.report.columns import UNKNOWN, format_count, format_gib, format_loss, format_share

_HEADINGS = ("variant", "runs", "loss", "gap", "time to loss", "tokens/s per GPU", "memory", "skipped", "FP8")


def table_of_variants(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each variant, the baseline first."""
    answers = {answer.variant: answer for answer in comparison.answers}
    rows = [[*_cells(figures, answers.get(figures.variant))] for figures in comparison.figures]
    return [*_HEADINGS], rows


def _cells(figures: Figures, answer: Answer | None) -> Iterator[str]:
    yield figures.variant
    yield str(figures.num_runs)
    yield format_loss(figures.last_loss)
    gap = None if answer is None else answer.loss_gap
    yield UNKNOWN if gap is None else f"{100 * gap.value:+.2f}%{_width(gap)}"
    speedup = None if answer is None else answer.speedup
    yield UNKNOWN if speedup is None else f"{speedup.value:.2f}×{_range(speedup)}"
    ratio = None if answer is None else answer.throughput_ratio
    yield format_count(figures.tokens_per_s_per_gpu) + ("" if ratio is None else f" ({ratio:.2f}×)")
    yield format_gib(figures.memory_gib)
    yield UNKNOWN if figures.skipped_steps is None else str(figures.skipped_steps)
    yield format_share(figures.fp8_share)


def _width(gap: Interval) -> str:
    return "" if gap.low is None or gap.high is None else f" ±{50 * (gap.high - gap.low):.2f}%"


def _range(ratio: Interval) -> str:
    return "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
