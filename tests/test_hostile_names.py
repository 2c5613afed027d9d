"""Names of files, folders, runs and variants that look like YAML, HTML, Markdown, shell or a terminal's commands."""

import io
import subprocess
from dataclasses import replace

import pytest
import yaml
from rich.table import Table
from rich.text import Text

from gpt_pretrain.benchmark.report import benchmark_markdown
from gpt_pretrain.commands.arguments import read_arguments
from gpt_pretrain.compare.__main__ import FinishedRuns
from gpt_pretrain.config.errors import list_argument, override_word, shell_word, visible
from gpt_pretrain.huggingface.import_hf import _write_experiment
from gpt_pretrain.report.console import SafeConsole, print_line
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.overrides import parse_override, single_value
from tests.test_benchmark import benchmark_of, rows_of

NAMES = {
    "YAML": "a\ntrainer: {max_steps: 1}\ncheckpoint: {resume: never}",
    "a return": "a\rb",
    "a terminal": "a\x1b[2J\x1b]0;title\x07\x9b31m",
    "shell": "a; touch canary; $(touch canary) `touch canary` 'b' \"c\" !! ~",
    "quotes": "it's \\' \\\\' $HOME ${HOME} %s",
    "HTML": "<script>alert(1)</script>&amp;",
    "Markdown": "a | b\n# c `d` [e](f) *g*",
    "Hydra": "a,b=c{d}[e] ${oc.env:HOME} #f",
    "separators": "a\u2028b\u2029c\x85d\u202ee",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_is_one_word_of_one_line_of_a_shell(kind, tmp_path):
    word = shell_word(NAMES[kind])
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode() == NAMES[kind]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", NAMES)
def test_a_command_to_paste_gives_the_name_back(kind, tmp_path):
    def pasted(word):
        done = subprocess.run(["bash", "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode()

    name = NAMES[kind]
    listed = read_arguments(FinishedRuns, [pasted(shell_word(list_argument("runs", [name, "outputs/b"])))])
    assert listed.runs == [name, "outputs/b"]
    assert single_value(parse_override(pasted(override_word("run_dir", name)))) == name
    assert override_word("run_dir", "outputs/a-1") == "run_dir=outputs/a-1"


@pytest.mark.parametrize("kind", NAMES)
def test_an_imported_model_keeps_its_name_out_of_its_preset(kind, tmp_path):
    path, name = tmp_path / "experiment" / "imported.yaml", NAMES[kind].replace("/", "_")
    config = load_config([])
    _write_experiment(path, tmp_path / name, {"num_layers": 2}, config, tmp_path / name)
    lines = path.read_text().splitlines()
    assert [line.startswith("#") for line in lines[:4]] == [True, True, True, False]
    written = yaml.safe_load(path.read_text())
    assert set(written) == {"defaults", "model", "checkpoint"}
    assert written["checkpoint"].keys() == {"init_from"}


@pytest.mark.parametrize("kind", NAMES)
def test_a_console_shows_a_name_and_its_own_styles_alone(kind):
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=200, color_system="standard")
    print_line(console, NAMES[kind])
    table = Table(title=Text(NAMES[kind]))
    table.add_column("name")
    table.add_row(Text(NAMES[kind], style="red"))
    console.print(table)
    printed = file.getvalue()
    for styled in ("\x1b[31m", "\x1b[3m", "\x1b[1m", "\x1b[0m"):
        printed = printed.replace(styled, "")
    assert visible(printed, keep="\n") == printed


@pytest.mark.parametrize("kind", NAMES)
def test_a_benchmarks_markdown_has_the_lines_that_it_has_for_other_names(kind, compose_config):
    def document(name):
        row = replace(rows_of(compose_config)[0], name=name, overrides=(f"name={name}",), problem="3 | 4", figures=None)
        benchmark = benchmark_of(compose_config, [row])
        config = replace(benchmark.config, name=name)
        return benchmark_markdown(replace(benchmark, config=config, arguments=(f"name={name}",)))

    hostile, usual = (document(name).split("\n") for name in (NAMES[kind], "usual"))
    assert len(hostile) == len(usual)
    assert all(line.isprintable() for line in hostile)
    starts = ("#", "|", "- ", "    ", "<", "")
    for one, other in zip(hostile, usual, strict=True):
        assert [one.startswith(start) for start in starts] == [other.startswith(start) for start in starts]
    assert "<script>" not in hostile[0]
    assert not any("<script>" in line for line in hostile if line.startswith("|"))
