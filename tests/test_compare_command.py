"""`python -m gpt_pretrain.compare runs=[…]`: what it prints, writes and answers to scripts."""

import json
import math
from pathlib import Path

import pytest

from gpt_pretrain.compare.__main__ import main
from gpt_pretrain.report.records import ValidationRecord
from tests.synthetic_runs import power_law
from tests.test_commands import load
from tests.test_compare_comparison import saved_comparison
from tests.test_compare_logs import config, log, train_record, write_run

STEPS = range(10, 1010, 10)


def write_runs(tmp_path, *, gap=0.0, s_per_step=2.0, seeds=(1, 2, 3)):
    """Three seeds of BF16 and as many of FP8, whose losses are `gap` higher; as `runs=` takes them."""
    places = []
    for fp8 in ("false", "true"):
        for seed in seeds:
            pace = s_per_step if fp8 == "true" else 2.0
            factor = (1 + gap * (fp8 == "true")) * (1 + 0.0005 * (seed - 2))
            records = [
                train_record(
                    step,
                    power_law(1000 * step) * factor,
                    step_time_s=pace,
                    tokens_per_s=512 / pace,
                    tokens_per_s_per_gpu=512 / pace,
                )
                for step in STEPS
            ]
            name = f"{fp8}_{seed}"
            places.append(write_run(tmp_path / name, *records, config=config(name, seed=seed, fp8=fp8)))
    return f"runs=[{','.join(places)}]"


def test_finished_runs_are_compared(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([write_runs(tmp_path, s_per_step=1.6), f"run_dir={out}"]) == 0

    printed = capsys.readouterr().out
    comparison = saved_comparison(out)
    (answer,) = comparison.answers
    assert (comparison.baseline, answer.variant, answer.judgement) == ("bf16", "fp8_delayed", "as_good")
    assert answer.noise_from == "paired seeds"
    assert answer.speedup.value == pytest.approx(1.25, rel=1e-3)
    assert [figures.num_runs for figures in comparison.figures] == [3, 3]
    assert [each.key for each in comparison.differences] == ["model.fp8"]
    assert comparison.command.startswith("python -m gpt_pretrain.compare ")
    for shown in ("fp8_delayed", "1.25×", str(out / "compare.json")):
        assert shown in printed


def test_the_last_validation_of_each_set_is_shown(tmp_path, capsys):
    places = []
    for fp8, losses in (("false", {"web": 3.1111, "code": 1.2222}), ("true", {"web": 3.3333, "code": 1.4444})):
        records = [train_record(step, power_law(1000 * step)) for step in STEPS]
        for step, shift in ((500, 1.0), (1000, 0.0)):
            shifted = {name: loss + shift for name, loss in losses.items()}
            records.append(
                ValidationRecord(step=step, loss=2.0, perplexity=7.4, num_samples=16, time_s=0.1, losses=shifted)
            )
        places.append(write_run(tmp_path / fp8, *records, config=config(fp8, seed=1, fp8=fp8)))
    assert main([f"runs=[{','.join(places)}]", f"run_dir={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    table = printed[printed.index(next(line for line in printed if "last validation losses" in line)) :]
    rows = [line.replace("│", " ").replace("┃", " ").split() for line in table[1:5]]
    assert rows[0] == ["run", "web", "code"]
    assert [row[-2:] for row in rows[2:]] == [["3.1111", "1.2222"], ["3.3333", "1.4444"]]


@pytest.mark.parametrize(
    ("gap", "demands", "code"),
    [
        (0.0, ["compare.max_loss_gap=0.5%", "compare.min_speedup=1.2"], 0),
        (0.0, ["compare.min_speedup=1.3"], 4),
        (0.01, ["compare.max_loss_gap=0.5%"], 4),
        (0.01, ["compare.max_loss_gap=2%"], 0),
        (0.01, [], 0),
    ],
)
def test_a_missed_gate_has_its_own_exit_code(tmp_path, capsys, gap, demands, code):
    out = tmp_path / "out"
    assert main([write_runs(tmp_path, gap=gap, s_per_step=1.6), f"run_dir={out}", *demands]) == code
    gate = saved_comparison(out).gate
    assert (gate is None) == (not demands)
    assert ("gate: " in capsys.readouterr().out) == bool(demands)
    assert bool(gate and gate.missed) == (code == 4)


def test_one_seed_of_each_cannot_pass_a_gate(tmp_path):
    assert main([write_runs(tmp_path, seeds=(1,)), f"run_dir={tmp_path / 'out'}", "compare.max_loss_gap=5%"]) == 4


def test_what_cannot_be_compared_is_told_before_the_numbers(tmp_path, capsys):
    for name in ("megatron_lm.txt", "torchtitan.txt"):
        (tmp_path / name).write_text(log(name))
    runs = f"runs=[{tmp_path / 'megatron_lm.txt'},{tmp_path / 'torchtitan.txt'}]"
    assert main([runs, f"run_dir={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("model.global_batch_size is 64") < printed.index("10.4350")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runs=[]"], "runs=[]"),
        (["runs=[{place}]"], "there is only one variant"),
        (["runs=[{place},{place}]"], "is given twice"),
        (["runs=[{place},{place}/../a]"], "are the same"),
        (["runs=[{place}?]"], "does not exist"),
        (["runs={place}"], "runs=["),
        (["runs=[{place}]", "compare.max_loss_gap=0.5"], "compare.max_loss_gap=0.5%"),
        (["runs=[{place}]", "compare.max_loss_gap=little"], "compare.max_loss_gap=0.5%"),
        (["runs=[{place}]", "compare.min_speedup=-1"], "compare.min_speedup=-1"),
        (["runs=[{place}]", "compare.min_speedup=fast"], "compare.min_speedup=fast"),
        (["runs=[{place}]", "compare.max_los_gap=1%"], "compare.max_loss_gap?"),
        (["runs=[{place}, 'b']", "model.seed=1"], "model.seed"),
    ],
)
def test_a_mistake_is_named(tmp_path, capsys, arguments, told):
    place = write_run(tmp_path / "a", train_record(1))
    assert main([argument.format(place=place) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told.replace("{place}", place) in captured.err
    assert captured.err.count("error: ") == 1


@pytest.mark.parametrize("parent", ["", "2026-01-01"])
def test_a_folder_of_runs_is_its_runs_whatever_tensorboard_has_in_it(tmp_path, parent):
    outputs, out = tmp_path / "outputs", tmp_path / "out"
    texts = [config(f"{n}", seed=n, fp8=fp8) for n in (1, 2) for fp8 in ("false", "true")]
    places = [write_run(outputs / parent / f"{n}", train_record(1), config=text) for n, text in enumerate(texts)]
    for place in places:
        (Path(place) / "tensorboard").mkdir()
        (Path(place) / "tensorboard" / "events.out.tfevents.1").write_bytes(b"\x18\0\0\0\0\0\0\0xxxx\tbrain.Event:2")
    assert main([f"runs=[{outputs}]", f"run_dir={out}"]) == 0
    runs = saved_comparison(out).runs
    assert sorted(run.source for run in runs) == places
    assert [run.variant for run in runs] == ["bf16", "bf16", "fp8_delayed", "fp8_delayed"]


def test_a_path_with_a_comma_stands_in_quotes(tmp_path):
    places = [write_run(tmp_path / name, train_record(1), config=config("x", fp8=fp8)) for name, fp8 in FP8.items()]
    out = tmp_path / "out"
    assert main([f'runs=["{places[0]}", {places[1]}]', f"run_dir={out}"]) == 0
    assert [run.source for run in saved_comparison(out).runs] == places


FP8 = {"a,b": "false", "c": "true"}


def test_a_loss_that_diverged_is_in_the_document(tmp_path):
    records = [train_record(step, math.nan if step > 500 else power_law(1000 * step)) for step in STEPS]
    bad = write_run(tmp_path / "bad", *records, config=config("bad", fp8="true"))
    good = write_run(tmp_path / "good", *(train_record(step, power_law(1000 * step)) for step in STEPS))
    out = tmp_path / "out"
    assert main([f"runs=[{good},{bad}]", f"run_dir={out}"]) == 0
    assert saved_comparison(out).answers[0].judgement == "worse"
    assert json.loads((out / "compare.json").read_text())["runs"][1]["training"]["losses"][-1] == "nan"


def test_finished_runs_need_neither_torch_nor_a_configuration(tmp_path):
    runs = write_runs(tmp_path, seeds=(1,))
    ended, read = load(
        ("gpt_pretrain.compare", [runs, "--help"]), ("gpt_pretrain.compare", [runs, f"run_dir={tmp_path / 'out'}"])
    )
    assert ended == [[0, []], [0, ["numpy"]]]
    assert set(read) == {str(tmp_path / name / "config.yaml") for name in ("false_1", "true_1")}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a.log"], "a.log has no key"),
        (["run=[a,b]"], "did you mean runs?"),
        (["compare.runs=[a,b]"], "runs=[…]; leave it out"),
        (["++runs=[a,b]", "trainer.max_steps=3"], "trainer.max_steps is training's"),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_runs_by_another_name_are_told_with_the_way_out(arguments, told, capsys):
    assert main(arguments) == 2
    assert told in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(("arguments", "told"), [(["--help"], "compare.seeds=3"), (["--help", "runs=[a]"], "runs")])
def test_help_names_the_keys_of_the_way_that_is_asked_for(arguments, told, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert told in printed
    assert ("model.hidden_size" in printed) == (len(arguments) == 1)
