"""`python -m gpt_pretrain.benchmark`: which variants it runs, what it computes, and what it leaves."""

import contextlib
import json
import re
import shlex
import sys
import threading
from dataclasses import replace

import psutil
import pytest
import torch

from gpt_pretrain.benchmark.__main__ import main
from gpt_pretrain.benchmark.measure import Stopwatch
from gpt_pretrain.benchmark.report import Benchmark, benchmark_document, benchmark_markdown
from gpt_pretrain.benchmark.results import (
    GemmCeiling,
    Machine,
    Measured,
    Row,
    attainable_tflops,
    compute_figures,
    with_ratios,
)
from gpt_pretrain.benchmark.variants import Variant, read_variants, run_overrides
from gpt_pretrain.benchmark.worker import OUTPUT, run_task
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.schedule import RatePhases, rate_phases
from gpt_pretrain.config.source import Source
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.products import resolve
from tests.forked_runs import forked_python

SMALL = (
    "data=mock",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.encoder_seq_length=64",
    "model.micro_batch_size=2",
    "logging.tensorboard=false",
    "benchmark.warmup_steps=1",
    "benchmark.steps=4",
    "benchmark.interval=2",
)
H200 = (GemmCeiling(dtype="bfloat16", side=8192, tflops=774.0), GemmCeiling(dtype="fp8", side=8192, tflops=1414.0))
MEASURED = Measured(first_step_s=20.0, step_times_s=(0.5, 0.4), memory_gib=10.0, loss=2.5, dtype="bfloat16")
ROW = Row(name="app", loop="app", overrides=(), num_gpus=1, problem=None, figures=None)


def variants_of(compose_config, *entries, more=()):
    written = ",".join(f'"{entry}"' for entry in entries)
    return read_variants(compose_config(f"benchmark.variants=[{written}]", *more), "benchmark")


def test_variants_are_names_overrides_and_the_bare_loop_of_either(compose_config):
    own = "+benchmark.overrides.lean='fp8=delayed model.fp8_params=true'"
    entries = ("app", "fp8_delayed", "bare", "bare:lean", "model.micro_batch_size=2 fp8=none", "bare:model.seed=7")

    assert variants_of(compose_config, *entries, more=[own]) == [
        Variant(name="app", loop="app", overrides=()),
        Variant(name="fp8_delayed", loop="app", overrides=("fp8=delayed",)),
        Variant(name="bare", loop="bare", overrides=()),
        Variant(name="bare:lean", loop="bare", overrides=("fp8=delayed", "model.fp8_params=true")),
        Variant(name=entries[4], loop="app", overrides=("model.micro_batch_size=2", "fp8=none")),
        Variant(name=entries[5], loop="bare", overrides=("model.seed=7",)),
    ]


def test_every_named_variant_of_conf_composes(compose_config):
    named = compose_config().benchmark.overrides
    for variant in variants_of(compose_config, *named):
        compose_config(*variant.overrides)


def test_a_run_of_the_benchmark_only_trains_for_its_steps(compose_config, tmp_path):
    run_dir = tmp_path / "it's \\ here"
    saving = (
        "experiment=gpt2_124m_1gpu",
        "checkpoint.save_interval=5",
        "checkpoint.keep_last=30",
        "checkpoint.keep_every=10",
        "checkpoint.async_save=false",
        "checkpoint.on_save_error=continue",
        "trainer.max_spike_rewinds=2",
    )
    whole = compose_config(*saving, "benchmark.warmup_steps=3", "benchmark.steps=20")
    config = compose_config(*saving, *run_overrides(whole, run_dir, profiled=False))

    assert config.run_dir == str(run_dir)
    assert config.trainer.max_steps == 23
    assert config.trainer.limit_val_batches == config.sample.max_new_tokens == 0
    assert config.checkpoint.save_interval is None
    assert config.checkpoint.save_interval_minutes is None
    assert config_problems(config, None) == []
    assert not config.checkpoint.save_at_end
    assert compose_config(*run_overrides(whole, run_dir, profiled=True)).trainer.max_steps == 26


def test_a_benchmark_of_a_run_whose_batch_grows_times_its_largest(tmp_path):
    grows = ["model.micro_batch_size=1", "model.rampup_batch_size=[2,2,96]"]
    grows += ["trainer.max_steps=null", "trainer.max_tokens=1e6"]
    overrides = run_overrides(load_config([*grows, "benchmark.steps=10"]), tmp_path / "run", profiled=False)
    config = load_config([*grows, *overrides])
    assert config_problems(config, None) == []
    assert (config.model.rampup_batch_size, config.model.global_batch_size, config.trainer.max_steps) == (None, 8, 20)
    assert rate_phases(config) == RatePhases(in_tokens=True, warmup=100_000, decay=1_000_000, wsd_decay=None)


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay"),
    [
        ((), 50, 500),
        (("model.optim.sched.warmup_steps=100",), 100, 500),
        (("model.optim.sched.decay_steps=300",), 30, 300),
        (("model.optim.sched.name=wsd", "model.optim.sched.wsd_decay_steps=400"), 50, 500),
        (("model.optim.sched.name=constant",), 50, 500),
        (("model.optim.sched.name=constant", "model.optim.sched.warmup_steps=15"), 15, None),
    ],
)
def test_a_run_of_the_benchmark_has_the_learning_rates_of_the_run(tmp_path, schedule, warmup, decay):
    whole = load_config([*schedule, "benchmark.steps=10"])
    overrides = run_overrides(whole, tmp_path / "run", profiled=False)
    config = load_config([*schedule, *overrides])

    assert config_problems(config, None) == []
    assert config.trainer.max_steps == 20
    assert rate_phases(config).warmup == warmup
    assert config.model.optim.sched.decay_steps == decay


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["benchmark.variants=[app,fp8_delaid]"], ("'fp8_delaid'", "fp8_delayed")),
        (["benchmark.variants=[bear]"], ("'bear'", "did you mean bare?")),
        (["benchmark.variants=['bare:nothing']"], ("'bare:nothing'",)),
        (["benchmark.variants=['model.hiden_size=64']"], ("model.hiden_size", "did you mean model.hidden_size?")),
        (["benchmark.variants=[app,bare,app]"], ("'app' twice", "benchmark.rounds")),
        (["benchmark.variants=[]"], ("benchmark.variants=[]", "[app,bare]")),
        (["benchmark.overrides.app=[1]"], ("benchmark.overrides={'app': [1]",)),
        (["benchmark.steps=7", "benchmark.interval=2"], ("benchmark.steps=7", "benchmark.interval=2", "use 6")),
        (["benchmark.steps=0"], ("benchmark.steps=0", "use 1 or more")),
        (["benchmark.rounds=0"], ("benchmark.rounds=0", "use 1 or more")),
        (["trainer.num_nodes=2"], ("trainer.num_nodes=2", "use 1 or null")),
        (["trainer.max_steps=100"], ("trainer.max_steps", "benchmark.steps", "leave it out")),
        (["trainer={max_steps: 100}"], ("trainer.max_steps", "benchmark.steps", "leave it out")),
        (["benchmark.variants=['trainer.max_steps=9']"], ("trainer.max_steps", "benchmark.steps", "leave it out")),
        (["benchmark.variants=['benchmark.steps=9 run_dir=x']"], ("benchmark.steps", "run_dir", "benchmark.variants")),
        (["benchmark.variants=['trainer.devices=0']"], ("trainer.devices=0", "use 1 or more")),
        (["-m", "model.seed=1,2"], ("-m:", "benchmark.variants=[…]")),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_what_cannot_be_measured_is_refused_before_anything_runs(capsys, tmp_path, arguments, named):
    run_dir = tmp_path / "run"

    assert main([*arguments, f"run_dir={run_dir}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert [part for part in named if part not in told] == []
    assert ("is not a multiple" in told) == ("use 6" in named)
    assert not run_dir.exists()


def test_the_benchmark_is_not_started_by_torchrun(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    assert main([]) == 2
    assert re.search(r"torchrun .*trainer\.devices=2", capsys.readouterr().err)


def test_figures_are_medians_over_intervals_and_rounds(compose_config):
    config = compose_config("model=gpt2_124m", "model.global_batch_size=128")
    other = replace(MEASURED, step_times_s=(0.3, 0.8), memory_gib=12.0, first_step_s=30.0, loss=9.9)
    # Rank 1's clock does not count, and its memory does.
    rounds = [[MEASURED, replace(MEASURED, step_times_s=(9.0, 9.0), memory_gib=11.0)], [other, other]]

    figures = compute_figures(rounds, resolve(config), H200)

    assert figures.step_times_s == (0.5, 0.4, 0.3, 0.8)
    assert figures.step_time_s == 0.45
    assert figures.tokens_per_s_per_gpu == pytest.approx(128 * 1024 / 0.45 / 2)
    assert figures.tflops_per_gpu == pytest.approx(128 * 1024 / 0.45 / 2 * flops_per_token(config.model) / 1e12)
    assert figures.mfu == pytest.approx(figures.tflops_per_gpu / 774)
    assert (figures.memory_gib, figures.first_step_s, figures.loss) == (12.0, 25.0, 2.5)


@pytest.mark.parametrize(
    ("dtype", "share", "expected"),
    [
        ("bfloat16", 0.0, 774.0),
        ("bfloat16", 1.0, 1414.0),
        # Half of the operations take 1/774 each and half 1/1414.
        ("bfloat16", 0.5, 2 / (1 / 774 + 1 / 1414)),
        ("float32", 0.0, None),
        ("float32", 1.0, 1414.0),
    ],
)
def test_what_a_mix_of_types_could_reach(dtype, share, expected):
    attainable = attainable_tflops(H200, dtype, share)
    assert attainable == (None if expected is None else pytest.approx(expected))


def test_emulated_fp8_is_measured_against_products_of_the_runs_precision(compose_config):
    real, emulated = (resolve(compose_config("fp8=delayed", *more)) for more in ([], ["model.fp8_emulate=true"]))

    assert compute_figures([[MEASURED]], real, H200).fp8_flops_share > 0.5
    assert compute_figures([[MEASURED]], emulated, H200).fp8_flops_share == 0


def rows_of(compose_config):
    """Two variants of which the second is twice as fast, and one that ran out of memory."""
    run = resolve(compose_config())
    first = compute_figures([[MEASURED]], run, H200)
    fast = replace(MEASURED, step_times_s=(0.225,), memory_gib=5.0, loss=None)
    second = compute_figures([[fast]], run, H200)
    overrides = ("fp8=delayed", "run_dir='a b'")
    return with_ratios(
        [
            replace(ROW, figures=first),
            replace(ROW, name="bare:lean", loop="bare", overrides=overrides, num_gpus=2, figures=second),
            replace(ROW, name="big", problem="out of memory | 80 GiB\nused: 79"),
        ]
    )


def test_ratios_are_to_the_first_variant(compose_config):
    rows = rows_of(compose_config)

    assert [(row.speed_ratio, row.memory_ratio) for row in rows] == [(1, 1), (pytest.approx(2), 0.5), (None, None)]
    assert all(row.speed_ratio is None for row in with_ratios([rows[2], replace(rows[0], speed_ratio=None)]))


def benchmark_of(compose_config, rows):
    machine = Machine(
        device="NVIDIA H200", memory_gib=139.8, driver="580.1", versions=("Python 3.12.1", "torch 2.11.0"), gemms=H200
    )
    return Benchmark(
        config=compose_config("model=gpt2_124m"),
        arguments=("model=gpt2_124m", "benchmark.variants=[app,bare:lean]"),
        date="2026-11-21",
        machine=machine,
        rows=tuple(rows),
    )


def test_the_markdown_says_all_it_takes_to_measure_again(compose_config):
    text = benchmark_markdown(benchmark_of(compose_config, rows_of(compose_config)))

    assert text.startswith("# gpt: app, bare:lean, big, 2 × NVIDIA H200, 2026-11-21\n")
    lines = [re.sub(" +", " ", line) if line.startswith("|") else line for line in text.splitlines()]
    for line in (
        "| machine | 2 × NVIDIA H200 (139.8 GiB), driver 580.1 |",
        "| versions | Python 3.12.1, torch 2.11.0 |",
        "| ceiling | BF16 774, FP8 1414 TFLOP/s (8192³, median) |",
        "    python -m gpt_pretrain.benchmark model=gpt2_124m 'benchmark.variants=[app,bare:lean]'",
        "- big: out of memory \\| 80 GiB",
        "  used: 79",
        "- bare:lean: fp8=delayed 'run_dir='\"'\"'a b'\"'\"''",
    ):
        assert line in lines
    table = [line for line in text.splitlines() if line.startswith(("| app", "| variant", "| bare", "| big"))]
    assert len({line.count(" | ") for line in table[:4]}) == 1


def test_the_json_reads_back_as_the_figures(compose_config):
    rows = rows_of(compose_config)
    document = json.loads(json.dumps(benchmark_document(benchmark_of(compose_config, rows)), allow_nan=False))

    assert document["version"] == 3
    assert [Row.from_json(values) for values in document["variants"]] == rows
    assert document["config"]["benchmark"]["overrides"]["bf16"] == "fp8=none"


def test_the_clock_is_read_after_the_warm_up_and_each_interval(compose_config, monkeypatch):
    install_cpu_device()
    now, waited = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(now[0]))
    settings = ("benchmark.warmup_steps=2", "benchmark.steps=4", "benchmark.interval=2")
    watch = Stopwatch(
        compose_config(*settings).benchmark, platform=detect_platform(), launched_unix=90.0, profiler=None
    )

    # A slow first step, then one second each, three in the last interval, and steps that are not timed any more.
    for step, took in enumerate((10.0, 1.0, 1.0, 1.0, 3.0, 3.0, 50.0), start=1):
        now[0] += took
        loss = torch.tensor([4.0 * step, 2.0])
        watch.after_step(step, StepResult(loss_sum_and_tokens=loss, grad_norm=loss[:1], skipped=loss[0] < 0))

    assert watch.first_step_s == 20.0
    assert watch.step_times_s == [1.0, 3.0]
    # After the first step, the warm-up, and the two intervals; at no other step.
    assert waited == [110.0, 111.0, 113.0, 119.0]
    # Steps 5 and 6: (20 + 24) / (2 + 2).
    assert watch.loss == 11.0


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_measurement_that_is_killed_is_told_as_such(tmp_path, num_processes):
    task, done = tmp_path / "run" / "task.json", threading.Event()

    def kill_ranks() -> None:
        while not done.wait(0.05):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if str(task) in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                        child.kill()

    killer = threading.Thread(target=kill_ranks)
    killer.start()
    try:
        with pytest.raises(RunError) as failed:
            run_task("app", Measured, task.parent, source=Source(), overrides=SMALL, num_processes=num_processes)
    finally:
        done.set()
        killer.join()
    assert "SIGKILL" in str(failed.value)
    assert str(task.with_name(OUTPUT)) in str(failed.value)


@pytest.mark.usefixtures("no_launcher")
def test_variants_and_the_bare_loop_are_measured_end_to_end(parent, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    entries = "app,'bare:trainer.devices=2','model.micro_batch_size=3','model.masked_softmax_fusion=true'"
    variants = f"benchmark.variants=[{entries}]"
    arguments = [*SMALL, variants, "benchmark.profile=true", f"run_dir={run_dir}"]

    with forked_python(parent, tmp_path) as executable:
        monkeypatch.setattr(sys, "executable", str(executable))
        code = main(arguments)

    # What the rules or the machine refuse is told first, a row with its reason, and the exit code says so.
    printed = capsys.readouterr()
    assert code == 1, printed
    document = json.loads((run_dir / "benchmark.json").read_text())
    app, bare, refused, impossible = (Row.from_json(values) for values in document["variants"])
    assert "model.global_batch_size=8 is not divisible by model.micro_batch_size=3" in refused.problem
    assert "model.masked_softmax_fusion=true has no effect" in impossible.problem
    for row in (refused, impossible):
        start, _, rest = printed.out.partition("round 1")
        assert f"{row.name} is left out: {row.problem}" in start
        assert row.problem in rest
    assert [row.num_gpus for row in (app, bare, refused)] == [1, 2, 1]
    for row in (app, bare):
        figures = row.figures
        assert len(figures.step_times_s) == 2
        assert 0 < min(figures.step_times_s) <= figures.step_time_s <= max(figures.step_times_s) < figures.first_step_s
        assert figures.tokens_per_s_per_gpu == pytest.approx(8 * 64 / figures.step_time_s / row.num_gpus)
        assert figures.dtype == "float32"
        assert figures.mfu > 0
    # ln 2048, as random tokens have it.
    assert app.figures.loss == pytest.approx(7.6, abs=0.2)
    assert bare.figures.loss is None
    assert bare.speed_ratio == pytest.approx(bare.figures.tokens_per_s_per_gpu / app.figures.tokens_per_s_per_gpu)
    assert {ceiling["dtype"] for ceiling in document["machine"]["gemms"]} == {"float32", "bfloat16"}
    assert (run_dir / "1_app" / "round_1" / "trace.json.gz").stat().st_size > 1000
    assert (run_dir / "1_app" / "round_1" / "run" / "config.yaml").exists()
    assert "aten::" in (run_dir / "1_app" / "round_1" / "kernels.txt").read_text()
    markdown = run_dir / "benchmark.md"
    assert markdown.read_text() in printed.out
    assert "| app " in markdown.read_text()
    assert f"    python -m gpt_pretrain.benchmark {shlex.join(arguments)}\n" in markdown.read_text()
    # The run directory is taken now.
    assert main(arguments) == 2
    assert "holds a benchmark already" in capsys.readouterr().err
