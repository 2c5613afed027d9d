"""Experiments of translations: the loader composes every value that was translated, or nothing reads the key."""

import pytest

from gpt_pretrain.config import derived
from gpt_pretrain.config.keys import value_of
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.source import Source
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.no_effect import why_no_effect
from gpt_pretrain.run.products import resolve
from gpt_pretrain.translate.experiment import build_experiment
from gpt_pretrain.translate.formats import FORMATS, Given, format_of
from gpt_pretrain.translate.translation import Translation
from tests.test_translate_megatron import SMALL
from tests.translations import FOLDER

# What null stands for in the typed configuration.
DERIVED = {
    "model.ffn_hidden_size": derived.ffn_hidden_size,
    "model.moe_ffn_hidden_size": derived.moe_ffn_hidden_size,
    "model.kv_channels": derived.kv_channels,
    "model.num_query_groups": derived.num_query_groups,
    "model.expert_tensor_parallel_size": derived.expert_tensor_parallel_size,
}
ENVIRONMENT = {"WORLD_SIZE": "64", "4": "corpus", "3": "corpus"}
CASES = {
    **{
        path.name: ([path], [])
        for path in sorted(FOLDER.iterdir())
        # Of these the model has open sizes, or an open corpus.
        if path.suffix != ".json"
    },
    "defaults of FP8": ([], [*SMALL, "--fp8-format", "hybrid"]),
    "experts without FP8": ([], [*SMALL, "--num-experts", "4", "--expert-model-parallel-size", "2"]),
    "recomputation": ([], [*SMALL, "--recompute-activations", "--optimizer", "sgd"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_experiment_has_every_value(case, tmp_path):
    files, words = CASES[case]
    given = Given(files=files, words=words, environment=ENVIRONMENT)
    translation = FORMATS[format_of(given)](given)
    experiment = build_experiment(translation)
    place = tmp_path / "experiment" / "mine.yaml"
    place.parent.mkdir()
    place.write_text(experiment.text)
    config = load_config(["experiment=mine", "model.vocab_size=128256"], Source(config_dir=tmp_path))

    run, different = resolve(config), {}
    for key, setting in translation.settings.items():
        value = config_to_dict(value_of(config, key))
        if value is None and key in DERIVED:
            value = DERIVED[key](config.model)
        if value != setting.value and not why_no_effect(run, key) and key != "model.vocab_size":
            different[key] = value, setting.value
    assert different == {}
    assert len(translation.settings) > 3


def test_text_in_comments_and_values_stays_text():
    translation = Translation(program="a program", name="it's: {a} # name")
    translation.set("model.data.data_prefix", ["a, b", "c: d", "#e", "0x10", "'"], "origin\nmodel: {seed: 3}")
    translation.set("model.data.data_impl", "mmap", "x")
    translation.set("sample.prompt", "null", "\x1b[31m")
    translation.lose("--a\nname: evil", "there", "here")
    experiment = build_experiment(translation)

    assert experiment.problems == []
    assert "\x1b" not in experiment.text
    assert "\nname: evil" not in experiment.text
