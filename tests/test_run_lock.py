"""One run to a run directory: a second is refused, and what a killed one has left behind is recognised."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from filelock import FileLock

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.launch import run_dir as module
from gpt_pretrain.launch.process import this_process
from gpt_pretrain.launch.run_dir import check_run_lock, lock_path, run_lock
from tests.checkpoint_files import file_size_limit
from tests.launching import REPOSITORY, clean_environment, run_ranks
from tests.runs import small_run_arguments

# Takes the lock of a directory, says so, and keeps it until it is killed or its input ends.
HOLD = (
    "import sys; from pathlib import Path; from gpt_pretrain.launch.run_dir import run_lock\n"
    "with run_lock(Path(sys.argv[1])) as held: print('held', held.note, flush=True); sys.stdin.read()"
)


@pytest.fixture
def hold():
    """Another process that holds a directory's lock."""
    started = []

    def start(directory):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(directory)],
            cwd=REPOSITORY,
            env=clean_environment(None),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write_lock(directory, holder, age_s=0.0):
    path = lock_path(directory)
    path.write_text(holder.to_json())
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.mark.parametrize("name", ["lock", ".lock"])
@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path.parent / "gone"), os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_refused_at_once(name, make, tmp_path):
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"^{tmp_path / name} "):
        check_run_lock(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path / name} "), run_lock(tmp_path):
        pass


def test_the_lock_is_there_for_as_long_as_the_run(tmp_path):
    with run_lock(tmp_path) as held:
        assert held.note is None
        holder = json.loads(lock_path(tmp_path).read_text())
        assert (holder["host"], holder["process"]) == (os.uname().nodename, os.getpid())
    assert not lock_path(tmp_path).exists()
    with pytest.raises(RuntimeError), run_lock(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [], "an error gives it back, too"


def test_a_lock_that_the_disk_does_not_take_is_in_nobodys_way(tmp_path):
    with pytest.raises(OSError, match="File too large"), file_size_limit(10), run_lock(tmp_path):
        pass
    with run_lock(tmp_path) as held:
        assert held.note is None


def test_a_living_process_is_named_and_its_lock_stays(tmp_path, hold):
    process = hold(tmp_path)
    assert process.stdout.readline() == "held None\n"
    content = lock_path(tmp_path).read_bytes()
    for attempt in (lambda: check_run_lock(tmp_path), lambda: run_lock(tmp_path).__enter__()):
        with pytest.raises(UserError) as refused:
            attempt()
        assert f"run_dir={tmp_path} " in str(refused.value)
        assert f"process {process.pid} on {os.uname().nodename}, " in str(refused.value)
    assert lock_path(tmp_path).read_bytes() == content


def test_a_killed_process_leaves_a_lock_that_is_taken_over(tmp_path, hold):
    process = hold(tmp_path)
    process.stdout.readline()
    # Not waited for yet: it is a zombie, whose number is still taken.
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    check_run_lock(tmp_path)
    with run_lock(tmp_path) as held:
        assert f"process {process.pid} on {os.uname().nodename}, " in held.note
        assert "gone" in held.note
        assert json.loads(lock_path(tmp_path).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


# Whatever job started pytest.
ME = replace(this_process(), job=None, restarts=0)
LEFT_OVER = {
    "another process has its number now": (replace(ME, start=ME.start - 100), 0, "gone"),
    "the host was booted since": (replace(ME, boot="another"), 125, "not renewed for 12"),
    "a host that renews it no more": (replace(ME, host="elsewhere"), 125, "not renewed for 12"),
    "a container that renews it no more": (replace(ME, namespace="pid:[1]"), 125, "not renewed for 12"),
    "a job that Slurm has restarted": (replace(ME, host="elsewhere", job="17", restarts=0), 0, "Slurm"),
}
ALIVE = {
    "this very process": (ME, 0),
    "a host that renews it": (replace(ME, host="elsewhere"), 60),
    "a container that renews it": (replace(ME, namespace="pid:[1]"), 60),
    "another machine of the same name": (replace(ME, boot="another"), 1),
    "a job of that number on another cluster": (replace(ME, boot="another", job="17", cluster="another"), 1),
    "another step of this job": (replace(ME, host="elsewhere", job="17", restarts=1), 0),
}


@pytest.mark.parametrize(("holder", "age_s", "why"), LEFT_OVER.values(), ids=LEFT_OVER)
def test_a_lock_without_a_run_is_taken_over_with_a_note(holder, age_s, why, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_lock(tmp_path, holder, age_s)
    check_run_lock(tmp_path)
    with run_lock(tmp_path) as held:
        assert why in held.note.rpartition(": ")[2]


def test_a_number_that_no_process_can_have_is_of_one_that_is_gone(tmp_path):
    write_lock(tmp_path, replace(ME, process=2**40, start=None))
    with run_lock(tmp_path) as held:
        assert "gone" in held.note


@pytest.mark.parametrize(("holder", "age_s"), ALIVE.values(), ids=ALIVE)
def test_a_lock_that_may_have_a_run_is_respected(holder, age_s, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    path = write_lock(tmp_path, holder, age_s)
    content = path.read_bytes()
    with pytest.raises(UserError) as refused, run_lock(tmp_path):
        pass
    assert f"process {os.getpid()} on {holder.host}" in str(refused.value)
    if holder is not ME:
        assert f"in 120 s or delete {path}" in str(refused.value)
    assert path.read_bytes() == content


def garbled(**values):
    """This process's lock, in which others have written what no process has."""
    return json.dumps({**json.loads(ME.to_json()), **values})


UNREADABLE = {
    "half of it": "{",
    "deep": "[" * 100_000,
    "a text for a number": garbled(process="1", start=None),
    "a number for a text": garbled(host=3),
    "a number beyond any": garbled(process="PROCESS").replace('"PROCESS"', "1e400"),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_lock_counts_by_its_age(content, tmp_path):
    path = lock_path(tmp_path)
    path.write_text(content)
    with pytest.raises(UserError, match="unreadable"), run_lock(tmp_path):
        pass
    os.utime(path, (time.time() - 1000,) * 2)
    with run_lock(tmp_path) as held:
        assert "unreadable" in held.note
        assert "not renewed for 1" in held.note


def test_a_held_lock_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    with run_lock(tmp_path):
        os.utime(lock_path(tmp_path), (0, 0))
        deadline = time.monotonic() + 60
        while lock_path(tmp_path).stat().st_mtime < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_lock_that_was_deleted_and_taken_by_another_stays_the_others(tmp_path):
    with run_lock(tmp_path) as held:
        assert held.problem() is None
        lock_path(tmp_path).unlink()
        path = write_lock(tmp_path, replace(ME, host="elsewhere"))
        held.renew()
        assert f"process {ME.process} on elsewhere, " in held.problem()
        assert str(path) in held.problem()
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_a_lock_that_was_deleted_comes_back(tmp_path):
    with run_lock(tmp_path) as held:
        lock_path(tmp_path).unlink()
        assert held.problem() is None
        held.renew()
        with pytest.raises(UserError, match="in use"):
            check_run_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("instead", ["nothing", "an empty directory", "a link to it"])
def test_a_directory_that_is_not_at_its_path_any_more_is_told(instead, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with run_lock(run_dir) as held:
        run_dir.rename(tmp_path / "moved")
        if instead == "an empty directory":
            run_dir.mkdir()
        elif instead == "a link to it":
            run_dir.symlink_to(tmp_path / "moved")
        held.renew()
        assert (held.problem() is None) == (instead == "a link to it")
        assert instead == "a link to it" or f"run_dir={run_dir} " in held.problem()
        assert instead != "an empty directory" or list(run_dir.iterdir()) == []


def test_a_lock_from_the_future_counts_from_when_it_is_seen(tmp_path):
    """The file system's clock was set back: nothing else would ever make the lock old enough."""
    path = write_lock(tmp_path, replace(ME, host="elsewhere"), age_s=-1e6)
    with pytest.raises(UserError, match="in use"):
        check_run_lock(tmp_path)
    assert abs(path.stat().st_mtime - time.time()) < 60
    os.utime(path, (time.time() - 1000,) * 2)
    with run_lock(tmp_path) as held:
        assert "not renewed for 1" in held.note


@pytest.mark.parametrize("left_over", [False, True], ids=["no lock", "a lock left over"])
def test_of_starts_at_the_same_moment_one_wins(left_over, tmp_path, hold):
    if left_over:
        write_lock(tmp_path, replace(ME, start=ME.start - 100))
    processes = [hold(tmp_path) for _ in range(6)]
    # Those that are refused end by themselves and say nothing here.
    answers = []
    for process in processes:
        line = process.stdout.readline()
        answers.append(line)
    held = [process.pid for process, line in zip(processes, answers, strict=True) if line.startswith("held")]
    assert len(held) == 1
    assert json.loads(lock_path(tmp_path).read_text())["process"] == held[0]


def test_a_start_that_waits_for_one_that_is_stuck_names_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_JUDGE_S", 0.1)
    with FileLock(tmp_path / ".lock"), pytest.raises(UserError, match=str(tmp_path / ".lock")), run_lock(tmp_path):
        pass
    with run_lock(tmp_path) as held:
        assert held.note is None


def test_a_second_run_is_refused_before_it_loads_torch(tmp_path, hold):
    process = hold(tmp_path)
    process.stdout.readline()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    program = (
        "import sys; from gpt_pretrain.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = run_ranks(1, ["-c", program, f"run_dir={tmp_path}"])
    assert done.returncode == 2
    assert f"error: run_dir={tmp_path} " in done.stderr
    assert f"process {process.pid} on " in done.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_run_takes_the_lock_over_and_gives_it_back(tmp_path, capsys):
    """In the process of the test: the second start of a run that was killed."""
    (tmp_path / "run").mkdir()
    write_lock(tmp_path / "run", replace(ME, start=ME.start - 100))
    arguments = small_run_arguments(tmp_path / "run", tmp_path, ["trainer.max_steps=1", "trainer.limit_val_batches=0"])
    assert main(arguments[2:]) == 0
    assert f"process {ME.process} on {ME.host}" in capsys.readouterr().out
    assert not lock_path(tmp_path / "run").exists()


def test_a_plan_needs_no_lock(tmp_path, hold):
    process = hold(tmp_path)
    process.stdout.readline()
    done = run_ranks(1, ["-m", "gpt_pretrain.plan", f"run_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    assert json.loads(lock_path(tmp_path).read_text())["process"] == process.pid
