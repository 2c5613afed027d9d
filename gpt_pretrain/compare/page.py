"""`compare.html`: a comparison as one file that opens offline, on a phone and in print.

    Comparison → HTML tables that need no JavaScript → page.js draws the plots from the embedded JSON

plotly.js is embedded compressed and is most of the file. All text from runs and logs is escaped. A Content Security
Policy lets the browser run these scripts only and load nothing, whatever a log contains.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from gpt_pretrain.compare.answers import format_speedup
from gpt_pretrain.compare.comparison import (
    FILE_NAME,
    Answer,
    Comparison,
    ConfigDifference,
    Figures,
    Interval,
    RunRecord,
    write_result,
)
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.report.columns import UNKNOWN, format_count, format_gib, format_loss, format_share
from gpt_pretrain.report.records import Fp8Tensor

PAGE_NAME = "compare.html"
# More than a plot can show, in a third of the bytes.
_DIGITS = 6
# Fields of an FP8 tensor and their names on the page.
_QUANTITIES = {
    "saturated": "saturated",
    "flushed": "flushed to zero",
    "amax": "amax",
    "scale_min": "smallest scale",
    "scale_max": "largest scale",
}


def write_page(comparison: Comparison, directory: Path) -> Path:
    """Writes `compare.html` into a directory; see `write_result`."""
    return write_result(directory / PAGE_NAME, build_page(comparison))


def build_page(comparison: Comparison) -> str:
    """The page as HTML."""
    # Takes half a second.
    from plotly.offline import get_plotlyjs

    plotly, script = get_plotlyjs(), _resource("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(plotly)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # Without mtime=0, gzip's header would hold the time of day.
    packed = base64.b64encode(gzip.compress(plotly.encode(), 9, mtime=0)).decode()
    title = f"{', '.join(figures.variant for figures in comparison.figures)}: trained side by side"
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(title)}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n",
            f"<h1>{escape(title)}</h1>\n<p class='soft'>{escape(comparison.date)}</p>\n",
            *_verdict(comparison),
            '<p id="notice" role="alert" hidden></p>\n<noscript><p>The plots need JavaScript.</p></noscript>\n',
            *_tables(comparison),
            *_plots(comparison),
            *_appendix(comparison),
            f'<script type="application/json" id="data">{_embedded(plot_data(comparison))}</script>\n',
            f'<script type="text/plain" id="plotly">{packed}</script>\n<script>{script}</script>\n</body>\n</html>\n',
        ]
    )


def _resource(name: str) -> str:
    return (files("gpt_pretrain.compare") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _embedded(value: object) -> str:
    """JSON that cannot end its script element or open an HTML comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def plot_data(comparison: Comparison) -> dict[str, object]:
    """What page.js draws; numbers that are not finite become null, a gap in the line."""
    return {
        "baseline": comparison.baseline,
        "variants": list(dict.fromkeys(run.variant for run in comparison.runs)),
        "runs": [_shown(run, "name", "variant", "training", "validation") for run in comparison.runs],
        "answers": [_shown(answer, "variant", "gap_curve", "times") for answer in comparison.answers],
        "heat": [heat_map(run) for run in _observed(comparison)],
    }


def _shown(value: JsonObject, *names: str) -> dict[str, object]:
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, JsonObject):
        return _shown(value, *value.__dataclass_fields__)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _number(value) if isinstance(value, float) else value


def _observed(comparison: Comparison) -> list[RunRecord]:
    """The runs with FP8 statistics."""
    return [run for run in comparison.runs if any(record.tensors for record in run.fp8)]


def heat_map(run: RunRecord) -> dict[str, object]:
    """FP8 statistics by kind of tensor, layer and step; null for a step without them."""
    records = [record for record in run.fp8 if record.tensors]
    by_kind: dict[str, dict[str, list[Fp8Tensor | None]]] = {}
    for index, record in enumerate(records):
        for tensor in record.tensors:
            rows = by_kind.setdefault(tensor.tensor, {})
            rows.setdefault(tensor.layer, [None] * len(records))[index] = tensor
    tensors = {
        kind: {
            "layers": list(rows),
            **{
                quantity: [
                    [None if tensor is None else _number(getattr(tensor, quantity)) for tensor in row]
                    for row in rows.values()
                ]
                for quantity in _QUANTITIES
            },
        }
        for kind, rows in by_kind.items()
    }
    return {"name": run.name, "steps": [record.step for record in records], "tensors": tensors}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _verdict(comparison: Comparison) -> Iterator[str]:
    for answer in comparison.answers:
        yield f'<div class="verdict {answer.judgement}"><p>{escape(answer.sentence)}</p>'
        others = [reason for reason in answer.reasons if reason not in answer.sentence]
        yield "".join(f'<p class="soft">{escape(reason)}</p>' for reason in others) + "</div>\n"
    gate = comparison.gate
    if gate is not None:
        lines = gate.missed or ("The gate is passed.",)
        yield f'<div class="verdict {"missed" if gate.missed else "passed"}" id="gate">'
        yield "".join(f"<p>{escape(line)}</p>" for line in lines) + "</div>\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table class="{kind}">\n<tr>{head}</tr>\n{body}</table></div>\n'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>\n"


def _tables(comparison: Comparison) -> Iterator[str]:
    if comparison.obstacles or comparison.unchecked:
        yield "<h2>Why these runs cannot be compared</h2>\n"
    if comparison.obstacles:
        rows = [(each.run, each.key, each.baseline_value, each.value) for each in comparison.obstacles]
        yield _table(["run", "key", comparison.baseline, "this run"], rows, "words")
    if comparison.unchecked:
        yield _list(comparison.unchecked)
    yield f"<h2>Against {escape(comparison.baseline)}</h2>\n"
    yield _table(*table_of_variants(comparison))
    yield f'<p class="soft">Intervals: {100 * comparison.confidence:g}% confidence.</p>\n'
    tensors = [
        (figures.variant, each.layer, each.tensor, format_share(each.saturated), format_share(each.flushed))
        for figures in comparison.figures
        for each in figures.hurts
    ]
    if tensors:
        yield "<h2>Where FP8 hurts</h2>\n"
        yield _table(["variant", "layer", "tensor", "saturated", "flushed to zero"], tensors, "words")


def _plots(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Loss</h2>\n"
    yield (
        '<div class="tools"><label>over <select id="axis"><option value="steps">steps</option>'
        '<option value="tokens">tokens</option><option value="gpu_seconds">GPU-seconds</option></select></label>'
        '<label><input type="checkbox" id="log_x"> log x</label><label><input type="checkbox" id="log_y"> log y</label>'
        '<label>smoothing <input type="range" id="smoothing" min="0" max="10" step="0.5" value="1"></label></div>\n'
    )
    yield _figure(
        "training", "Training loss of each run. A click on a variant hides it; a drag zooms, a double click resets."
    )
    if any(run.validation.steps for run in comparison.runs):
        yield _figure("validation", "Validation loss.")
    if any(answer.gap_curve.steps for answer in comparison.answers):
        yield "<h2>Loss gap along the way</h2>\n"
        yield _figure("gap", "Smoothed loss against the baseline's, with the confidence interval where noise is known.")
    if any(answer.times for answer in comparison.answers):
        yield "<h2>Time to loss</h2>\n"
        caption = (
            "The baseline's GPU-seconds to a loss over each variant's: above 1 the variant is sooner. Later is right."
        )
        yield _figure("times", caption)
    observed = _observed(comparison)
    if observed:
        kinds = dict.fromkeys(tensor.tensor for run in observed for record in run.fp8 for tensor in record.tensors)
        yield "<h2>FP8 by layer and step</h2>\n"
        runs = _options((str(index), run.name) for index, run in enumerate(observed))
        tensors = _options((kind, kind.replace("_", " ")) for kind in kinds)
        yield f'<div class="tools"><select id="heat_run" aria-label="run">{runs}</select>'
        yield f'<select id="heat_tensor" aria-label="tensor">{tensors}</select>'
        yield f'<select id="heat_quantity" aria-label="quantity">{_options(_QUANTITIES.items())}</select></div>\n'
        yield _figure("heat", "Statistics of the tensors of each linear layer.")


def _options(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(shown)}</option>' for value, shown in entries)


def _figure(name: str, caption: str) -> str:
    buttons = "".join(
        f'<button type="button" data-save="{name}" data-format="{kind}">{kind.upper()}</button>'
        for kind in ("svg", "png")
    )
    return (
        f'<figure><div class="plot" id="{name}"></div><figcaption>{escape(caption)}</figcaption>'
        f'<div class="tools">{buttons}</div></figure>\n'
    )


def _appendix(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Runs</h2>\n"
    rows = [
        (run.name, run.state, format_count(run.tokens_per_s), str(run.num_gpus or UNKNOWN), run.source)
        for run in comparison.runs
    ]
    yield _table(["run", "state", "tokens/s", "GPUs", "from"], rows, "words")
    if comparison.differences:
        yield "<h2>Differences between configurations</h2>\n"
        variants = [*dict.fromkeys(run.variant for run in comparison.runs)]
        differences = [
            (each.key, *(_values(comparison, each, variant) for variant in variants)) for each in comparison.differences
        ]
        yield _table(["key", *variants], differences, "words")
    yield f"<h2>How it was computed</h2>\n{_list(comparison.methods)}"
    yield f"<h2>Again</h2>\n<pre>{escape(comparison.command)}</pre>\n"
    yield f"<p class='soft'>All figures: {FILE_NAME} beside this page.</p>\n"
    yield "<details><summary>Commands and versions</summary>\n"
    for run in comparison.runs:
        yield f"<p>{escape(run.name)}: {escape(run.versions or UNKNOWN)}</p>"
        yield f"<pre>{escape(run.command or UNKNOWN)}</pre>\n"
    yield "</details>\n"


def _values(comparison: Comparison, difference: ConfigDifference, variant: str) -> str:
    """The values that a variant's runs have, each once."""
    runs = zip(comparison.runs, difference.values, strict=True)
    return ", ".join(dict.fromkeys(value or UNKNOWN for run, value in runs if run.variant == variant))


def table_of_variants(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table that console and page show: headings, and one row per variant, the baseline first."""
    headings = ["variant", "runs", "loss", "gap", "time to loss", "tokens/s per GPU", "memory", "skipped", "FP8"]
    # The baseline has no answer.
    answers = (None, *comparison.answers)
    return headings, [[*_cells(*row)] for row in zip(comparison.figures, answers, strict=True)]


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
