"""Runs that save: what they log, what they keep, and how they end if a checkpoint cannot be written."""

import json
import re
import shutil

import pytest

from gpt_pretrain.checkpoint.directory import checkpoint_path, complete_checkpoints, latest_checkpoint, step_of
from gpt_pretrain.checkpoint.manifest import check_files, read_manifest
from gpt_pretrain.config.errors import RunError, UserError
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.training.run import train
from tests.checkpoint_files import disk_that, flip
from tests.emulated_training import TINY
from tests.forked_runs import fork_ranks
from tests.platforms import spec_of


@pytest.fixture
def start(compose_config, tmp_path):
    """Trains a tiny model for six steps in this process, with a checkpoint every second step."""

    def run(*overrides):
        quick = ("trainer.max_steps=6", "trainer.limit_val_batches=0", "logging.tensorboard=false")
        saves = ("checkpoint.save_interval=2", f"run_dir={tmp_path / 'run'}")
        install_cpu_device()
        train(spec_of(compose_config(*TINY, *quick, *saves, *overrides), detect_platform()))

    return run


def saves_of(run_dir):
    records = map(json.loads, metrics_path(run_dir).read_text().splitlines())
    return [(record["saved_step"], record["problem"] is None) for record in records if record["kind"] == "checkpoint"]


@pytest.fixture
def failing_saves():
    """The saves of these steps fail."""
    steps = set()

    def fail(path):
        if any(f"step_{step:08d}" in path for step in steps):
            raise OSError(28, "No space left on device", path)

    with disk_that(fail):
        yield steps


def test_a_run_goes_on_after_a_failed_save_if_told_to(start, failing_saves, tmp_path, capsys):
    failing_saves |= {2, 4}
    start("checkpoint.on_save_error=continue")
    assert saves_of(tmp_path / "run") == [(2, False), (4, False), (6, True)]
    assert capsys.readouterr().out.count("No space left on device; there is none yet") == 2
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_00000006"


@pytest.mark.parametrize("rewinds", [None, 1])
def test_a_disk_that_holds_no_checkpoint_is_told_before_the_first_step(
    start, tmp_path, monkeypatch, broken_rules, rewinds
):
    left = tmp_path / "run" / "checkpoints" / ".step_00000002.unfinished"
    left.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**20, 2**20 - 512, 512))
    with pytest.raises(UserError, match=f"run_dir={tmp_path / 'run'}: .* MiB.* 512 B free; ") as refused:
        start("checkpoint.keep_last=2", "checkpoint.async_save=false", f"trainer.max_spike_rewinds={rewinds or 'null'}")
    assert not metrics_path(tmp_path / "run").exists()
    assert not left.exists(), "a killed save does not take the space of the next one"
    offered = re.findall(r"checkpoint\.\S+", str(refused.value))
    if rewinds is not None:
        assert not offered, "rewinds need checkpoints"
    else:
        assert broken_rules("checkpoint.keep_last=2", "checkpoint.async_save=false", *offered) == []
        start(*offered)
        assert not latest_checkpoint(tmp_path / "run" / "checkpoints")


def test_the_last_save_of_a_run_must_succeed(start, failing_saves, tmp_path):
    failing_saves |= {6}
    with pytest.raises(RunError, match=r"the checkpoint of step 6 could not be saved: .*step_00000004$"):
        start("checkpoint.on_save_error=continue")
    assert saves_of(tmp_path / "run") == [(2, True), (4, True), (6, False)]


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_a_run_ends_before_the_next_save_after_a_failed_one(start, failing_saves, tmp_path, async_save):
    failing_saves |= {4}
    with pytest.raises(RunError, match=r"the checkpoint of step 4 could not be saved: .*step_00000002$"):
        start(f"checkpoint.async_save={async_save}")
    assert saves_of(tmp_path / "run") == [(2, True), (4, False)]
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_00000002"


def test_old_checkpoints_go_as_configured(start, tmp_path):
    start("checkpoint.keep_last=1", "checkpoint.keep_every=4")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000004", "step_00000006"]


def test_a_run_keeps_the_checkpoint_with_the_lowest_validation_loss(start, tmp_path):
    """Of random tokens, those that were trained on say nothing about others: the loss only rises."""
    start(
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=true",
        "trainer.val_check_interval=2",
        "trainer.limit_val_batches=1",
        "model.optim.lr=1e-2",
        "model.optim.sched.warmup_steps=0",
    )
    directory = tmp_path / "run" / "checkpoints"
    losses = {record.step: record.loss for record in load_metrics(tmp_path / "run").validation}
    assert losses[2] < min(losses[4], losses[6])
    assert [step_of(path) for path in complete_checkpoints(directory)] == [2, 6]
    assert read_manifest(checkpoint_path(directory, 2)).validation_loss == losses[2]


def test_a_run_that_is_shorter_than_the_interval_saves_as_without_it(start, tmp_path):
    start("checkpoint.save_interval_minutes=30")
    assert saves_of(tmp_path / "run") == [(2, True), (4, True), (6, True)]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", "step_00000004", "step_00000006"]


@pytest.fixture
def go_on(start, tmp_path):
    """Runs a command to a step; returns where it started."""

    def run(max_steps, *overrides):
        start(f"trainer.max_steps={max_steps}", *overrides)
        return load_metrics(tmp_path / "run").starts[-1].step

    return run


def test_a_rollback_happens_once_however_often_its_command_is_repeated(start, go_on, tmp_path, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    start()
    back = f"checkpoint.resume={checkpoints / 'step_00000002'}"
    assert go_on(4, back) == 2
    assert capsys.readouterr().out.count("checkpoint.resume=") == 0
    assert go_on(5, back) == 4, "a requeued job goes on"
    assert f"note: {back} is ignored" in capsys.readouterr().out
    assert go_on(6) == 5, "the hint of a run that was stopped"
    assert go_on(7, back) == 6
    # On purpose, as the note says.
    (checkpoints / "latest").write_text("step_00000002\n")
    assert go_on(4, back) == 2
    assert go_on(5, f"checkpoint.resume={checkpoints / 'step_00000004'}") == 4, "another one is meant"
    assert go_on(6, back) == 5
    # The run moves, and keeps the checkpoint no more.
    shutil.rmtree(checkpoints / "step_00000002")
    assert go_on(7, back) == 6
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    back = f"checkpoint.resume={moved / 'checkpoints' / 'step_00000002'}"
    start("trainer.max_steps=8", back, f"run_dir={moved}")
    assert load_metrics(moved).starts[-1].step == 7


def test_a_run_that_began_in_another_goes_on_when_its_command_is_repeated(start, go_on, tmp_path):
    start(f"run_dir={tmp_path / 'other'}")
    source = tmp_path / "other" / "checkpoints" / "step_00000002"
    assert go_on(4, f"checkpoint.resume={source}") == 2
    # A damaged checkpoint is no reason to begin again.
    newest = tmp_path / "run" / "checkpoints" / "step_00000004"
    for name in (".metadata", "manifest.json"):
        content = (newest / name).read_bytes()
        flip(newest / name, 0.5)
        with pytest.raises(UserError, match=f"{newest}"):
            go_on(5, f"checkpoint.resume={source}")
        (newest / name).write_bytes(content)
    shutil.rmtree(tmp_path / "other")
    assert go_on(5, f"checkpoint.resume={source}") == 4
    assert load_metrics(tmp_path / "run").starts[0].step == 2


def test_a_requeued_run_needs_no_checkpoint_that_it_began_with(start, go_on, tmp_path, broken_rules):
    gone = tmp_path / "gone"
    for key in ("resume", "init_from"):
        assert broken_rules(f"checkpoint.{key}={gone}", f"run_dir={tmp_path / 'run'}") != []
    start("trainer.max_steps=2")
    for key in ("resume", "init_from"):
        assert broken_rules(f"checkpoint.{key}={gone}", f"run_dir={tmp_path / 'run'}") == []
    assert go_on(4, f"checkpoint.init_from={gone}") == 2
    with pytest.raises(UserError, match=f"{gone} does not exist"):
        go_on(4, f"checkpoint.resume={gone}")


def test_rank_0s_clock_alone_says_when_to_save(tmp_path):
    done = fork_ranks(2, ["tests/programs/save_clock.py", str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    steps = [step for step, _ in first["due"]]
    assert steps == [step for step, _ in second["due"]], "the ranks save after the same steps"
    assert first["ended"] == second["ended"] == [51, "warned"]
    # 50 steps of at least 20 ms; each save, that of step 20 included, starts the interval of 200 ms anew.
    times = [time_s for _, time_s in first["due"]]
    assert steps
    assert all(later - earlier >= 0.2 for earlier, later in zip([0.0, *times], times, strict=False))
    assert 21 not in steps


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_saves_by_the_clock_where_it_saves_by_no_steps(num_ranks, tmp_path):
    quick = ("trainer.max_steps=8", "trainer.limit_val_batches=0", "logging.tensorboard=false")
    clock = ("checkpoint.save_interval_minutes=0.00001", "sample.max_new_tokens=0", "model.micro_batch_size=1")
    run_dir = tmp_path / "run"
    done = fork_ranks(num_ranks, ["-m", "gpt_pretrain", *TINY, *quick, *clock, "parallelism=dp", f"run_dir={run_dir}"])
    assert done.returncode == 0, done.stderr[-4000:]
    saves = saves_of(run_dir)
    assert all(is_good for _, is_good in saves)
    # The clock is asked at the end of a step, and the run saves at the end of the next; two ranks know a step later.
    assert saves[0][0] == num_ranks + 1
    assert saves[-1][0] == 8
    assert len(saves) >= 3
    path = latest_checkpoint(run_dir / "checkpoints")
    assert path.name == "step_00000008"
    assert check_files(path, read_manifest(path)) == []
    assert sorted(each.name for each in path.parent.iterdir()) == ["latest", "step_00000008"]


def test_a_failed_save_ends_the_program_with_exit_code_1_and_no_traceback(parent, tmp_path):
    quick = ("trainer.max_steps=4", "trainer.limit_val_batches=0", "logging.tensorboard=false")
    arguments = [*TINY, *quick, "checkpoint.save_interval=2", f"run_dir={tmp_path / 'run'}"]
    codes, text = parent.run(arguments, tmp_path / "output", faults={0: [["limit", "FSIZE", 100_000]]})
    unfinished = tmp_path / "run" / "checkpoints" / ".step_00000002.unfinished"
    assert codes == [1], text
    assert f"error: the checkpoint of step 2 could not be saved: {unfinished}/__0_0.distcp: File too large; " in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("override", "told"), [("checkpoint.keep_every=4", "checkpoint.keep_last=null"), ("checkpoint.keep_last=0", "")]
)
def test_retention_that_says_nothing_is_refused(broken_rules, override, told):
    (problem,) = broken_rules(override)
    assert problem.startswith(f"{override} ")
    assert told in problem
