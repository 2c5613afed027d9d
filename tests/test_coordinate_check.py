"""The coordinate check: with muP a rate transfers between widths, without it does not."""

import json
import math

import pytest

from gpt_pretrain.coordinate_check import NOT_FLAT, coordinate_check_problems, growth, main, verdict
from tests.refusals import check_told, compose_quickly
from tests.runs import SMALL_RUN, small_corpus

# Three layers, and sequences that are short enough for seconds.
SMALL = (
    *(
        each
        for each in SMALL_RUN
        if not each.startswith(("trainer.val_check", "trainer.limit_val", "trainer.max_steps"))
    ),
    "model.num_layers=3",
    "coordinate_check.widths=[32,64,128]",
)
MUON = (
    "optimizer=muon",
    "model.optim.lr=0.05",
    "model.optim.decoupled_lr=2e-3",
    "model.optim.muon_extra_scale_factor=1",
)
MUP = ("model.use_mup=true", "model.mup_base_hidden_size=32")


@pytest.mark.parametrize(
    ("overrides", "transfers"),
    [
        (MUP, True),
        ((), False),
        # The narrowest width is its base, and heads grow in number.
        ((*MUP, "model.kv_channels=16", "model.share_embeddings_and_output_weights=true"), True),
        (("model.use_mup=true", "model.mup_base_hidden_size=64", "model.mup_output_mult=0.999"), False),
        ((*MUP, *MUON, "model.optim.muon_scale_mode=unit_rms_norm"), True),
        ((*MUON, "model.optim.muon_scale_mode=spectral", "model.optim.lr=6e-3"), False),
    ],
    ids=["muP", "none", "muP, tied, more heads", "a fixed factor of logits", "muP with Muon", "Muon"],
)
def test_a_rate_transfers_with_mup_and_not_without(overrides, transfers, tmp_path, cache_dir, capsys):
    code = main([*SMALL, *small_corpus(cache_dir), *overrides, f"run_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert (code == 0, code == NOT_FLAT) == (transfers, not transfers), out
    assert ("does not transfer" in out) is not transfers
    sizes = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert list(sizes) == ["32", "64", "128"]
    assert {len(steps) for steps in sizes.values()} == {11}
    assert list(sizes["32"][0]) == ["embedding", "layer 1", "layer 2", "layer 3", "logits"]
    page = (tmp_path / "coordinate_check.html").read_text()
    assert page.count("plotly-graph-div") == 4
    assert f"run_dir={tmp_path}" in page


def test_growth_is_the_power_of_the_width():
    assert growth({64: 3.0, 128: 3.0, 256: 3.0}) == pytest.approx(0)
    assert growth({64: 1.0, 128: 2.0, 256: 4.0}) == pytest.approx(1)
    assert growth({100: 5.0, 200: 5 / math.sqrt(2)}) == pytest.approx(-0.5)
    assert growth({64: 1.0, 128: math.nan}) == math.inf
    assert growth({64: 1.0, 128: 0.0}) == math.inf


def test_the_verdict_names_what_depends_on_the_width():
    sizes = {width: [{"layer 1": 1.0, "logits": 1.0}, {"layer 1": 1.0, "logits": float(width)}] for width in (64, 128)}
    transfers, sentence = verdict(sizes)
    assert not transfers
    assert "logits (+1.00)" in sentence
    assert "layer 1" not in sentence
    vanishing = {width: [{"logits": 1.0}, {"logits": 1 / width}] for width in (64, 128)}
    assert not verdict(vanishing)[0]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("coordinate_check.widths=[]",), ("coordinate_check.widths=[]",)),
        (("coordinate_check.widths=[64,64]",), ("coordinate_check.widths=[64,64]",)),
        (("coordinate_check.widths=[0,64]",), ("coordinate_check.widths=[0,64]",)),
        (("coordinate_check.steps=4",), ("coordinate_check.steps=4", "5 or more")),
        (
            ("coordinate_check.widths=[64,68]", "model.ffn_hidden_size=300"),
            ("coordinate_check.widths=[64,68]", "model.ffn_hidden_size=300"),
        ),
        (("coordinate_check.widths=[64,90]", "model.ffn_hidden_size=null"), ("model.hidden_size=90", "width 90")),
        (
            ("coordinate_check.widths=[64,80]", "model.kv_channels=32"),
            ("coordinate_check.widths=[64,80]", "model.num_attention_heads=4", "2.5"),
        ),
        (("model.use_mup=true",), ("model.use_mup=true", "model.mup_base_hidden_size=64", "width 64")),
    ],
    ids=str,
)
def test_widths_that_cannot_be_compared_are_refused(overrides, told):
    problems = [*coordinate_check_problems(compose_quickly(overrides))]
    check_told(problems[0], told)


def test_the_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([]) == 2
    assert "a coordinate check" in capsys.readouterr().err


def test_the_default_checks_the_default_model(compose_config):
    assert [*coordinate_check_problems(compose_config())] == []
    help_example = (
        "model=gpt2_124m model.use_mup=true model.mup_base_hidden_size=192 coordinate_check.widths=[192,384,768]"
    )
    assert [*coordinate_check_problems(compose_config(*help_example.split()))] == []
