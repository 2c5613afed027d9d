"""Whole runs on one GPU through the command line: they learn, resume, and agree with each other."""

import math

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.launching import gpu_environment, run_ranks
from tests.runs import SMALL_GPU_RUN, run_small, small_run_arguments

pytestmark = pytest.mark.gpu

SAVED = ("checkpoint.save_at_end=true",)
# Dropout, so that random states matter; kernels that do not vary, so that equal means equal.
DETERMINISTIC = (
    *SMALL_GPU_RUN,
    *SAVED,
    "trainer.deterministic=true",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "model.optim.sched.decay_steps=10",
)


@pytest.fixture(scope="module")
def te_run(tmp_path_factory, cache_dir):
    """What a run with every choice left to the machine printed and logged."""
    run_dir = tmp_path_factory.mktemp("te") / "run"
    done = run_ranks(1, small_run_arguments(run_dir, cache_dir, SMALL_GPU_RUN), env=gpu_environment(1))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, load_metrics(run_dir)


@pytest.fixture(scope="module")
def deterministic_run(tmp_path_factory, cache_dir):
    run_dir = tmp_path_factory.mktemp("deterministic") / "run"
    return run_small(1, run_dir, cache_dir, [*DETERMINISTIC, "trainer.max_steps=10"], on_gpus=True)


def losses(metrics):
    return [record.loss for record in metrics.train]


def curve(metrics):
    return [(record.step, record.loss, record.grad_norm, record.lr) for record in metrics.train]


def test_run_learns_on_te_layers_in_bf16(te_run):
    printed, metrics = te_run
    assert "layers: Transformer Engine" in printed
    assert "parameters: bfloat16" in printed
    assert len(metrics.train) == 20
    # 384 rows of vocabulary, and as yet no preference among them.
    assert losses(metrics)[0] == pytest.approx(math.log(384), abs=0.5)
    assert losses(metrics)[-1] < losses(metrics)[0] - 1.0


def test_run_knows_its_memory_and_its_share_of_the_peak(te_run):
    for record in te_run[1].train:
        assert 0.0 < record.mfu < 1.0
        # Of the GPU's tensors: a model of a few million parameters takes far less than the process around it.
        assert 0.01 < record.memory_gib < 4.0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_local_layers_train_as_te_layers(precision, te_run, tmp_path, cache_dir):
    local = ["model.transformer_engine=false", f"trainer.precision={precision}", "trainer.max_steps=10"]
    overrides = [*SMALL_GPU_RUN, *local, "model.optim.sched.decay_steps=20"]
    metrics = run_small(1, tmp_path / "run", cache_dir, overrides, on_gpus=True)
    expected = losses(te_run[1])[:10]
    assert losses(metrics) == pytest.approx(expected, rel=5e-3)
    assert losses(metrics) != pytest.approx(expected, rel=1e-7), "the same losses: the same layers"


def test_resumed_run_follows_the_uncut_run(te_run, tmp_path, cache_dir):
    overrides = [*SMALL_GPU_RUN, *SAVED, "model.optim.sched.decay_steps=20"]
    run_small(1, tmp_path / "run", cache_dir, [*overrides, "trainer.max_steps=8"], on_gpus=True)
    resumed = run_small(1, tmp_path / "run", cache_dir, [*overrides, "trainer.max_steps=20"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, 8]
    assert losses(resumed) == pytest.approx(losses(te_run[1]), rel=1e-3)


def test_resumed_deterministic_run_equals_the_uncut_run(deterministic_run, tmp_path, cache_dir):
    run_small(1, tmp_path / "run", cache_dir, [*DETERMINISTIC, "trainer.max_steps=4"], on_gpus=True)
    resumed = run_small(1, tmp_path / "run", cache_dir, [*DETERMINISTIC, "trainer.max_steps=10"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, 4]
    assert curve(resumed) == curve(deterministic_run)


def test_worker_processes_and_pinned_memory_change_no_loss(deterministic_run, tmp_path, cache_dir):
    workers = [*DETERMINISTIC, "trainer.max_steps=10", "model.data.num_workers=2"]
    assert curve(run_small(1, tmp_path / "run", cache_dir, workers, on_gpus=True)) == curve(deterministic_run)
