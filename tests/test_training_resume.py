"""What a run leaves is enough to go on: interrupted and resumed runs equal the one that was not."""

import shutil
from dataclasses import replace

import pytest

from gpt_pretrain.checkpoint.manifest import read_manifest
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.runs import run_small, small_run_arguments

# The whole run's schedule, whatever part of it a process does; dropout, so that random states matter.
# Cut after two steps, the first one shows the weights that were saved, the second what moments and random states made.
SHORT = (
    "model.encoder_seq_length=32",
    "trainer.limit_val_batches=2",
    "trainer.val_check_interval=null",
    "model.optim.sched.decay_steps=10",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
)


def curve(metrics):
    return [(record.step, record.loss, record.grad_norm, record.lr) for record in metrics.train]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(1, [], id="one process"),
        pytest.param(1, ["trainer.precision=bf16"], id="bf16"),
        pytest.param(2, ["parallelism=dp"], id="DP2 distributed optimizer"),
        pytest.param(
            2,
            ["parallelism=tp2_sp", "model.use_distributed_optimizer=false", "model.overlap_param_gather=false"],
            id="TP2+SP",
        ),
        pytest.param(2, ["parallelism=pp2_vp2"], id="PP2 interleaved"),
    ],
)
def test_resumed_run_equals_uncut_run(num_ranks, layout, tmp_path, cache_dir):
    uncut = run_small(num_ranks, tmp_path / "uncut", cache_dir, [*SHORT, *layout, "trainer.max_steps=4"])
    run_small(num_ranks, tmp_path / "cut", cache_dir, [*SHORT, *layout, "trainer.max_steps=2"])
    resumed = run_small(num_ranks, tmp_path / "cut", cache_dir, [*SHORT, *layout, "trainer.max_steps=4"])
    assert [start.step for start in resumed.starts] == [0, 2]
    assert curve(resumed) == curve(uncut)
    assert resumed.validation[-1].loss == uncut.validation[-1].loss


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, "parallelism=single"), (2, "parallelism=dp")])
def test_resumed_run_follows_the_new_configuration(num_ranks, layout, tmp_path, cache_dir):
    """Rates, betas and batch are the configuration's to say; the checkpoint holds moments and how far the run is."""
    short = [*SHORT, layout, "trainer.limit_val_batches=0", "model.micro_batch_size=2"]
    run_small(num_ranks, tmp_path / "run", cache_dir, [*short, "trainer.max_steps=2"])
    changed = ["model.optim.lr=1e-3", "model.optim.betas=[0.5,0.5]", "model.global_batch_size=4"]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    lower = run_small(num_ranks, tmp_path / "run", cache_dir, [*short, "trainer.max_steps=4", *changed])
    other = [changed[0], "model.optim.betas=[0.9,0.95]", changed[2]]
    other_betas = run_small(num_ranks, tmp_path / "other", cache_dir, [*short, "trainer.max_steps=4", *other])
    assert [record.consumed_samples for record in lower.train] == [8, 16, 20, 24]
    assert lower.train[2].lr == pytest.approx(8.9472e-4, rel=1e-3), "cosine from 1e-3 to 1e-4 at step 3 of 10, warmup 1"
    # The first step after the checkpoint starts from its weights; the second shows the update that the betas made.
    assert lower.train[2].loss == other_betas.train[2].loss
    assert lower.train[3].loss != other_betas.train[3].loss


def test_tokens_are_counted_by_the_length_of_the_samples_that_they_came_in(tmp_path, cache_dir):
    """8 samples a step, of 32 tokens in two steps, of 64 in two, and of 32 in one."""
    short = [*SHORT, "trainer.limit_val_batches=0"]
    run_small(1, tmp_path, cache_dir, [*short, "trainer.max_steps=2"])
    longer = [*short, "model.encoder_seq_length=64", "trainer.max_steps=4"]
    done = fork_ranks(1, small_run_arguments(tmp_path, cache_dir, longer))
    assert done.returncode == 0, done.stderr[-4000:]
    told = " ".join(done.stdout.split())
    assert "model.encoder_seq_length=64 (saved with 32): " in told
    assert "sample 16 of the new ones" in told
    metrics = run_small(1, tmp_path, cache_dir, [*short, "trainer.max_steps=5"])
    assert [record.consumed_tokens for record in metrics.train] == [256, 512, 1024, 1536, 1792]
    assert metrics.summary.consumed_tokens == 1792
    assert read_manifest(tmp_path / "checkpoints" / "step_00000005").earlier_lengths == ((16, 32), (16, 64))


def test_checkpoints_come_at_their_interval_and_any_can_be_resumed(tmp_path, cache_dir):
    short = [*SHORT, "trainer.limit_val_batches=0", "trainer.max_steps=6"]
    first = run_small(1, tmp_path / "run", cache_dir, [*short, "checkpoint.save_interval=2"])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "latest",
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]
    assert (checkpoints / "latest").read_text() == "step_00000006\n"
    other = run_small(1, tmp_path / "other", cache_dir, [*short, f"checkpoint.resume={checkpoints}/step_00000002"])
    assert curve(other) == curve(first)[2:]


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "message"),
    [
        (1, ["checkpoint.resume=never"], "checkpoint.resume=never, but run_dir="),
        (1, ["model.num_layers=2"], "holds another model: model.num_layers=2 (saved with 4)"),
    ],
    ids=["never", "another model"],
)
def test_resume_that_cannot_be_meant_is_refused(num_ranks, overrides, message, finished_run, cache_dir):
    config = (finished_run / "config.yaml").read_bytes()
    done = fork_ranks(num_ranks, small_run_arguments(finished_run, cache_dir, [*SHORT, *overrides]))
    assert done.returncode != 0
    assert message in done.stderr
    assert num_ranks > 1 or "Traceback" not in done.stderr  # torchrun prints one of its own
    assert (finished_run / "config.yaml").read_bytes() == config, "a refused start changed the run's directory"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, cache_dir):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_small(1, run_dir, cache_dir, [*SHORT, "trainer.max_steps=2"])
    return run_dir


def test_a_run_goes_on_in_another_layout_and_says_so(finished_run, cache_dir, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    arguments = small_run_arguments(run_dir, cache_dir, [*SHORT, "parallelism=tp2", "trainer.max_steps=4"])
    done = fork_ranks(2, arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        "note: resharded: model.tensor_model_parallel_size=2 (saved with 1), processes=2 (saved with 1); random states "
        "are reseeded from model.seed and the step\n"
    ) in done.stdout.replace("\n  ", " ")
    metrics = load_metrics(run_dir)
    assert [start.step for start in metrics.starts] == [0, 2]
    assert [record.consumed_samples for record in metrics.train] == [8, 16, 24, 32]


def test_finished_run_started_again_says_so_and_changes_nothing(finished_run, cache_dir):
    checkpoint = finished_run / "checkpoints" / "step_00000002"
    before = checkpoint.stat().st_mtime_ns
    done = fork_ranks(1, small_run_arguments(finished_run, cache_dir, [*SHORT, "trainer.max_steps=2"]))
    assert done.returncode == 0, done.stderr
    assert "the run has done 2 steps, and trainer.max_steps=2; raise it to continue" in done.stdout
    assert checkpoint.stat().st_mtime_ns == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_is_repeated_from_what_it_left(num_ranks, tmp_path, cache_dir):
    layout = "parallelism=single" if num_ranks == 1 else "parallelism=tp2"
    first = run_small(num_ranks, tmp_path / "run", cache_dir, [*SHORT, layout, "trainer.max_steps=2"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    saved = load_saved_config(tmp_path / "run" / "config.yaml")
    arguments = ["-m", "gpt_pretrain", "--config-dir", str(tmp_path / "run"), "--config-name", "config"]
    done = fork_ranks(num_ranks, [*arguments, f"run_dir={tmp_path / 'again'}"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert load_saved_config(tmp_path / "again" / "config.yaml") == replace(saved, run_dir=str(tmp_path / "again"))
    assert curve(load_metrics(tmp_path / "again")) == curve(first)
    # Without another directory it is the run itself, which goes on.
    arguments[3] = str(tmp_path / "again")
    done = fork_ranks(num_ranks, [*arguments, "trainer.max_steps=3"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert [start.step for start in load_metrics(tmp_path / "again").starts] == [0, 2]
