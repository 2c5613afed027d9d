"""compare.html: what is in it, that nothing of it is taken for code, and that it works in a browser."""

import base64
import gzip
import hashlib
import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from gpt_pretrain.compare.answers import compare_runs
from gpt_pretrain.compare.comparison import Curve, Gate, RunRecord, Setting
from gpt_pretrain.compare.page import build_page, heat_map, plot_data, write_page
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.report.records import Fp8Record, Fp8Tensor
from tests.browser import CHROMIUM, MISSING, open_browser

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
STEPS = tuple(range(1, 201))
VARIANTS = {"bf16": (1.0, 0.0), "fp8": (1.25, 0.002), f"it's {HOSTILE}": (0.8, -0.02)}


def tensor(layer, kind, step):
    return Fp8Tensor(
        layer=layer,
        tensor=kind,
        amax=2.0 * step,
        scale_min=0.5,
        scale_max=4.0,
        saturated=step / 1000,
        flushed=0.25,
        amax_history_used=None,
    )


def fp8_record(step):
    names = ("decoder.layers.0.mlp.linear_fc1", f"decoder.layers.1.{HOSTILE}")
    tensors = [tensor(name, kind, step) for name in names for kind in ("input", "weight")]
    return Fp8Record(step=step, tensors=tuple(tensors), warnings=())


def run(variant, seed):
    speed, gap = VARIANTS[variant]
    losses = tuple((3 + 4 / math.sqrt(s)) * (1 + gap + 1e-3 * math.sin(s * seed)) for s in STEPS)
    return RunRecord(
        name=f"{variant}, seed {seed}",
        variant=variant,
        seed=seed,
        source="outputs/" + HOSTILE,
        format="gpt_pretrain",
        state="finished",
        num_gpus=1,
        training=Curve(
            steps=STEPS,
            losses=losses,
            tokens=tuple(512 * s for s in STEPS),
            gpu_seconds=tuple(0.1 * s / speed for s in STEPS),
        ),
        validation=Curve(steps=(100, 200), losses=(3.5, 3.4), tokens=(51200, 102400), gpu_seconds=(10.0, 20.0)),
        tokens_per_s=5120 * speed,
        memory_gib=None,
        skipped_steps=0,
        fp8_share=0.0 if variant == "bf16" else 0.7,
        fp8=() if variant == "bf16" else (fp8_record(100), fp8_record(200)),
        configuration=(Setting(key="model.seed", value=str(seed)), Setting(key="model.fp8_recipe", value=variant)),
        versions=HOSTILE,
        command=HOSTILE,
    )


@pytest.fixture(scope="module")
def comparison():
    runs = [run(variant, seed) for variant in VARIANTS for seed in (1, 2)]
    return compare_runs(runs, command=f"compare {HOSTILE}", gate=Gate(max_loss_gap=0.005, min_speedup=None))


@pytest.fixture(scope="module")
def html(comparison):
    return build_page(comparison)


class Parts(HTMLParser):
    """A page as a browser reads it: its tags, its scripts, and its visible text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.text = [], [], ""
        self._script = False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append([dict(attributes), ""])

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1][1] += data
        else:
            self.text += data


def test_text_of_runs_is_text_and_the_data_are_those_of_the_comparison(html, comparison):
    parts = Parts(html)

    assert not [tag for tag, _ in parts.tags if tag in ("img", "link", "iframe")]
    assert not [attributes for _, attributes in parts.tags if {"src", "href", "onerror"} & set(attributes)]
    (data,) = [json.loads(text) for attributes, text in parts.scripts if attributes.get("id") == "data"]
    assert data == plot_data(comparison)
    assert data["runs"][0]["training"]["losses"] == pytest.approx(comparison.runs[0].training.losses, rel=1e-5)
    for answer in comparison.answers:
        assert answer.sentence in parts.text
    for said in (*comparison.methods, *comparison.gate.missed, comparison.command, HOSTILE):
        assert said in parts.text


def test_configurations_are_told_apart_by_variant_and_not_by_run(html):
    assert "<td>model.fp8_recipe</td><td>bf16</td><td>fp8</td><td>it&#x27;s &lt;/script&gt;" in html


def test_the_policy_lets_these_scripts_run_and_nothing_be_loaded(html):
    parts = Parts(html)
    (policy,) = [
        attributes["content"]
        for tag, attributes in parts.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    texts = {attributes.get("id"): text for attributes, text in parts.scripts}
    plotly = gzip.decompress(base64.b64decode(texts["plotly"])).decode()
    assert "plotly.js" in plotly[:100]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (texts[None], plotly)]
    scripts = re.search(r"script-src ([^;]*);", policy).group(1)
    assert scripts.split() == [f"'sha256-{each}'" for each in hashes]
    assert "default-src 'none'" in policy
    assert not re.search("https?:|unsafe-eval", policy)


def test_a_page_is_the_same_each_time_and_small(html, comparison):
    assert build_page(comparison) == html
    # plotly.js compressed, in base64: 1.9 MiB.
    assert len(html) < 2.2 * 1024**2


def test_a_page_that_cannot_be_written_names_its_file(comparison, tmp_path):
    with pytest.raises(UserError, match=r"missing/compare\.html .*run_dir"):
        write_page(comparison, tmp_path / "missing")


def test_numbers_that_are_not_finite_are_gaps(comparison):
    first = comparison.runs[0]
    curve = replace(first.training, losses=(math.nan, math.inf, *first.training.losses[2:]))
    data = plot_data(replace(comparison, runs=(replace(first, training=curve), *comparison.runs[1:])))
    assert data["runs"][0]["training"]["losses"][:2] == [None, None]


def test_a_heat_map_has_a_row_for_each_layer_and_a_column_for_each_step():
    late = replace(fp8_record(300), tensors=fp8_record(300).tensors[:1])
    warning = Fp8Record(step=250, tensors=(), warnings=("w",))
    heat = heat_map(replace(run("fp8", 1), fp8=(fp8_record(100), warning, late)))

    assert heat["steps"] == [100, 300]
    assert list(heat["tensors"]) == ["input", "weight"]
    assert len(heat["tensors"]["input"]["layers"]) == 2
    assert heat["tensors"]["input"]["saturated"] == [[0.1, 0.3], [0.1, None]]
    assert heat["tensors"]["weight"]["amax"] == [[200, None], [200, None]]


def test_a_comparison_without_times_statistics_and_validation_has_a_page(comparison):
    none = Curve(steps=(), losses=(), tokens=(), gpu_seconds=())
    runs = [
        replace(
            each, training=replace(each.training, tokens=(), gpu_seconds=()), validation=none, fp8=(), num_gpus=None
        )
        for each in comparison.runs
    ]
    page = build_page(compare_runs(runs, command="", gate=None))
    plots = [attributes["id"] for _, attributes in Parts(page).tags if attributes.get("class") == "plot"]
    assert plots == ["training", "gap"]


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    if CHROMIUM is None:
        # As every skipped test, it fails CI.
        pytest.skip(MISSING)
    path = write_page(comparison, tmp_path_factory.mktemp("page"))
    with open_browser() as page:
        page.look(1200)
        page.open(path, "document.body?.dataset.state === 'ready'")
        yield page


def center(page, selector):
    """Where the first element is that a CSS selector finds, scrolled to."""
    return page.evaluate(
        f"(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center'}});"
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def choose(page, id_, value, what="value"):
    page.evaluate(
        f"(() => {{ const e = document.getElementById('{id_}'); e.{what} = {json.dumps(value)};"
        "e.dispatchEvent(new Event('input')); })()"
    )


def plot(page, name, expression):
    return page.evaluate(f"(() => {{ const p = document.getElementById('{name}'); return {expression}; }})()")


def test_the_page_draws_every_plot_and_loads_nothing(page):
    assert page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.id)") == [
        "training",
        "validation",
        "gap",
        "times",
        "heat",
    ]
    for name, num_traces in {"training": 6, "validation": 6, "gap": 6, "times": 2, "heat": 1}.items():
        assert plot(page, name, "p.data.length") == num_traces, name
        assert plot(page, name, "p.querySelectorAll('.main-svg').length") > 0
    assert plot(page, "training", "p.querySelectorAll('.scatterlayer path.js-line').length") == 6
    assert plot(page, "training", "p.querySelectorAll('g.legend .traces').length") == 3
    assert plot(page, "heat", "p.querySelectorAll('.heatmaplayer image').length") == 1
    assert page.problems() == []
    assert page.evaluate("document.getElementById('notice').hidden")
    # A log's line is text in plots, too.
    assert "taken" not in page.evaluate("document.title").partition(":")[2]
    assert page.evaluate("document.title") != "taken"
    assert page.evaluate("document.images.length") == 0
    assert [url for url in page.requests() if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def test_a_drag_zooms_and_a_click_on_the_legend_hides_a_variant(page):
    before = plot(page, "training", "p._fullLayout.xaxis.range")
    x, y, width, height = center(page, "#training .nsewdrag")
    page.mouse((x + 0.25 * width, y + height / 2), (x + 0.3 * width, y + height / 2), (x + 0.5 * width, y + height / 2))
    after = plot(page, "training", "p._fullLayout.xaxis.range")
    quarter = (before[1] - before[0]) / 4
    assert after == pytest.approx([before[0] + quarter, before[0] + 2 * quarter], abs=0.02 * (before[1] - before[0]))

    x, y, width, height = center(page, "#training g.legend .traces .legendtoggle")
    page.mouse((x + width / 2, y + height / 2))
    # plotly waits for a second click before it takes this for one.
    hidden = "p.data.map(t => t.visible ?? true)"
    page.evaluate("new Promise(done => setTimeout(done, 700))")
    assert plot(page, "training", hidden) == ["legendonly"] * 2 + [True] * 4


def test_axes_and_smoothing_change_what_is_drawn(page, comparison):
    curve = comparison.runs[0].training
    choose(page, "smoothing", "0")
    assert plot(page, "training", "p.data[0].y") == pytest.approx(curve.losses, rel=1e-5)
    choose(page, "smoothing", "10")
    smoothed = plot(page, "training", "p.data[0].y")
    # 10% of 200 points: ten on each side.
    assert smoothed[50] == pytest.approx(sum(curve.losses[40:61]) / 21, rel=1e-5)
    assert smoothed[0] == pytest.approx(curve.losses[0], rel=1e-5)
    for axis, values in (("tokens", curve.tokens), ("gpu_seconds", curve.gpu_seconds), ("steps", curve.steps)):
        choose(page, "axis", axis)
        assert plot(page, "training", "p.data[0].x") == pytest.approx(values, rel=1e-5)
    choose(page, "log_y", True, "checked")
    assert plot(page, "training", "p._fullLayout.yaxis.type") == "log"
    choose(page, "heat_quantity", "amax")
    assert plot(page, "heat", "p.data[0].z[0]") == pytest.approx([math.log2(200), math.log2(400)], rel=1e-5)


def test_a_plot_is_saved_for_a_paper_and_on_white_in_the_dark_too(page, tmp_path):
    page.look(1200, dark=True)
    page.save_downloads(tmp_path)
    for kind in ("svg", "png"):
        x, y, width, height = center(page, f"button[data-save=gap][data-format={kind}]")
        page.mouse((x + width / 2, y + height / 2))
        deadline = time.monotonic() + 60
        while not (tmp_path / f"compare_gap.{kind}").exists():
            assert time.monotonic() < deadline, page.problems()
            time.sleep(0.1)
    drawing = (tmp_path / "compare_gap.svg").read_text()
    assert "rgb(255, 255, 255)" in drawing
    assert "<text" in drawing
    # Three pixels for each of 800 × 420.
    with Image.open(tmp_path / "compare_gap.png") as picture:
        assert picture.size == (2400, 1260)
    assert page.problems() == []
    page.look(1200)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (390, True)])
def test_the_page_fits_wide_and_narrow_screens_by_day_and_by_night(page, width, dark):
    page.look(width, dark=dark)
    page.evaluate("new Promise(done => setTimeout(done, 500))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert plot(page, "training", "p._fullLayout.width") <= width
    light = [max(map(int, re.findall(r"\d+", page.evaluate(found))[:3])) > 128 for found in _COLORS]
    assert light == [not dark, dark, not dark, dark]


# Of the page and of a plot: the background and the text.
_COLORS = (
    "getComputedStyle(document.body).backgroundColor",
    "getComputedStyle(document.body).color",
    "getComputedStyle(document.querySelector('#training .main-svg')).backgroundColor",
    "getComputedStyle(document.querySelector('#training .xtick text')).fill",
)
