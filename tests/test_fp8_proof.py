"""The proof of what ran in FP8, on emulated layers: it passes at every layout, and finds each fault."""

import json
import re

import pytest
import torch

from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.proofs import Proofs
from gpt_pretrain.training.watchdog import Watchdog
from tests.emulated_training import emulate, emulated_training
from tests.forked_runs import fork_ranks
from tests.runs import run_small, small_run_arguments

QKV = "decoder.layers.0.self_attention.linear_qkv"
# One step is what is proven.
ONE_STEP = (
    "model.fp8_emulate=true",
    "trainer.max_steps=1",
    "trainer.limit_val_batches=0",
    "checkpoint.save_at_end=false",
    "model.num_layers=2",
)


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "share"),
    [
        # Weights of a layer: 64·(64 + 2·32) + 64·64 + 3·64·128 = 36,864 (4 heads of 16, 2 groups, gated MLP of 128); of
        # the LM head: 64·384 = 24,576. Causal attention: 2 products · 2 · 64 · 64/2 operations a token and layer, as
        # 4,096 weights. 2·36,864 / (2·36,864 + 2·4,096 + 24,576) = 0.6923.
        pytest.param(1, ["fp8=tensorwise"], 0.6923, id="one process"),
        pytest.param(2, ["fp8=delayed", "parallelism=tp2_sp"], 0.6923, id="TP2+SP"),
        pytest.param(2, ["fp8=blockwise", "parallelism=pp2"], 0.6923, id="PP2"),
        pytest.param(1, ["fp8=torchao_tensorwise"], 0.6923, id="TorchAO"),
        pytest.param(2, ["fp8=torchao_rowwise", "parallelism=tp2_sp"], 0.6923, id="TorchAO, TP2+SP"),
        # Without weight gradients.
        pytest.param(1, ["fp8=torchao_rowwise_with_gw_hp"], 0.6923 * 2 / 3, id="TorchAO, without weight gradients"),
        # Half of the layers, and the MLP's second matrix of the other: 36,864 + 8,192 weights fewer.
        pytest.param(
            2,
            ["fp8=delayed", "parallelism=pp2", "model.fp8_exclude=['decoder.layers.1.*','*.0.mlp.linear_fc2']"],
            0.6923 * (36_864 - 8_192) / 73_728,
            id="PP2 with exclusions",
        ),
        pytest.param(
            2,
            ["fp8=mxfp8", "parallelism=dp", "model.first_last_layers_bf16=true", "model.num_layers_at_end_in_bf16=0"],
            0.6923 / 2,
            id="DP2, first layer kept out",
        ),
    ],
)
def test_what_was_planned_is_proven(tmp_path, cache_dir, num_ranks, overrides, share):
    metrics = run_small(num_ranks, tmp_path / "run", cache_dir, [*ONE_STEP, *overrides])
    assert metrics.fp8_coverage.gemm_flops_share == pytest.approx(share, rel=1e-3)
    assert metrics.fp8_coverage.parameter_bytes_share == 0.0
    assert metrics.fp8_coverage.time_s < 1.0
    assert metrics.fp8_coverage.first_scale_passes == (2 if "fp8=delayed" in overrides else 0)


@pytest.mark.parametrize(
    ("num_ranks", "sabotage", "row"),
    [
        (1, "replace_emulated_layers", ["forward", "e4m3 × e4m3", "no such product", f"{QKV} and 7 more"]),
        (1, "swap_emulated_recipe", ["input: rows of the amax history", "1024", "0", f"{QKV} and 7 more"]),
        (2, "change_margin_of_rank_1", ["input: next scale", QKV]),
    ],
)
def test_a_sabotaged_run_ends_with_a_table_of_what_differs(tmp_path, cache_dir, num_ranks, sabotage, row):
    overrides = [*ONE_STEP, "fp8=delayed", *(["parallelism=dp"] if num_ranks > 1 else [])]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)
    done = fork_ranks(num_ranks, ["tests/programs/sabotaged_run.py", sabotage, *arguments[2:]])
    assert done.returncode == (2 if num_ranks == 1 else 1), done.stderr[-3000:]
    assert done.stderr.count("error: FP8 does not run as planned in step 1:") == 1, "one rank tells it"
    rows = [re.split("  +", line.strip()) for line in done.stderr.splitlines()]
    assert [cells for cells in rows if [*cells[: len(row) - 1], cells[-1]] == row]
    metrics = load_metrics(tmp_path / "run")
    assert (metrics.fp8_coverage, metrics.train) == (None, [])


def test_later_steps_and_those_of_a_resumed_run_are_proven(tmp_path, cache_dir):
    run = [*ONE_STEP[:1], *ONE_STEP[2:3], "model.num_layers=2", "fp8=tensorwise", "logging.fp8_proof_interval=2"]
    run_small(1, tmp_path / "run", cache_dir, [*run, "trainer.max_steps=3"])
    run_small(1, tmp_path / "run", cache_dir, [*run, "trainer.max_steps=6"])
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "fp8_coverage"] == [1, 2, 4, 6]


@pytest.mark.parametrize(("interval", "steps"), [("3", [1, 2]), ("null", [1, 2, 3, 4])])
def test_a_fault_of_later_steps_ends_the_run_at_the_next_proof(tmp_path, cache_dir, interval, steps):
    overrides = [*ONE_STEP, "trainer.max_steps=4", "fp8=tensorwise", f"logging.fp8_proof_interval={interval}"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)
    done = fork_ranks(1, ["tests/programs/sabotaged_run.py", "leave_fp8_after_the_first_step", *arguments[2:]])
    assert done.returncode == (0 if interval == "null" else 2), done.stderr[-3000:]
    assert ("no such product" in done.stderr) == (interval != "null")
    assert [record.step for record in load_metrics(tmp_path / "run").train] == steps


@pytest.mark.parametrize("sabotage", ["leave_fp8_after_the_first_step", "shift_a_layer_from_the_second_step"])
def test_a_fault_from_the_second_step_on_ends_a_run_at_its_tenth_after_a_checkpoint(tmp_path, cache_dir, sabotage):
    saved = ("trainer.max_steps=12", "checkpoint.save_at_end=true", "checkpoint.async_save=false")
    overrides = [*ONE_STEP, *saved, "fp8=tensorwise"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)
    done = fork_ranks(1, ["tests/programs/sabotaged_run.py", sabotage, *arguments[2:]])
    assert done.returncode == 2, done.stderr[-3000:]
    for told in ("in step 10", "Step 10 is saved", "logging.fp8_proof=warn"):
        assert told in done.stderr
    goes_on = fork_ranks(1, ["tests/programs/sabotaged_run.py", sabotage, *arguments[2:], "logging.fp8_proof=warn"])
    assert goes_on.returncode == 0, goes_on.stderr[-3000:]
    assert load_metrics(tmp_path / "run").starts[-1].step == 10


@pytest.mark.parametrize(
    ("sabotage", "layers"),
    [
        ("lose_scales_of_a_layer", {"decoder.layers.1.mlp.linear_fc1"}),
        ("swap_scales_of_two_layers", {"decoder.layers.0.mlp.linear_fc1 and 1 more"}),
    ],
)
def test_scales_that_a_resume_lost_or_swapped_end_the_run_at_its_first_step(tmp_path, cache_dir, sabotage, layers):
    run = [*ONE_STEP[:1], *ONE_STEP[2:3], "model.num_layers=2", "fp8=delayed", "checkpoint.async_save=false"]
    run_small(1, tmp_path / "run", cache_dir, [*run, "trainer.max_steps=3"])
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*run, "trainer.max_steps=6"])
    done = fork_ranks(1, ["tests/programs/sabotaged_run.py", sabotage, *arguments[2:]])
    assert done.returncode == 2, done.stderr[-3000:]
    assert "in step 4" in done.stderr
    rows = [re.split("  +", line.strip()) for line in done.stderr.splitlines()]
    found = {row[-1] for row in rows if row[0] == "scales and amax histories"}
    assert found == layers
    # What was saved before stands, and a healthy process goes on with it.
    run_small(1, tmp_path / "run", cache_dir, [*run, "trainer.max_steps=6"])


def test_a_failed_proof_is_a_warning_on_demand(tmp_path, cache_dir):
    overrides = [*ONE_STEP, "trainer.max_steps=2", "fp8=delayed", "logging.fp8_proof=warn"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)
    done = fork_ranks(1, ["tests/programs/sabotaged_run.py", "replace_emulated_layers", *arguments[2:]])
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = load_metrics(tmp_path / "run")
    (proof,) = metrics.fp8_proofs
    assert (proof.gemm_flops_share, proof.step) == (0.0, 1)
    assert any(QKV in warning and "no such product" in warning for warning in proof.warnings)
    assert all(warning in done.stdout for warning in proof.warnings)
    assert (metrics.summary.fp8_proofs, metrics.summary.fp8_proofs_with_warnings) == (1, 1)


def test_a_run_without_proofs_says_that_its_fp8_is_unproven(tmp_path, cache_dir):
    overrides = [*ONE_STEP, "trainer.max_steps=2", "fp8=delayed", "logging.fp8_proof=never"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)
    done = fork_ranks(1, ["tests/programs/sabotaged_run.py", "replace_emulated_layers", *arguments[2:]])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UNPROVEN (logging.fp8_proof=never)" in done.stdout
    assert "FP8 proofs: none" in done.stdout
    metrics = load_metrics(tmp_path / "run")
    assert (metrics.fp8_proofs, metrics.summary.fp8_proofs) == ([], 0)


def test_a_step_that_updates_nothing_leaves_the_proof_to_the_next(tmp_path):
    """Its delayed scales and histories have been put back, and infinities have no scale."""
    with emulated_training(*emulate("delayed")) as training:
        training.step()
        weight = training.layers()["decoder.layers.1.mlp.linear_fc1"].weight
        records = []
        proofs = Proofs(
            training.trainable,
            number=0,
            saved=None,
            log=records.append,
            watchdog=Watchdog(None, learning_steps=1, launch=read_launch({}), run_dir=tmp_path),
            meter=Meter(training.trainable.model.spec),
        )

        def step(number):
            with proofs.watching(number, training.config.model.global_batch_size):
                result = training.result()
            proofs.judge(number, result)
            return result

        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] = torch.inf
        assert step(1).skipped
        assert records == []
        with torch.no_grad():
            weight.copy_(kept)
        step(2)
        step(3)
    assert [record.step for record in records] == [2]


def test_scales_of_another_recipe_are_not_taken_for_ours(tmp_path, cache_dir):
    saved = [*ONE_STEP[:1], *ONE_STEP[2:3], "model.num_layers=1", "fp8=delayed"]
    run_small(1, tmp_path / "run", cache_dir, [*saved, "trainer.max_steps=1"])
    resumed = small_run_arguments(
        tmp_path / "run", cache_dir, [*saved, "trainer.max_steps=2", "model.fp8_amax_history_len=16"]
    )
    done = fork_ranks(1, resumed)
    assert done.returncode == 2
    assert "holds the FP8 scales of another recipe: model.fp8_amax_history_len=16 (saved with 1024)" in done.stderr
    assert "checkpoint.reset_fp8_state=true" in done.stderr
    done = fork_ranks(1, [*resumed, "checkpoint.reset_fp8_state=true"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert [record.step for record in load_metrics(tmp_path / "run").train] == [1, 2]
