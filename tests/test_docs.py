"""The documents: each command, key and path in them exists, and the site builds and loads nothing from elsewhere."""

import os
import re
import shlex
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpt_pretrain.commands.arguments import read_arguments
from gpt_pretrain.compare.__main__ import FinishedRuns
from gpt_pretrain.compare.gate import gate_problems
from gpt_pretrain.compare.training import compare_problems
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.coordinate_check import coordinate_check_problems
from gpt_pretrain.fp8.comparisons import COMPARISONS
from gpt_pretrain.huggingface.architectures import Architecture
from gpt_pretrain.huggingface.published_config import NOT_HERE
from gpt_pretrain.report.records import RECORD_KINDS
from tests.browser import CHROMIUM, MISSING, open_browser
from tests.test_architecture import KNOWS, PACKAGE

ROOT = Path(__file__).parents[1]
MANUAL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path.name: path.read_text() for path in MANUAL}
ALL_TEXT = "\n".join(TEXT.values())
# Programs that take a run's command line.
PROGRAM = re.compile(
    r"(?:-m gpt_pretrain(?:\.(?:plan|benchmark|compare|coordinate_check|prepare_data))?"
    r"|/(?:fp8_gpt|prepare_data)\.sbatch)(?=\s|$)"
)
# Of a sweep the first run; Hydra's own keys are not a run's.
NOT_OF_A_RUN = ("-", "$", '"$', "hydra")
ROOM = re.compile(r"^\| `(\w+)(?:/|\.py)` \| .+ \| (.+) \|$", flags=re.MULTILINE)


def commands():
    """Number of processes and overrides of each command in a block of code that takes a run's command line."""
    for name, text in TEXT.items():
        for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                if (program := PROGRAM.search(line)) and not {"…", "--config-dir"} & set(re.split(r"[\s=]", line)):
                    words = shlex.split(line[program.end() :], comments=True)
                    overrides = [word for word in words if "=" in word and not word.startswith(NOT_OF_A_RUN)]
                    if "-m" in words:
                        overrides = [re.sub(r"=([^\[,]+),.*", r"=\1", word) for word in overrides]
                    start = line if "hydra/launcher=slurm" in words else line[: program.end()]
                    yield pytest.param(start, overrides, id=f"{name}: {line.strip()}")


def processes_of(start):
    """(all, per node) that a command starts; of `plan` and the like as many as its configuration says."""
    options = re.findall(r"(?:--n?|hydra\.launcher\.)(nodes|gpus.per.node|nproc-per-node)[= ](\d+)", start)
    sizes = {name.replace("_", "-"): int(size) for name, size in options}
    local = sizes.get("gpus-per-node", sizes.get("nproc-per-node", 1))
    return sizes.get("nodes", 1) * local, local


@pytest.mark.parametrize(("start", "overrides"), commands())
def test_every_command_of_the_documents_passes_the_rules(start, overrides, broken_rules, compose_config):
    world_size, local_world_size = processes_of(start)
    if any(override.startswith("runs=") for override in overrides):
        # Finished runs have no configuration to compose.
        demands = read_arguments(FinishedRuns, overrides).compare
        assert [*gate_problems(demands)] == []
        return
    if start.endswith("fp8_gpt.sbatch"):
        # As the script has it.
        overrides = ["fp8=delayed", *overrides]
    if re.search(r"-m gpt_pretrain(\s|$)|fp8_gpt", start):
        assert broken_rules(*overrides, world_size=world_size, local_world_size=local_world_size) == []
        return
    config = compose_config(*overrides)
    if re.search(r"gpt_pretrain\.compare(\s|$)", start):
        assert [*compare_problems(config)] == []
    if re.search(r"gpt_pretrain\.coordinate_check(\s|$)", start):
        assert [*coordinate_check_problems(config)] == []


def test_every_command_of_the_documents_was_found():
    assert len(list(commands())) > 30


def test_every_make_command_of_the_documents_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^ *|&& )make ([a-z-]+)", ALL_TEXT, flags=re.MULTILINE)) - {"the"}

    assert {"train", "test", "docs"} <= named <= targets
    assert {"make train", "make test"} <= set(re.findall(r"make \w+", TEXT["README.md"]))


def test_every_choice_of_the_documents_exists():
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    named = {
        (group, choice)
        for group, choices in re.findall(r"(?<![\w.])([a-z0-9]+)=([a-z0-9_,]+)", ALL_TEXT)
        for choice in choices.split(",")
        # What `import_hf` and `translate` write.
        if group in groups and choice not in ("imported", "mine")
    }

    assert len(named) > 20
    assert not [f"{group}={choice}" for group, choice in named if not (ROOT / f"conf/{group}/{choice}.yaml").exists()]


def test_every_key_of_the_documents_exists():
    sections = {key.rpartition(".")[0] for key in schema_keys()}
    roots = "model|trainer|checkpoint|logging|sample|plan|benchmark|compare|coordinate_check"
    pattern = rf"(?<![\w./-])((?:{roots})(?:\.\w+)+)\b(?![.(])"
    named = {key for key in re.findall(pattern, ALL_TEXT) if not key.endswith((".md", ".py", ".json", ".html"))}

    assert "trainer.max_steps" in named
    assert named <= {*schema_keys(), *sections, "benchmark.overrides.lean"}


def test_every_path_of_the_documents_exists():
    """Links are the site's matter; these are the paths in backticks."""
    found = re.findall(r"`((?:gpt_pretrain|conf|tests|scripts|docs|benchmarks)/[\w./-]+)`", ALL_TEXT)
    # Rooms of the package, as CONTRIBUTING names them.
    rooms = "|".join(KNOWS)
    found += [f"gpt_pretrain/{path}" for path in re.findall(rf"`((?:{rooms})/\w+\.py)`", ALL_TEXT)]

    assert len(found) > 20
    assert not [path for path in found if "NAME" not in path and not (ROOT / path).exists()]


def anchors(page):
    """The headings of a page, spelled as GitHub and mkdocs spell their anchors."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(link):
    path, _, anchor = link.partition("#")
    return (ROOT / path).exists() and (not anchor or anchor in anchors(ROOT / path))


@pytest.mark.parametrize("folder", ["gpt_pretrain", "conf", "tests"])
def test_every_page_that_a_comment_names_exists(folder):
    files = [path for suffix in ("py", "yaml") for path in (ROOT / folder).rglob(f"*.{suffix}")]
    pattern = re.compile(r"(?:docs|benchmarks)/[\w-]+\.md(?:#[\w-]+)?")
    named = {link for path in files for link in pattern.findall(path.read_text())}

    assert named
    assert not [link for link in named if not resolves(link)]


def test_the_readme_is_short():
    assert len(TEXT["README.md"].split()) <= 750


def test_contributing_states_what_each_room_knows():
    stated = {room: set(re.findall(r"`(\w+)`", knows)) for room, knows in ROOM.findall(TEXT["CONTRIBUTING.md"])}

    assert stated == {room: knows for room, knows in KNOWS.items() if room != "a command"}
    assert all((PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file() for room in stated)


class Loads(HTMLParser):
    """What a page loads: the addresses of everything but links that a reader clicks."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        if tag != "a":
            self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert not [address for address in loads.addresses if re.match(r"\w*:?//", address)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style


@pytest.fixture(scope="module")
def browser_page():
    if CHROMIUM is None:
        # As every skipped test, it fails CI.
        pytest.skip(MISSING)
    with open_browser() as page:
        yield page


@pytest.mark.parametrize("page_name", ["index.html", "benchmarks/index.html", "keys.html"])
def test_the_search_finds_a_word_in_pages_opened_from_the_disk(page_name, browser_page, site):
    browser_page.open(site / page_name, "document.querySelector('[data-md-component=search-query]') !== null")
    typing = (
        "(() => { var query = document.querySelector('[data-md-component=search-query]'); query.focus();"
        "query.value = 'rewind'; query.dispatchEvent(new Event('keyup'));"
        "query.dispatchEvent(new Event('input')) })()"
    )
    found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    # Again and again: the field is there before the page's script listens to it.
    browser_page.wait(f"({typing}, {found}.length > 0)")
    links = browser_page.evaluate(found)
    pages = {page.as_uri() for page in site.rglob("*.html")}
    assert {re.split("[?#]", link)[0] for link in links} <= pages
    assert not [address for address in browser_page.requests() if not address.startswith(("file:", "about:", "data:"))]
    assert browser_page.problems() == []


def test_the_site_lists_every_key_and_every_metric(site):
    keys, metrics = (site / "keys.html").read_text(), (site / "metrics.html").read_text()

    assert not [key for key in schema_keys() if f"<code>{key}</code>" not in keys]
    for kind, record in RECORD_KINDS.items():
        assert f'id="{kind}"' in metrics
        assert not [field for field in record.__dataclass_fields__ if f"<code>{field}</code>" not in metrics]


def test_the_site_lists_the_classes_of_transformers_and_what_is_refused(site):
    section = (site / "checkpoints.html").read_text().partition('id="import-from-transformers"')[2].partition("<h2")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in section.split("<tr>")]
    found = [tuple(unescape(re.sub("<[^>]*>", "", cell)) for cell in row) for row in cells if row]
    assert [row[:2] for row in found[: len(Architecture)]] == [(each.name, each.value) for each in Architecture]
    assert found[len(Architecture) :] == [(kind, *why) for kind, why in NOT_HERE.items()]


def test_the_site_lists_every_comparison_of_the_proof_with_its_bound_and_what_it_does(site):
    table = (site / "fp8.html").read_text().partition('id="what-it-compares"')[2].partition("<h3")[0]
    planned = [(each.what, each.bound, "stops" if each.stops else "warns") for each in COMPARISONS]
    found = [tuple(map(unescape, re.findall(r"<td[^>]*>(.*?)</td>", row))) for row in table.split("<tr>")]
    assert [row for row in found if len(row) == 3] == planned
