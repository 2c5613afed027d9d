"""How a run ends early: a checkpoint of the present step, and an exit code that says what to do next."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time

import pytest

from gpt_pretrain.checkpoint.manifest import check_files, read_manifest
from gpt_pretrain.launch.ranks import start_command
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.stop import StopRequest
from tests.emulated_training import emulated_training
from tests.launching import REPOSITORY, clean_environment, run_ranks
from tests.runs import small_run_arguments

SMALL = (
    "model.num_layers=2",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "trainer.limit_val_batches=0",
    "trainer.max_steps=100000",
)


@pytest.fixture
def run(parent, tmp_path, cache_dir):
    def run_to_its_end(*overrides, num_ranks=1, faults=(), env=None):
        arguments = small_run_arguments(tmp_path / "run", cache_dir, [*SMALL, *overrides])
        return parent.run(arguments[2:], tmp_path / "output", num_ranks=num_ranks, faults=dict(faults), env=env)

    return run_to_its_end


def saved_step(run_dir):
    """The step of the newest checkpoint, once every byte of it is what its manifest says."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    manifest = read_manifest(checkpoint)
    assert check_files(checkpoint, manifest) == []
    return manifest.step


ENDS = {
    "SIGTERM": ("terminated", 75),
    "SIGHUP": ("terminated", 75),
    "SIGUSR1": ("warned", 75),
    "SIGINT": ("interrupted", 130),
}


@pytest.mark.parametrize(
    ("num_ranks", "name"), [*((1, name) for name in ENDS), (2, "SIGUSR1"), (2, "SIGHUP"), (2, "SIGINT")]
)
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint_and_its_code(num_ranks, name, run, tmp_path):
    layout = ["parallelism=dp"] if num_ranks == 2 else []
    codes, text = run(*layout, num_ranks=num_ranks, faults={num_ranks - 1: [["signal_at_step", 5, name]]})
    reason, code = ENDS[name]
    assert codes == [code] * num_ranks, text
    summary = load_metrics(tmp_path / "run").summary
    assert (summary.end_reason, summary.exit_code) == (reason, code)
    # Several ranks agree one step later.
    assert summary.step == 5 + (num_ranks - 1)
    assert saved_step(tmp_path / "run") == summary.step
    assert not (tmp_path / "run" / "lock").exists()
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert f'"exit_code": {code}' in last, "what scripts look at under a launcher"


def test_the_checkpoint_is_on_the_disk_within_30_s_of_the_signal(run, tmp_path):
    """The signal comes while an earlier checkpoint is being written: that one has to end, and another follows."""
    noted = tmp_path / "signalled"
    faults = [["hold_saves"], ["signal_at_step", 6, "SIGTERM", str(noted)]]
    codes, text = run(
        "parallelism=dp", "checkpoint.save_interval=5", num_ranks=2, faults={0: [["hold_saves"]], 1: faults}
    )
    assert codes == [75, 75], text
    checkpoints = tmp_path / "run" / "checkpoints"
    step = saved_step(tmp_path / "run")
    assert (step, sorted(path.name for path in checkpoints.glob("step_*"))) == (7, ["step_00000005", "step_00000007"])
    # `latest` is replaced once the disk has all files of a checkpoint, and their directory under its name.
    earlier = (checkpoints / "step_00000005").stat().st_mtime - noted.stat().st_mtime
    durable = (checkpoints / "latest").stat().st_mtime - noted.stat().st_mtime
    assert 0 < earlier < durable <= 30


@pytest.mark.parametrize(
    ("num_ranks", "number", "to_all"),
    [
        pytest.param(2, signal.SIGINT, True, id="Ctrl-C in a terminal"),
        pytest.param(1, signal.SIGUSR1, False, id="SIGUSR1 to the launcher alone"),
    ],
)
def test_torchrun_hands_signals_on(num_ranks, number, to_all, tmp_path, cache_dir):
    """Its own exit code is 1 whatever the ranks' are: the last record has theirs."""
    run_dir = tmp_path / "run"
    launcher = [*start_command(2)[:-1], str(num_ranks), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    process = subprocess.Popen(
        [*launcher, *small_run_arguments(run_dir, cache_dir, SMALL)],
        cwd=REPOSITORY,
        env=clean_environment(None),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (run_dir / "metrics.jsonl").exists() or '"step": 3,' not in (run_dir / "metrics.jsonl").read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (os.killpg if to_all else os.kill)(process.pid, number)
        stdout, stderr = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 1
    summary = load_metrics(run_dir).summary
    assert (summary.end_reason, summary.exit_code) == ENDS[number.name], stderr
    assert saved_step(run_dir) == summary.step
    assert f"continue with: the same command again with run_dir={run_dir}\n" in stdout


def test_a_run_whose_terminal_closes_saves(tmp_path, cache_dir):
    run_dir, (master, slave) = tmp_path / "run", os.openpty()
    process = subprocess.Popen(
        [
            "setsid",
            "--ctty",
            *start_command(1),
            *small_run_arguments(run_dir, cache_dir, [*SMALL, "trainer.log_every_n_steps=1"]),
        ],
        cwd=REPOSITORY,
        env=clean_environment(None),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        shown, deadline = "", time.monotonic() + 240
        # Somebody has to read what it shows.
        while not (run_dir / "metrics.jsonl").exists() or '"step": 3,' not in (run_dir / "metrics.jsonl").read_text():
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65536).decode(errors="replace")
            assert process.poll() is None, shown
            assert time.monotonic() < deadline, shown
        os.close(master)
        assert process.wait(timeout=150) == 75
    finally:
        process.kill()
    summary = load_metrics(run_dir).summary
    assert (summary.end_reason, summary.exit_code) == ("terminated", 75)
    assert saved_step(run_dir) == summary.step
    assert not (run_dir / "stacks").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), (None, 75)], ids=["Ctrl-C ends tee, too", "tee is killed"])
def test_a_run_whose_output_nobody_reads_any_more_saves(name, code, parent, tmp_path, cache_dir):
    pipe = tmp_path / "pipe.0"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    arguments = small_run_arguments(tmp_path / "run", cache_dir, SMALL)
    run = parent.start(arguments[2:], tmp_path / "pipe")
    try:
        shown, deadline = b"", time.monotonic() + 120
        while b"\nstep 3/" not in shown:
            assert not run.poll(), shown
            assert time.monotonic() < deadline, shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(reader, 65536)
            time.sleep(0.01)
        os.close(reader)
        if name is not None:
            run.signal(0, getattr(signal, name))
        while not run.poll():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        run.kill()
    assert run.codes == {0: code}
    summary = load_metrics(tmp_path / "run").summary
    assert (summary.exit_code, saved_step(tmp_path / "run")) == (code, summary.step)


def test_time_that_is_used_up_asks_to_be_started_again(run, tmp_path):
    for_torchrun = tmp_path / "error.json"
    codes, text = run("trainer.max_time='00:00:00:01'", env={"TORCHELASTIC_ERROR_FILE": str(for_torchrun)})
    assert codes == [75], text
    left = json.loads(for_torchrun.read_text())["message"]["message"]
    assert "trainer.max_time" in left
    assert "start the same command again" in left
    summary = load_metrics(tmp_path / "run").summary
    assert (summary.end_reason, summary.exit_code) == ("max_time", 75)
    assert saved_step(tmp_path / "run") == summary.step > 0


def test_a_run_that_was_asked_to_end_at_its_last_step_is_done(run, tmp_path):
    codes, text = run("trainer.max_steps=5", faults={0: [["signal_at_step", 5, "SIGTERM"]]})
    assert codes == [0], text
    assert load_metrics(tmp_path / "run").summary.end_reason == "max_steps"


@pytest.mark.parametrize(
    ("names", "in_background"),
    [
        (["SIGINT", "SIGTERM", "SIGUSR1"], True),
        (["SIGUSR1", "SIGINT", "SIGTERM"], True),
        (["SIGTERM", "SIGUSR1", "SIGINT"], False),
    ],
)
def test_signals_while_saving_do_not_break_the_save_off(names, in_background, run, tmp_path):
    """A signal at every operation on the checkpoint's files: of a save in the middle, and of the last."""
    codes, text = run(
        f"checkpoint.async_save={in_background}", "checkpoint.save_interval=4", faults={0: [["signals_in_save", names]]}
    )
    reason, code = ENDS[names[0]]
    assert codes == [code], text
    summary = load_metrics(tmp_path / "run").summary
    assert summary.end_reason == reason, "the first signal says why"
    assert saved_step(tmp_path / "run") == summary.step >= 4
    assert "Traceback" not in text


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_before_the_first_step_ends_at_once(name, code, run, tmp_path):
    codes, text = run(faults={0: [["signal_at_start", name]]})
    assert codes == [code], text
    assert not (tmp_path / "run").exists(), "nothing was written"


def test_the_first_signal_stands_and_the_old_handlers_come_back():
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    with emulated_training():
        with StopRequest(None) as stop:
            assert stop.poll() is None
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert stop.poll() == "warned"
        with StopRequest(max_time_s=0.0) as stop:
            assert stop.poll() == "max_time"
        nohup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest(None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.poll() is None
        signal.signal(signal.SIGHUP, nohup)
    assert {number: signal.getsignal(number) for number in before} == before


# A library that takes what is raised while it is imported for a missing extra, as torch does with numpy's.
SWALLOWS = """
import contextlib, os, runpy, signal, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core":
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.{name})
                time.sleep(5)
sys.meta_path.insert(0, Finder())
runpy.run_module("gpt_pretrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_is_not_lost_in_a_library_that_is_being_imported(name, code, tmp_path, cache_dir):
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*SMALL, "trainer.max_steps=1"])
    done = run_ranks(1, ["-c", SWALLOWS.format(name=name), *arguments[2:]])
    assert (done.returncode, done.stderr) == (code, "")
    assert not (tmp_path / "run").exists()
