"""Runs whose batch grows and whose rate follows tokens: what each step trains on, and resuming in the midst of it."""

import json
import shutil

import pytest
import torch

from gpt_pretrain.checkpoint.manifest import read_manifest
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.rounding import loss_tolerance
from tests.runs import run_small, small_run_arguments

# Steps of 2, 2, 4, 6, 8 and 8 samples of 32 tokens, 960 tokens in all; the rate falls over the last 512.
GROWING = (
    "model.encoder_seq_length=32",
    "model.micro_batch_size=1",
    "model.rampup_batch_size=[2,2,12]",
    "trainer.max_steps=null",
    "trainer.max_tokens=960",
    "trainer.limit_val_batches=1",
    "trainer.val_check_interval=null",
    "model.optim.sched.name=wsd",
    "model.optim.sched.warmup_tokens=128",
    "model.optim.sched.decay_tokens=960",
    "model.optim.sched.wsd_decay_tokens=512",
)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
BATCHES = [2, 2, 4, 6, 8, 8]
SAMPLES = [2, 4, 8, 14, 22, 30]


def curve(metrics):
    return [(each.step, each.consumed_samples, each.loss, each.grad_norm, each.lr) for each in metrics.train]


def told_and_logged(run_dir, cache_dir, overrides):
    """What one process says of its run, without line breaks, and its metrics."""
    done = fork_ranks(1, small_run_arguments(run_dir, cache_dir, overrides))
    assert done.returncode == 0, done.stderr[-4000:]
    return " ".join((done.stdout + done.stderr).split()), load_metrics(run_dir)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, cache_dir):
    return told_and_logged(tmp_path_factory.mktemp("uncut") / "run", cache_dir, GROWING)


@pytest.fixture(scope="module")
def cut(tmp_path_factory, cache_dir):
    """The directory of a run that was cut after three steps, and what it said."""
    run_dir = tmp_path_factory.mktemp("cut") / "run"
    told, _ = told_and_logged(run_dir, cache_dir, [*GROWING, "trainer.max_tokens=250"])
    return run_dir, told


def test_each_step_has_the_batch_and_the_rate_of_the_table(uncut):
    told, metrics = uncut
    assert "2 from step 1 (0 tokens), 4 from step 3 (128 tokens), 6 from step 4" in told
    assert "all steps: 6 steps, 960 tokens" in told
    assert "warmup to 128 tokens, constant to 448 tokens, linear decay to 960 tokens" in told
    assert [each.global_batch_size for each in metrics.train] == BATCHES
    assert [each.consumed_samples for each in metrics.train] == SAMPLES
    assert [each.consumed_tokens for each in metrics.train] == [32 * samples for samples in SAMPLES]
    # 64 of 128 tokens of warmup; step 5 ends with 256 of the decay's 512.
    assert [each.lr for each in metrics.train] == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 1.1e-3, 2e-4])
    for each in metrics.train:
        assert each.tokens_per_s * each.step_time_s == pytest.approx(32 * each.global_batch_size)
    assert metrics.train[-1].eta_s == 0
    assert (metrics.summary.step, metrics.summary.consumed_tokens) == (6, 960)
    # A validation has as many samples as the last batch, before the first step as after the last.
    assert [each.num_samples for each in metrics.validation] == [8, 8]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(1, [], id="one process"),
        pytest.param(2, ["parallelism=dp"], id="DP2 distributed optimizer"),
        pytest.param(2, ["parallelism=pp2"], id="PP2"),
    ],
)
def test_a_run_that_is_cut_while_its_batch_grows_equals_the_uncut_run(num_ranks, layout, tmp_path, cache_dir):
    growing = [*GROWING, *DROPOUT, *layout]
    uncut = run_small(num_ranks, tmp_path / "uncut", cache_dir, growing)
    run_small(num_ranks, tmp_path / "cut", cache_dir, [*growing, "trainer.max_tokens=250"])
    assert read_manifest(tmp_path / "cut" / "checkpoints" / "step_00000003").consumed_samples == 8
    resumed = run_small(num_ranks, tmp_path / "cut", cache_dir, growing)
    assert [start.step for start in resumed.starts] == [0, 3]
    assert curve(resumed) == curve(uncut)
    assert resumed.validation[-1].loss == uncut.validation[-1].loss


@pytest.mark.parametrize("override", ["parallelism=dp", "model.micro_batch_size=2", "parallelism=tp2_sp"])
def test_a_run_goes_on_in_another_layout_with_the_same_samples_and_rates(override, tmp_path, cache_dir, uncut, cut):
    run_dir = shutil.copytree(cut[0], tmp_path / "run")
    resumed = run_small(2 if "parallelism" in override else 1, run_dir, cache_dir, [*GROWING, override])
    model = load_saved_config(run_dir / "config.yaml").model
    for one, other in zip(resumed.train, uncut[1].train, strict=True):
        assert (one.consumed_samples, one.global_batch_size, one.lr) == (
            other.consumed_samples,
            other.global_batch_size,
            other.lr,
        )
        assert one.loss == pytest.approx(other.loss, rel=loss_tolerance(model, torch.float32, one.step))


def test_a_rate_that_followed_steps_can_follow_tokens_from_a_checkpoint_on(tmp_path, cache_dir):
    """The checkpoint's scheduler counted three steps; the configuration says that 256 tokens are behind the run."""
    in_steps = [*GROWING, *(f"model.optim.sched.{name}_tokens=null" for name in ("warmup", "decay", "wsd_decay"))]
    in_steps += ["model.optim.sched.name=cosine", "trainer.max_tokens=null", "trainer.max_steps=3"]
    run_small(1, tmp_path, cache_dir, in_steps)
    resumed = run_small(1, tmp_path, cache_dir, GROWING)
    assert [each.lr for each in resumed.train[3:]] == pytest.approx([2e-3, 1.1e-3, 2e-4])


def test_a_run_that_ends_before_its_batch_has_grown_says_so(cut):
    assert "the run ends with batches of 4 samples, before they reach model.global_batch_size=8" in cut[1]


def test_fp8_is_proven_in_steps_of_every_size(tmp_path, cache_dir):
    """The proof counts each layer's products in a step: one for each of 2, 4, 6 or 8 microbatches."""
    fp8 = ["fp8=delayed", "model.fp8_emulate=true", "logging.fp8_proof_interval=1"]
    metrics = run_small(1, tmp_path, cache_dir, [*GROWING, *fp8])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    proofs = [record for record in records if record["kind"] == "fp8_coverage"]
    assert [proof["step"] for proof in proofs] == [1, 2, 3, 4, 5, 6]
    assert [proof["warnings"] for proof in proofs] == [[]] * 6
    # They take turns among the microbatches that their step has.
    assert [proof["microbatch"] for proof in proofs] == [0 % 2, 1 % 2, 2 % 4, 3 % 6, 4 % 8, 5 % 8]
    assert metrics.summary.step == 6


def test_losses_of_routers_are_means_over_the_microbatches_that_there_were(tmp_path, cache_dir):
    experts = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"]
    metrics = run_small(1, tmp_path, cache_dir, [*GROWING, *experts])
    # 1 where experts are equally busy, for each microbatch; a sum over a step's would grow fourfold.
    assert [each.load_balancing_loss for each in metrics.experts] == pytest.approx([1.0] * 6, abs=0.2)


def test_a_growing_batch_that_ranks_cannot_share_is_refused_before_anything_starts(tmp_path, cache_dir):
    odd = [*GROWING, "parallelism=dp", "model.rampup_batch_size=[1,1,12]"]
    done = fork_ranks(2, small_run_arguments(tmp_path / "run", cache_dir, odd))
    assert done.returncode != 0
    assert "model.rampup_batch_size=[1,1,12]: its batch of 1 samples is not divisible by" in done.stderr
    assert not (tmp_path / "run").exists()
