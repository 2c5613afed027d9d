"""One seed is one run: every parallel layout trains the same model on the same samples as one process."""

import json
from pathlib import Path

import pytest
import torch

from tests.emulated_training import RECOMPUTED
from tests.forked_runs import fork_ranks
from tests.refusals import compose_quickly
from tests.rounding import gradient_tolerance, loss_tolerance
from tests.runs import SMALL_RUN, run_small, small_run_arguments

STEPS = 6
SAMPLE = (
    f"trainer.max_steps={STEPS}",
    f"trainer.val_check_interval={STEPS // 2}",
    # Two microbatches in a step, for stages to take turns with; data parallel ranks have several of their own below.
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "sample.max_new_tokens=12",
    "sample.prompt='def '",
    "checkpoint.save_at_end=false",
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, SAMPLE)


def test_one_process_learns(one_process):
    losses = [record.loss for record in one_process.train]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.25
    assert [record.step for record in one_process.validation] == [0, STEPS // 2, STEPS]
    assert one_process.validation[-1].loss < one_process.validation[0].loss - 0.25


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, "tp2", id="TP2"),
        pytest.param(2, "tp2_sp", id="TP2+SP"),
        pytest.param(2, "pp2", id="PP2"),
        pytest.param(2, "pp2_vp2", id="PP2 interleaved"),
        pytest.param(2, "single", id="DP2"),
        pytest.param(2, "dp", id="DP2 distributed optimizer"),
        pytest.param(4, "tp2_pp2", id="TP2·PP2"),
    ],
)
def test_layout_trains_as_one_process(num_ranks, layout, tmp_path, cache_dir, one_process):
    metrics = run_small(num_ranks, tmp_path / "run", cache_dir, [*SAMPLE, f"parallelism={layout}"])
    model = compose_quickly([*SMALL_RUN, *SAMPLE]).model
    for record, expected in zip(metrics.train, one_process.train, strict=True):
        assert (record.lr, record.consumed_samples) == (expected.lr, expected.consumed_samples)
        assert record.loss == pytest.approx(expected.loss, rel=loss_tolerance(model, torch.float32, record.step))
        norm_tolerance = gradient_tolerance(model, torch.float32, record.step)
        assert record.grad_norm == pytest.approx(expected.grad_norm, rel=norm_tolerance)
    for record, expected in zip(metrics.validation, one_process.validation, strict=True):
        assert record.loss == pytest.approx(expected.loss, rel=loss_tolerance(model, torch.float32, record.step + 1))
    assert metrics.summary.sample_text == one_process.summary.sample_text


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        # Across pipeline stages two copies of the embedding add up their gradients.
        pytest.param(
            ["model=gpt2_124m", "model.num_layers=4", "model.num_attention_heads=4"], ("pp2", "dp"), id="GPT-2, tied"
        ),
        # Masks leave ranks unequal tokens.
        pytest.param(["model.data.eod_mask_loss=true"], ("pp2", "dp"), id="masked loss"),
        # Each rank normalises the queries and keys of its own heads with weights that all share.
        pytest.param(["model.qk_layernorm=true"], ("tp2", "tp2_sp"), id="norms of queries and keys"),
        # A stage counts its layers among all.
        pytest.param(["model.no_rope_freq=4"], ("pp2",), id="layers without rope"),
        # A rank has the columns of its heads.
        pytest.param(
            ["model.value_embedding_freq=2", "model.value_embedding_mult=4"],
            ("tp2", "tp2_sp", "dp"),
            id="value embeddings",
        ),
        pytest.param(
            ["model.window_size=[7,0]", "model.window_attn_skip_freq=[0,1,1,0]"], ("pp2", "tp2_sp"), id="windows"
        ),
    ],
)
def test_what_ranks_share_trains_as_in_one_process(overrides, layouts, tmp_path, cache_dir):
    several = "model.micro_batch_size=2"
    short = ["trainer.max_steps=3", "trainer.limit_val_batches=0", "checkpoint.save_at_end=false", several, *overrides]
    one = run_small(1, tmp_path / "one", cache_dir, short)
    for layout in layouts:
        metrics = run_small(2, tmp_path / layout, cache_dir, [*short, f"parallelism={layout}"])
        model = compose_quickly([*SMALL_RUN, *overrides]).model
        for record, expected in zip(metrics.train, one.train, strict=True):
            near = pytest.approx(expected.loss, rel=loss_tolerance(model, torch.float32, record.step))
            assert record.loss == near, layout
            norm = pytest.approx(expected.grad_norm, rel=gradient_tolerance(model, torch.float32, record.step))
            assert record.grad_norm == norm, layout


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model.activations_checkpoint_granularity=selective"], id="selective"),
        pytest.param(RECOMPUTED, id="full"),
    ],
)
def test_recomputed_activations_change_no_loss(overrides, tmp_path, cache_dir, one_process):
    metrics = run_small(1, tmp_path / "run", cache_dir, [*SAMPLE, *overrides])
    assert [record.loss for record in metrics.train] == [record.loss for record in one_process.train]


def test_bf16_trains_close_to_fp32(tmp_path, cache_dir, one_process):
    overrides = [*SAMPLE, "trainer.precision=bf16"]
    metrics = run_small(1, tmp_path / "run", cache_dir, overrides)
    expected = [record.loss for record in one_process.train]
    losses = [record.loss for record in metrics.train]
    model = compose_quickly([*SMALL_RUN, *SAMPLE]).model
    for step, (loss, in_fp32) in enumerate(zip(losses, expected, strict=True), start=1):
        assert loss == pytest.approx(in_fp32, rel=loss_tolerance(model, torch.bfloat16, step)), step
    assert losses != pytest.approx(expected, rel=1e-6), "bf16 gave fp32's losses: the precision did not arrive"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("model.tensor_model_parallel_size=2", "model.tensor_model_parallel_size=1 on rank 0 and 2 on"),
        ("trainer.val_check_interval=null", "trainer.val_check_interval=10 on rank 0 and null on"),
        ("run_dir=elsewhere", '/run" on rank 0 and "elsewhere" on'),
    ],
)
def test_ranks_that_were_told_different_things_end_at_once(extra, expected, tmp_path, cache_dir):
    arguments = small_run_arguments(tmp_path / "run", cache_dir, ["parallelism=dp"])
    done = fork_ranks(2, ["tests/programs/disagreeing_ranks.py", extra, *arguments[2:]])
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the ranks do not run the same configuration" in line
    assert f"{expected} rank 1. Give" in line
    assert not Path("elsewhere").exists()


def test_ranks_of_a_context_parallel_group_share_out_the_whole_sequence(tmp_path):
    """Also where there are other ranks; with a part of the sequence in no rank a run trains on, faster and worse."""
    # TP, PP, CP; what four ranks leave is DP.
    layouts = ["1,1,4", "1,1,2", "2,1,2", "1,2,2", "1,1,1"]
    done = fork_ranks(4, ["tests/programs/context_parallel_slices.py", str(tmp_path), *layouts])
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for layout in layouts:
            group = found[layout]["group"]
            assert found[layout]["rank"] in group
            assert sorted(position for positions in group for position in positions) == list(range(16)), layout
    # The first and the last eighth, so that each rank has as much to attend to.
    assert found["1,1,4"]["group"][0] == [0, 1, 14, 15]
