"""A comparison on a terminal or in a log: what forbids it, a table of the variants, the verdicts, the gate.

The page shows the same table, whose columns and words are written only here.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt_pretrain.compare.document import Answer, Comparison, Figures, Interval
from gpt_pretrain.report.columns import UNKNOWN, format_count, format_gib, format_loss, format_share

# Width of a log's rows, where no terminal gives its own.
WIDTH = 120
_NUM_HURTS = 3
_HEADINGS = ("variant", "runs", "loss", "gap", "time to loss", "tokens/s per GPU", "memory", "skipped", "FP8")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints a comparison: what cannot be compared comes before any number."""

    def say(line: str, style: str) -> None:
        console.print(Text(line, style=style))

    for each in comparison.obstacles:
        values = f"{each.key} is {each.value}, {comparison.baseline}'s is {each.baseline_value}"
        say(f"{each.run} cannot be compared with {comparison.baseline}: {values}", "bold red")
    for line in comparison.unchecked:
        say(line, "yellow")
    console.print(_table(comparison))
    for figures in comparison.figures:
        for hurt in figures.hurts[:_NUM_HURTS]:
            shares = f"{format_share(hurt.saturated)} saturated, {format_share(hurt.flushed)} flushed to zero"
            say(f"{figures.variant}: {hurt.layer} {hurt.tensor}: {shares}", "dim")
    for answer in comparison.answers:
        say(answer.sentence, _STYLES[answer.judgement])
        for reason in answer.reasons:
            if reason not in answer.sentence:
                say(f"  {reason}", "dim")
    if comparison.gate is not None:
        for missed in comparison.gate.missed:
            say(f"gate: {missed}", "bold red")
        if not comparison.gate.missed:
            say("gate: passed", "bold green")


_STYLES = {
    "as_good": "bold green",
    "better": "bold green",
    "worse": "bold red",
    "cannot_tell": "bold yellow",
    "not_comparable": "bold red",
}


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
    yield UNKNOWN if answer is None or answer.loss_gap is None else _gap(answer.loss_gap)
    yield UNKNOWN if answer is None or answer.speedup is None else _speedup(answer.speedup)
    ratio = None if answer is None else answer.throughput_ratio
    yield format_count(figures.tokens_per_s_per_gpu) + ("" if ratio is None else f" ({ratio:.2f}×)")
    yield format_gib(figures.memory_gib)
    yield UNKNOWN if figures.skipped_steps is None else str(figures.skipped_steps)
    yield format_share(figures.fp8_share)


def _gap(gap: Interval) -> str:
    width = "" if gap.low is None or gap.high is None else f" ±{50 * (gap.high - gap.low):.2f}%"
    return f"{100 * gap.value:+.2f}%{width}"


def _speedup(ratio: Interval) -> str:
    ends = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}×{ends}"
