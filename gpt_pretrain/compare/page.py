"""`compare.html`: a comparison as one file that opens offline.

    Comparison → the console's text as HTML, by rich → plots as HTML, by plotly; all in the file

All text from runs and logs is escaped. A Content Security Policy lets the browser load nothing, whatever is in a log.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gpt_pretrain.compare.comparison import Answer, Comparison, write_result
from gpt_pretrain.compare.console import print_comparison, print_details
from gpt_pretrain.compare.series import thinned
from gpt_pretrain.report.console import SafeConsole

PAGE_NAME = "compare.html"
# Columns of its text.
_WIDTH = 140
# Of a curve: each is the mean of its neighbors, so that noise makes no band.
_POINTS = 400
# After Okabe and Ito: told apart by people who see fewer colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_AXES = {"steps": "steps", "tokens": "tokens", "gpu_seconds": "GPU-seconds"}
_STYLE = "body { max-width: 75rem; margin: 1rem auto; padding: 0 1rem; } pre { overflow-x: auto; }"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
_CONFIG = {"responsive": True, "displaylogo": False, "toImageButtonOptions": {"format": "svg"}}

type Figure = dict[str, Any]
"""The traces (`data`) and the layout of a plot, as plotly.js takes them."""


def write_page(comparison: Comparison, directory: Path) -> Path:
    """Writes `compare.html` into a directory; see `write_result`."""
    return write_result(directory / PAGE_NAME, build_page(comparison))


def build_page(comparison: Comparison) -> str:
    """The page as HTML."""
    title = f"{', '.join(figures.variant for figures in comparison.figures)}: trained side by side"
    above = f"<p>{escape(comparison.date)}</p>\n{text_as_html(partial(print_comparison, comparison))}"
    return html_page(title, above, build_plots(comparison), text_as_html(partial(print_details, comparison)))


def html_page(title: str, above: str, plots: Iterable[tuple[str, Figure]], below: str) -> str:
    """A title, plots by name, without those that have no data, and HTML above and below, which is escaped already."""
    # Takes half a second.
    from plotly.io import to_html

    title, figures = escape(title), {name: figure for name, figure in plots if figure["data"]}
    # The first plot brings plotly.js.
    drawn = [
        to_html(figure, _CONFIG, include_plotlyjs=not index, full_html=False, div_id=name, validate=False)
        for index, (name, figure) in enumerate(figures.items())
    ]
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{above}",
            *drawn,
            below,
            "</body>\n</html>\n",
        ]
    )


def text_as_html(write: Callable[[Console], None]) -> str:
    """What `write` prints, as escaped HTML."""
    console = SafeConsole(record=True, file=io.StringIO(), width=_WIDTH, highlight=False, emoji=False)
    write(console)
    return console.export_html(code_format="<pre>{code}</pre>\n", inline_styles=True)


def build_plots(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    """The plots by name, of which some may have no data: losses, and the gap along the way."""
    variants = list(dict.fromkeys(run.variant for run in comparison.runs))
    colors = {variant: COLORS[index % len(COLORS)] for index, variant in enumerate(variants)}
    for kind in ("training", "validation"):
        yield kind, _losses(comparison, kind, colors)
    gaps = [trace for answer in comparison.answers for trace in _gap(answer, colors[answer.variant])]
    yield "gap", build_plot("gap", gaps, "steps", f"loss against {comparison.baseline} (%)")


def build_plot(name: str, data: Sequence[Figure], x: str, y: str) -> Figure:
    """A plot of traces, with its name as title and those of its axes."""
    axes = {"xaxis": {"title": {"text": escape(x)}}, "yaxis": {"title": {"text": escape(y)}}}
    return {"data": data, "layout": {"title": {"text": name}, **axes}}


def _losses(comparison: Comparison, kind: Literal["training", "validation"], colors: dict[str, str]) -> Figure:
    """The loss of each run, over an axis that a button chooses."""
    curves = {run.name: thinned(getattr(run, kind), _POINTS) for run in comparison.runs if getattr(run, kind).steps}
    traces = [
        {
            "x": curves[run.name].steps,
            "y": _finite(curves[run.name].losses),
            "name": escape(run.name),
            "mode": "lines" if kind == "training" else "lines+markers",
            "line": {"color": colors[run.variant], "width": 1.5},
        }
        for run in comparison.runs
        if run.name in curves
    ]
    over = [
        {
            "label": title,
            "method": "update",
            "args": [{"x": [getattr(curve, axis) for curve in curves.values()]}, {"xaxis.title.text": title}],
        }
        for axis, title in _AXES.items()
        if all(getattr(curve, axis) for curve in curves.values())
    ]
    log = [
        {
            "label": f"log {axis}",
            "method": "relayout",
            "args": [{f"{axis}axis.type": "log"}],
            "args2": [{f"{axis}axis.type": "linear"}],
        }
        for axis in "xy"
    ]
    plot = build_plot(kind, traces, _AXES["steps"], "loss (nats per token)")
    menus = [
        {"type": "buttons", "direction": "right", "buttons": buttons, "x": x, "y": 1.15}
        for buttons, x in ((over, 0.6), (log, 1))
    ]
    plot["layout"]["updatemenus"] = menus
    return plot


def _gap(answer: Answer, color: str) -> Iterator[Figure]:
    """The gap along the way, in front of its confidence interval."""
    curve = answer.gap_curve
    common = {"x": curve.steps, "mode": "lines", "legendgroup": escape(answer.variant)}
    if curve.lows:
        edge = {**common, "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        yield {**edge, "y": _percents(curve.lows)}
        yield {**edge, "y": _percents(curve.highs), "fill": "tonexty", "fillcolor": f"{color}30"}
    if curve.steps:
        yield {**common, "y": _percents(curve.gaps), "name": escape(answer.variant), "line": {"color": color}}


def _percents(shares: Sequence[float]) -> list[float | None]:
    return _finite([100 * share for share in shares])


def _finite(values: Sequence[float]) -> list[float | None]:
    """Six digits, more than a plot can show; null, a gap in the line, for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
