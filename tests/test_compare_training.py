"""How a comparison trains its variants: which runs, in which order, stopped and resumed, and what is refused."""

import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from gpt_pretrain.compare.__main__ import main
from gpt_pretrain.compare.training import RUNS, compare_problems, plan_runs
from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.config.source import Source
from gpt_pretrain.report.metrics_file import MetricsFile, load_metrics, metrics_path
from gpt_pretrain.report.records import StartRecord
from gpt_pretrain.rules.jobs import load_config
from tests.forked_runs import forked_python
from tests.test_compare_comparison import saved_comparison
from tests.test_compare_logs import summary, train_record

DELAYED = "fp8=delayed model.fp8_emulate=true"
TENSORWISE = "fp8=tensorwise model.fp8_emulate=true"
STEPS = 20
SMALL = (
    "data=mock",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.encoder_seq_length=64",
    "model.micro_batch_size=4",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=0",
    f"trainer.max_steps={STEPS}",
    "logging.tensorboard=false",
)


def variants(*entries):
    return f"compare.variants=[{','.join(f'"{entry}"' for entry in entries)}]"


def planned(run_dir, *overrides):
    overrides = [*SMALL, *overrides]
    return plan_runs(load_config(overrides), Source(), overrides, run_dir)


def places(runs):
    return [run.run_dir.name for run in runs]


def test_runs_are_variants_times_seeds_and_all_variants_of_a_seed_come_first(tmp_path):
    runs = planned(tmp_path, variants("bf16", DELAYED), "compare.seeds=2", "model.seed=7")

    delayed = "fp8_delayed_model.fp8_emulate_true"
    assert places(runs) == ["bf16_seed_7", f"{delayed}_seed_7", "bf16_seed_8", f"{delayed}_seed_8"]
    assert {run.run_dir.parent for run in runs} == {tmp_path / RUNS}
    for run in runs:
        # What a run is checked with is what its own command line says.
        loaded = load_config(run.overrides)
        assert loaded == run.config
        assert loaded.model.seed == run.seed


def test_a_variant_may_choose_optimizer_and_recipe_of_an_experiment(tmp_path):
    overrides = [
        "experiment=gpt2_124m_1gpu",
        variants("optimizer=adam fp8=none", "optimizer=sgd fp8=delayed"),
        "compare.seeds=3",
    ]
    runs = plan_runs(load_config(overrides), Source(), overrides, tmp_path)
    assert [run.seed for run in runs] == [1234, 1234, 1235, 1235, 1236, 1236]
    chosen = [(run.config.model.optim.name.name, run.config.model.fp8) for run in runs[:2]]
    assert chosen == [("adam", False), ("sgd", True)]


# Overrides of all variants, those of each, and the variants that read them.
SHARED = {
    "emulation": ("model.fp8_emulate=true", ["bf16", "fp8=delayed", "fp8=tensorwise"], [1, 2]),
    "margin": ("model.fp8_margin=1", ["fp8=delayed model.fp8_emulate=true", "bf16"], [0]),
    "history": ("model.fp8_amax_history_len=16", ["bf16", DELAYED, TENSORWISE], [1]),
    "weights": ("model.fp8_params=true", ["bf16", "fp8=delayed"], [1]),
    "the proof's interval": ("logging.fp8_proof_interval=7", ["bf16", DELAYED], [1]),
    "an optimizer's own": ("model.optim.momentum=0.5", ["optimizer=adam", "optimizer=sgd"], [1]),
    "a schedule's own": (
        "model.optim.sched.wsd_decay_style=linear",
        ["bf16", "optimizer=adam_wsd model.optim.sched.wsd_decay_steps=4"],
        [1],
    ),
}


@pytest.mark.parametrize("kind", SHARED)
def test_a_key_of_all_variants_goes_to_those_that_read_it(kind, tmp_path):
    shared, entries, reading = SHARED[kind]
    runs = planned(tmp_path, variants(*entries), shared, "compare.seeds=2")[: len(entries)]
    assert [index for index, run in enumerate(runs) if shared in run.overrides] == reading
    for index, run in enumerate(runs):
        assert load_config(run.overrides) == run.config
        assert [shared in line for line in run.unread] == [True] * (index not in reading)


@pytest.mark.parametrize(
    "shared", ["model.fp8_margin=1", "logging.fp8_proof_interval=7", "model.optim.momentum=0.5", "model.rotary_base=5"]
)
def test_a_key_that_no_variant_reads_is_refused(shared, tmp_path):
    positions = "model.position_embedding_type=learned_absolute"
    with pytest.raises(ConfigError, match=shared):
        planned(tmp_path, variants("bf16", "model.optim.lr=1e-3"), shared, positions)


def test_a_key_of_its_own_that_a_variant_does_not_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.fp8_emulate"):
        planned(tmp_path, variants("fp8=none model.fp8_emulate=true", DELAYED))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["compare.seeds=0"], ("compare.seeds=0", "1")),
        (["compare.variants=[]"], ("compare.variants=[]",)),
        (["compare.variants=[bf16]"], ("compare.variants",)),
        (["compare.variants=[bf16,bare]"], ("compare.variants", "'bare'")),
        (["compare.variants=[bf16,fp8_delaid]"], ("'fp8_delaid'", "fp8_delayed")),
        (["compare.variants=[bf16,bf16]"], ("'bf16' twice", "compare.seeds")),
        (["compare.max_loss_gap=0.5"], ("compare.max_loss_gap=0.5%",)),
    ],
)
def test_what_is_wrong_with_the_keys_of_compare_is_named(compose_config, overrides, named):
    (problem,) = compare_problems(compose_config(*overrides))
    assert all(part in problem for part in named)


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("model.seed=3", ("model.seed", "compare.variants")),
        ("run_dir=/tmp", ("run_dir",)),
        ("compare.seeds=3", ("compare.seeds",)),
        ("model.hiden_size=3", ("model.hiden_size", "model.hidden_size")),
        ("trainer.num_nodes=2", ("trainer.num_nodes=2", "1")),
    ],
)
def test_a_variant_with_keys_that_all_share_is_refused_before_anything_runs(tmp_path, variant, named):
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, variants("bf16", variant))
    assert all(part in str(refused.value) for part in [*named, f"[{variant}]"])


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        ("model.global_batch_size=4", "model.global_batch_size=4"),
        ("model.num_layers=2", "model.num_layers=2"),
        ("model.encoder_seq_length=32", "model.encoder_seq_length=32"),
        ("model.vocab_size=1024", "model.vocab_size=1024"),
    ],
)
def test_a_variant_whose_losses_would_mean_something_else_is_refused_before_anything_runs(tmp_path, variant, named):
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, variants("bf16", variant))
    (problem,) = refused.value.problems
    assert problem.startswith(f"{named} ")
    assert problem.endswith(f"[{variant}]")
    assert not (tmp_path / RUNS).exists()


def test_a_baseline_that_breaks_a_rule_is_refused_before_the_machine_is_looked_up(tmp_path):
    broken = "model.micro_batch_size=3"
    with pytest.raises(ConfigError, match=r"global_batch_size=8 .*\[model\.micro_batch_size=3\]"):
        planned(tmp_path, variants(broken, "bf16"))


def interrupt_at(path, step):
    """Presses Ctrl-C once a run has logged a step."""

    def press():
        while not (metrics_path(path).exists() and len(load_metrics(path).train) >= step):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@pytest.mark.usefixtures("no_launcher")
def test_a_comparison_that_is_stopped_goes_on_without_running_again_what_is_finished(
    tmp_path, monkeypatch, parent, capsys
):
    run_dir = tmp_path / "comparison"
    three = [variants("app", DELAYED, TENSORWISE), "compare.seeds=2", "logging.fp8_statistics_interval=10"]
    refused = variants("app", DELAYED, TENSORWISE, "model.micro_batch_size=3")
    with forked_python(parent, tmp_path) as executable:
        monkeypatch.setattr(sys, "executable", str(executable))
        stopped = planned(run_dir, *three)[1].run_dir
        interrupt_at(stopped, 3)
        assert main([*SMALL, *three, f"run_dir={run_dir}"]) == 130
        assert f"run_dir={run_dir} to continue" in capsys.readouterr().out
        first, second, *rest = places(planned(run_dir, *three))
        assert load_metrics(run_dir / RUNS / first).summary.end_reason == "max_steps"
        at = load_metrics(run_dir / RUNS / second).summary
        assert at.end_reason == "terminated"
        assert 3 <= at.step < STEPS
        assert not any((run_dir / RUNS / name).exists() for name in rest)
        before = metrics_path(run_dir / RUNS / first).read_bytes()

        # And with a variant more, which the rules refuse: a failure, and the others are compared.
        assert main([*SMALL, refused, *three[1:], f"run_dir={run_dir}"]) == 1
    printed = capsys.readouterr().out
    assert "model.global_batch_size=8 is not divisible by model.micro_batch_size=3" in printed
    assert printed.count("was finished before") == 1
    comparison = saved_comparison(run_dir)
    assert (run_dir / "compare.html").exists()
    assert [(run.variant, run.seed) for run in comparison.runs] == [
        (name, seed) for name in ("app", DELAYED, TENSORWISE) for seed in (1234, 1235)
    ]
    assert [figures.fp8_share is None or figures.fp8_share > 0 for figures in comparison.figures] == [True] * 3
    assert {answer.noise_from for answer in comparison.answers} == {"paired seeds"}
    assert comparison.obstacles == ()
    assert {"model.fp8_recipe"} <= {each.key for each in comparison.differences}
    # Neither started again nor touched.
    assert metrics_path(run_dir / RUNS / first).read_bytes() == before
    resumed = load_metrics(run_dir / RUNS / second)
    assert [start.step for start in resumed.starts] == [0, at.step]
    curves = {}
    for run in comparison.runs:
        metrics = load_metrics(run.source)
        assert [record.step for record in metrics.train] == list(range(1, STEPS + 1))
        assert load_saved_config(Path(run.source) / "config.yaml").model.seed == run.seed
        curves[run.variant, run.seed] = [record.loss for record in metrics.train]
    # The first batch under the same weights: FP8 rounds it, another seed is another model and other data.
    for seed in (1234, 1235):
        starts = [curves[name, seed][0] for name in ("app", DELAYED, TENSORWISE)]
        assert starts == pytest.approx([starts[0]] * 3, rel=1e-3)
        assert len(set(starts)) == 3
    assert abs(curves["app", 1234][0] - curves["app", 1235][0]) > 1e-3


def test_a_directory_with_a_run_of_other_values_is_refused(tmp_path, parent):
    (run, _) = planned(tmp_path, variants("app", DELAYED), "compare.seeds=2", "trainer.max_steps=2")[:2]
    of_training = [override for override in run.overrides if not override.startswith("compare.")]
    codes, printed = parent.run(of_training, tmp_path / "out")
    assert codes == [0], printed
    assert run.is_finished

    with pytest.raises(UserError) as refused:
        planned(tmp_path, variants("app", DELAYED), "trainer.max_steps=3", "model.optim.lr=0.5")
    told = str(refused.value)
    assert all(part in told for part in (str(run.run_dir), "trainer.max_steps=2 there, 3 here", "model.optim.lr="))
    # What counts neither for losses nor for times may change.
    same = ["trainer.max_steps=2", "trainer.max_time=00:01:00:00", "checkpoint.save_interval=5"]
    assert planned(tmp_path, variants("app", DELAYED), *same)[0].is_finished


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("refused_first", [True, False])
def test_variants_that_the_machine_refuses_are_named_before_anything_is_trained(
    tmp_path, monkeypatch, parent, capsys, refused_first
):
    entries = ["app", "model.masked_softmax_fusion=true"]
    with forked_python(parent, tmp_path) as executable:
        monkeypatch.setattr(sys, "executable", str(executable))
        chosen = variants(*(reversed(entries) if refused_first else entries))
        assert main([*SMALL, chosen, "compare.seeds=1", f"run_dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "model.masked_softmax_fusion=true has no effect" in told
    assert f"[{entries[1]}]" in told
    assert not (tmp_path / "run" / RUNS).exists()


@pytest.mark.usefixtures("no_launcher")
def test_a_variant_that_the_machine_refuses_is_left_out_and_the_others_are_compared(
    tmp_path, monkeypatch, parent, capsys
):
    chosen = variants("app", "model.masked_softmax_fusion=true", "model.optim.lr=0.002")
    with forked_python(parent, tmp_path) as executable:
        monkeypatch.setattr(sys, "executable", str(executable))
        arguments = [*SMALL, chosen, "compare.seeds=2", "trainer.max_steps=2"]
        assert main([*arguments, f"run_dir={tmp_path / 'run'}"]) == 1
    printed = capsys.readouterr().out
    assert printed.index("model.masked_softmax_fusion=true is left out: ") < printed.index("run 1 of 4")
    names = [run.variant for run in saved_comparison(tmp_path / "run").runs]
    assert sorted(set(names)) == ["app", "model.optim.lr=0.002"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-m", "model.seed=1,2"], ("-m:", "compare.variants=[…]")),
        (["hydra/launcher=slurm"], ("hydra/launcher=slurm", "-m", "runs=[…]")),
        (["compare.seeds=0"], ("compare.seeds=0", "use 1 or more")),
        (["compare.variants=[bf16,'model.hiden_size=3']"], ("model.hiden_size", "did you mean model.hidden_size?")),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_what_cannot_be_compared_is_refused_by_the_command(tmp_path, capsys, arguments, named):
    assert main([*arguments, f"run_dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in named)


@pytest.mark.usefixtures("no_launcher")
def test_a_run_directory_is_no_place_for_a_comparison(tmp_path, capsys):
    metrics_path(tmp_path).write_text("")
    assert main([*SMALL, variants("app", DELAYED), f"run_dir={tmp_path}"]) == 2
    assert f"run_dir={tmp_path} holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], False),
        ([train_record(STEPS - 1)], False),
        # Killed while it wrote its summary: it has no step left to do.
        ([train_record(STEPS - 1), train_record(STEPS)], True),
        ([train_record(STEPS), StartRecord(step=STEPS - 1, time_unix=0.0)], False),
        ([train_record(STEPS), summary()], True),
        ([train_record(STEPS), summary("loss_spike")], False),
    ],
)
def test_a_run_is_finished_when_its_steps_are_done(tmp_path, records, expected):
    run = planned(tmp_path, variants("app", DELAYED))[0]
    with closing(MetricsFile(run.run_dir)) as metrics:
        for record in records:
            metrics.write(record)
    assert run.is_finished == expected
