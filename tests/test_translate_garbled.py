"""`gpt_pretrain.translate` on files with a wrong value in any place: refused, or translated, but never a crash."""

import json
import tomllib

import pytest
from omegaconf import OmegaConf

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.translate.__main__ import main
from gpt_pretrain.translate.experiment import build_experiment
from gpt_pretrain.translate.formats import FORMATS, Given, format_of
from gpt_pretrain.translate.shell import read_script
from gpt_pretrain.translate.structured_files import flat
from tests.launching import run_ranks
from tests.translations import FOLDER

FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".yaml", ".toml", ".json"))
WRONG = ("x", -1, 0, [], [1, "x"], {"a": {"b": 1}}, True, None, 1.5, 2**70, "${a.b}", "#: {", "")


def read(path):
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))


def with_value(values, name, value):
    """A copy with another value of a dotted name."""
    copy = json.loads(json.dumps(values))
    *sections, leaf = name.split(".")
    node = copy
    for section in sections:
        node = node[section]
    node[leaf] = value
    return copy


@pytest.mark.parametrize("file", FILES)
def test_a_wrong_value_in_any_place_is_no_crash(file, tmp_path):
    values = read(FOLDER / file)
    format = format_of(Given(files=[FOLDER / file], words=[], environment={}))
    # TOML's values, read as JSON, go the same way.
    path = tmp_path / ("file.json" if file.endswith(".json") else "file.yaml")
    refused = 0
    for number, name in enumerate(flat(values)):
        # Some of them for each setting, and all of them in a file.
        for each in (number, number + 4, number + 9):
            path.write_text(json.dumps(with_value(values, name, WRONG[each % len(WRONG)])))
            try:
                translation = FORMATS[format](Given(files=[path], words=[], environment={}))
            except ConfigError:
                refused += 1
                continue
            if each % 30 == 0:
                # Composing takes a tenth of a second.
                build_experiment(translation)
    assert refused > 0 or format == "accelerate"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.iterdir() if "megatron" in path.name))
def test_half_a_script_is_no_crash(file):
    text = (FOLDER / file).read_text()
    for end in range(0, len(text), 97):
        read_script(text[:end], {})


def test_a_wrong_value_is_told_by_its_setting(capsys):
    assert main([str(FOLDER / "nemo_megatron_gpt_config.yaml"), "model.ffn_hidden_size=wide"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: model.ffn_hidden_size=wide ")


def test_stdout_is_the_yaml_and_stderr_the_report():
    done = run_ranks(1, ["-m", "gpt_pretrain.translate", str(FOLDER / "megatron_llama3_8b_fp8.sh")])

    assert done.returncode == 0
    assert done.stdout.startswith("# @package _global_\n")
    # No library speaks in between.
    assert done.stderr.startswith("Megatron-LM → megatron_llama3_8b_fp8\n\ntranslated:\n")
