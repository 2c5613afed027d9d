"""A comparison on a terminal or in a log: what forbids it, a table of the variants, the verdicts, the gate."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpt_pretrain.compare.columns import table_of_variants
from gpt_pretrain.compare.document import Comparison
from gpt_pretrain.report.columns import format_share

# Rows of a log, where no terminal says how wide it is.
WIDTH = 120
_NUM_HURTS = 3


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
    table = Table(title=f"against {comparison.baseline}", title_justify="left", show_edge=False)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
