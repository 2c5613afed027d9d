"""compare.html: what is in it, that nothing of it is taken for code, and that it works in a browser."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpt_pretrain.compare.answers import compare_runs
from gpt_pretrain.compare.comparison import Curve, Gate, RunRecord
from gpt_pretrain.compare.page import build_page, build_plots, write_page
from gpt_pretrain.config.errors import UserError
from tests.browser import CHROMIUM, MISSING, open_browser

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
STEPS = tuple(range(1, 201))
VARIANTS = {"bf16": (1.0, 0.0), "fp8": (1.25, 0.002), f"it's {HOSTILE}": (0.8, -0.02)}


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
        configuration={"model.seed": str(seed), "model.fp8_recipe": variant},
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


def plots_of(comparison):
    return dict(build_plots(comparison))


def test_text_of_runs_is_text(html, comparison):
    parts = Parts(html)

    assert not [tag for tag, _ in parts.tags if tag in ("img", "link", "iframe")]
    assert not [attributes for _, attributes in parts.tags if {"src", "href", "onerror"} & set(attributes)]
    # plotly reads some HTML in its labels.
    assert "<" not in json.dumps(plots_of(comparison))
    said = "".join(parts.text.split())
    answers = [answer.sentence for answer in comparison.answers]
    for line in (*answers, *comparison.methods, *comparison.gate.missed, comparison.command, HOSTILE):
        assert "".join(line.split()) in said


def test_configurations_are_told_apart_by_variant_and_not_by_run(html):
    assert re.search(r"model\.fp8_recipe *│ *bf16 *│ *fp8 *│ *it's", Parts(html).text)


def test_the_policy_lets_nothing_be_loaded(html):
    (policy,) = [each["content"] for tag, each in Parts(html).tags if tag == "meta" and "http-equiv" in each]
    assert "default-src 'none'" in policy
    assert not re.search("https?:|unsafe-eval", policy)


def test_a_page_that_cannot_be_written_names_its_file(comparison, tmp_path):
    with pytest.raises(UserError, match=r"missing/compare\.html .*run_dir"):
        write_page(comparison, tmp_path / "missing")


def test_an_interval_is_behind_the_gap(comparison):
    plots = plots_of(comparison)
    (answer, _) = comparison.answers
    low, high, gap = plots["gap"]["data"][:3]
    assert low["y"][-1] == pytest.approx(100 * answer.loss_gap.low, rel=1e-4)
    assert high["y"][-1] == pytest.approx(100 * answer.loss_gap.high, rel=1e-4)
    assert gap["y"][-1] == pytest.approx(100 * answer.loss_gap.value, rel=1e-4)


def test_a_comparison_without_times_and_validation_has_a_page(comparison):
    none = Curve(steps=(), losses=(), tokens=(), gpu_seconds=())
    runs = [
        replace(each, training=replace(each.training, tokens=(), gpu_seconds=()), validation=none, num_gpus=None)
        for each in comparison.runs
    ]
    page = build_page(compare_runs(runs, command="", gate=None))
    plots = [attributes["id"] for _, attributes in Parts(page).tags if attributes.get("class") == "plotly-graph-div"]
    assert plots == ["training", "gap"]


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    if CHROMIUM is None:
        # As every skipped test, it fails CI.
        pytest.skip(MISSING)
    path = write_page(comparison, tmp_path_factory.mktemp("page"))
    with open_browser() as page:
        page.look(1200)
        page.open(path, "document.querySelectorAll('#gap .main-svg').length > 0")
        yield page


def center(page, selector):
    """Where the first element is that a CSS selector finds, scrolled to."""
    return page.evaluate(
        f"(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center'}});"
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def plot(page, name, expression):
    return page.evaluate(f"(() => {{ const p = document.getElementById('{name}'); return {expression}; }})()")


def test_the_page_draws_every_plot_and_loads_nothing(page):
    names = page.evaluate("[...document.querySelectorAll('.plotly-graph-div')].map(p => p.id)")
    assert names == ["training", "validation", "gap"]
    for name, num_traces in {"training": 6, "validation": 6, "gap": 6}.items():
        assert plot(page, name, "p.data.length") == num_traces, name
        assert plot(page, name, "p.querySelectorAll('.main-svg').length") > 0
    assert plot(page, "training", "p.querySelectorAll('.scatterlayer path.js-line').length") == 6
    assert page.problems() == []
    # A log's line is text in plots, too.
    assert page.evaluate("document.title") != "taken"
    assert page.evaluate("document.images.length") == 0
    assert [url for url in page.requests() if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def click(page, selector):
    x, y, width, height = center(page, selector)
    page.mouse((x + width / 2, y + height / 2))


def test_buttons_change_the_axes(page, comparison):
    curve = comparison.runs[0].training
    for number, values in ((2, curve.tokens), (3, curve.gpu_seconds), (1, curve.steps)):
        click(page, f"#training .updatemenu-button:nth-of-type({number})")
        assert plot(page, "training", "p.data[0].x") == pytest.approx(values, rel=1e-5)
