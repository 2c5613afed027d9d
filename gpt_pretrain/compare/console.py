"""A comparison as text: what the terminal shows, and the details that only the page has."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt_pretrain.compare.answers import format_speedup
from gpt_pretrain.compare.comparison import Answer, Comparison, ConfigDifference, Figures, Interval
from gpt_pretrain.report.columns import UNKNOWN, format_count, format_gib, format_loss, format_share

_STYLES = {
    "as_good": "bold green",
    "better": "bold green",
    "worse": "bold red",
    "cannot_tell": "bold yellow",
    "not_comparable": "bold red",
}
_HEADINGS = ("variant", "runs", "loss", "gap", "time to loss", "tokens/s per GPU", "memory", "skipped", "FP8")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints a comparison: what cannot be compared, the table, the verdicts, the gate."""

    def say(line: str, style: str) -> None:
        # As text: the names of logs and variants may look like rich's markup.
        console.print(Text(line, style=style))

    for each in comparison.obstacles:
        values = f"{each.key} is {each.value}, {comparison.baseline}'s is {each.baseline_value}"
        say(f"{each.run} cannot be compared with {comparison.baseline}: {values}", "bold red")
    for line in comparison.unchecked:
        say(line, "yellow")
    # The baseline has no answer.
    pairs = zip(comparison.figures, (None, *comparison.answers), strict=True)
    _print_table(console, f"against {comparison.baseline}", _HEADINGS, [[*_cells(*pair)] for pair in pairs])
    _print_validation_sets(comparison, console)
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


def _print_validation_sets(comparison: Comparison, console: Console) -> None:
    """The last validation loss of each set, for each run that has several."""
    runs = [(run.name, run.validation_sets) for run in comparison.runs if run.validation_sets]
    if names := list(dict.fromkeys(name for _, sets in runs for name in sets)):
        rows = [(run, *(format_loss(sets.get(name)) for name in names)) for run, sets in runs]
        _print_table(console, "last validation losses", ("run", *names), rows)


def print_details(comparison: Comparison, console: Console) -> None:
    """Prints the runs, the differences between their configurations, the methods, and how to do it again."""
    runs = [
        (run.name, run.state, format_count(run.tokens_per_s), str(run.num_gpus or UNKNOWN), run.source)
        for run in comparison.runs
    ]
    _print_table(console, "runs", ("run", "state", "tokens/s", "GPUs", "from"), runs)
    if comparison.differences:
        variants = [*dict.fromkeys(run.variant for run in comparison.runs)]
        rows = [
            (each.key, *(_values(comparison, each, variant) for variant in variants)) for each in comparison.differences
        ]
        _print_table(console, "differences between configurations", ("key", *variants), rows)
    lines = [*comparison.methods, f"again: {comparison.command}"]
    lines += [f"{run.name}: {run.versions or UNKNOWN}\n{run.command or UNKNOWN}" for run in comparison.runs]
    for line in lines:
        console.print(Text(f"\n{line}"))


def _print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=Text(title), title_justify="left", show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _values(comparison: Comparison, difference: ConfigDifference, variant: str) -> str:
    """The values that a variant's runs have, each once."""
    runs = zip(comparison.runs, difference.values, strict=True)
    return ", ".join(dict.fromkeys(value or UNKNOWN for run, value in runs if run.variant == variant))


def _cells(figures: Figures, answer: Answer | None) -> Iterator[str]:
    ratio = None if answer is None else answer.throughput_ratio
    yield figures.variant
    yield str(figures.num_runs)
    yield format_loss(figures.last_loss)
    yield UNKNOWN if answer is None or answer.loss_gap is None else _gap(answer.loss_gap)
    yield UNKNOWN if answer is None or answer.speedup is None else format_speedup(answer.speedup)
    yield format_count(figures.tokens_per_s_per_gpu) + ("" if ratio is None else f" ({ratio:.2f}×)")
    yield format_gib(figures.memory_gib)
    yield UNKNOWN if figures.skipped_steps is None else str(figures.skipped_steps)
    yield format_share(figures.fp8_share)


def _gap(gap: Interval) -> str:
    width = "" if gap.low is None or gap.high is None else f" ±{50 * (gap.high - gap.low):.2f}%"
    return f"{100 * gap.value:+.2f}%{width}"
