"""A comparison on a terminal or in a log: what forbids it, a table of the variants, the verdicts, the gate.

The page shows the same table, so that its columns and words are written once, here.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt_pretrain.compare.document import Answer, Comparison, Figures, Interval
from gpt_pretrain.report.columns import UNKNOWN, format_count, format_gib, format_loss, format_share

# Rows of a log, where no terminal says how wide it is.
WIDTH = 120
_NUM_HURTS = 3
_HEADINGS = ("variant", "runs", "loss", "gap", "time to loss", "tokens/s per GPU", "memory", "skipped", "FP8")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints a comparison: what cannot be compared comes before any number."""
    for lines, style in ((_obstacle_lines(comparison), "bold red"), (comparison.unchecked, "yellow")):
        for line in lines:
            console.print(Text(line, style=style))
    console.print(_table(comparison))
    for figures in comparison.figures:
        for hurt in figures.hurts[:_NUM_HURTS]:
            console.print(
                Text(
                    f"{figures.variant}: {hurt.layer} {hurt.tensor}: {format_share(hurt.saturated)} saturated, "
                    f"{format_share(hurt.flushed)} flushed to zero",
                    style="dim",
                )
            )
    for answer in comparison.answers:
        console.print(Text(answer.sentence, style=_STYLES[answer.judgement]))
        for reason in answer.reasons:
            if reason not in answer.sentence:
                console.print(Text(f"  {reason}", style="dim"))
    if comparison.gate is not None:
        for missed in comparison.gate.missed:
            console.print(Text(f"gate: {missed}", style="bold red"))
        if not comparison.gate.missed:
            console.print(Text("gate: passed", style="bold green"))


_STYLES = {
    "as_good": "bold green",
    "better": "bold green",
    "worse": "bold red",
    "cannot_tell": "bold yellow",
    "not_comparable": "bold red",
}


def _obstacle_lines(comparison: Comparison) -> Iterator[str]:
    for each in comparison.obstacles:
        yield (
            f"{each.run} cannot be compared with {comparison.baseline}: {each.key} is {each.value}, "
            f"{comparison.baseline}'s is {each.baseline_value}"
        )


def _table(comparison: Comparison) -> Table:
    headings, rows = table_of_variants(comparison)
    # A name may look like rich's markup, as overrides and the names of logs do.
    table = Table(title=Text(f"against {comparison.baseline}"), title_justify="left", show_edge=False)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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
