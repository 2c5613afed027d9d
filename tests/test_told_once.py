"""What several ranks find wrong is printed once, whichever rank comes first and whoever is ended meanwhile."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gpt_pretrain.commands.command import run_alone
from tests.launching import REPOSITORY, clean_environment, run_ranks
from tests.runs import small_run_arguments

TYPO = ["model.hiden_size=3"]
# So that two, three or four ranks could train.
FITS = ["model.micro_batch_size=1", "model.global_batch_size=24"]
HEADS = [*FITS, "model.num_attention_heads=${oc.env:HEADS}"]
# Where no store is: who is told nothing wrong waits there for the others.
NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
# Command line, and what differs between the ranks; None: the rank finds nothing wrong.
MISTAKES = {
    "two mistakes": (["model.hiden_size=3", "trainer.max_step=1"], [{}] * 3, ["model.hiden_size", "trainer.max_step "]),
    "the launcher's own": ([], [{"WORLD_SIZE": "x"}] * 2, ["WORLD_SIZE='x'"]),
    "of all but rank 0": (HEADS, [{"HEADS": "8"}] + [{"HEADS": "6"}] * 2, ["model.num_attention_heads=6"]),
}


class Launch:
    """Ranks as a launcher on one node starts and ends them; they share standard error."""

    def __init__(self, arguments, places, errors, module="gpt_pretrain"):
        self.processes = []
        for rank, place in enumerate(places):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(places)), **NOWHERE, **place}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=REPOSITORY,
                    env=clean_environment({"LOCAL_WORLD_SIZE": str(len(places)), **of_rank}),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )

    def wait(self):
        """Exit codes, once the first failure has ended all as torchrun does it."""
        deadline = time.monotonic() + 120
        while not any(process.poll() for process in self.processes):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        for process in self.processes:
            process.terminate()
            process.send_signal(signal.SIGCONT)
        return [process.wait(timeout=60) for process in self.processes]


def told(path):
    return Counter(line for line in path.read_text().splitlines() if line.startswith("error"))


@pytest.mark.parametrize("stopped", [[], [0]], ids=["all at once", "rank 0 late"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_once_in_any_order(mistake, stopped, tmp_path):
    arguments, places, named = MISTAKES[mistake]
    with (tmp_path / "errors").open("a") as errors:
        launch = Launch(arguments, places, errors)
        for rank in stopped:
            launch.processes[rank].send_signal(signal.SIGSTOP)
        codes = launch.wait()
    lines = told(tmp_path / "errors")
    assert list(lines.values()) == [1] * len(named), lines
    assert all(any(line.startswith("error: ") and name in line for line in lines) for name in named), lines
    assert 2 in codes
    # A rank that was stopped at its start may not have heard a signal yet.
    assert set(codes) <= {2, 75, -signal.SIGTERM}
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_mistakes_that_differ_are_told_each(tmp_path):
    with (tmp_path / "errors").open("a") as errors:
        launch = Launch(HEADS, [{"HEADS": "6"}, {"HEADS": "10"}, {"HEADS": "6"}], errors)
        codes = [process.wait(timeout=60) for process in launch.processes]
    assert codes == [2, 2, 2]
    lines = told(tmp_path / "errors")
    assert set(lines.values()) == {1}
    assert {re.search(r"model.num_attention_heads=(\d+)", line)[1] for line in lines} == {"6", "10"}


@pytest.mark.parametrize("module", ["gpt_pretrain.plan", "gpt_pretrain.export"])
def test_a_command_of_one_process_is_told_once_under_a_launcher_too(module, tmp_path):
    with (tmp_path / "errors").open("a") as errors:
        launch = Launch(["hiden_size=3"], [{}] * 3, errors, module)
        assert [process.wait(timeout=60) for process in launch.processes] == [2, 2, 2]
    assert set(told(tmp_path / "errors").values()) == {1}


def test_what_was_told_is_news_at_the_next_start_and_in_a_file_of_its_own(tmp_path):
    for name in ("first", "second"):
        with contextlib.ExitStack() as files:
            errors = [files.enter_context((tmp_path / f"{name}.{rank}").open("a")) for rank in range(2)]
            launches = [Launch(TYPO, [{}, {}], file) for file in errors]
            for launch in launches:
                assert [process.wait(timeout=60) for process in launch.processes] == [2, 2]
        assert [sum(told(tmp_path / f"{name}.{rank}").values()) for rank in range(2)] == [1, 1]


def test_nodes_tell_for_themselves_and_say_where(tmp_path):
    with (tmp_path / "errors").open("a") as errors:
        second = [{"RANK": str(rank + 2), "WORLD_SIZE": "4"} for rank in range(2)]
        launch = Launch(TYPO, second, errors)
        assert [process.wait(timeout=60) for process in launch.processes] == [2, 2]
    ((line, times),) = told(tmp_path / "errors").items()
    assert times == 1
    assert line.startswith(f"error ({os.uname().nodename}): model.hiden_size")


@pytest.mark.parametrize("how", ["locked", "a link"])
def test_a_rank_that_cannot_note_what_it_tells_tells_it(how, tmp_path):
    """The file is locked as by a rank that is stopped at that moment, or somebody has put a link there."""
    notes = tmp_path / f"gpt_pretrain-{os.getuid()}.told"
    if how == "a link":
        notes.symlink_to(tmp_path / "target")
    place = {"TMPDIR": str(tmp_path)}
    with notes.open("a") if how == "locked" else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        with (tmp_path / "errors").open("a") as errors:
            launch = Launch(TYPO, [place, place], errors)
            assert [process.wait(timeout=60) for process in launch.processes] == [2, 2]
    assert list(told(tmp_path / "errors").values()) == [2], "rather twice than never"
    assert not (tmp_path / "target").exists()


def full_pipe():
    """A pipe that takes nothing until it is read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_that_comes_while_it_is_told_changes_nothing(num_ranks):
    reader, writer = full_pipe()
    launch = Launch(TYPO, [{}] * num_ranks, writer)
    os.close(writer)
    deadline, ignored = time.monotonic() + 60, 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{launch.processes[0].pid}/status")
    while not int(re.search(r"SigIgn:\s*(\w+)", status.read_text())[1], 16) & ignored:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    launch.processes[0].terminate()
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode().lstrip("x")
    assert [process.wait(timeout=60) for process in launch.processes] == [2] * num_ranks
    assert text.count("error: model.hiden_size") >= 1
    assert "Traceback" not in text


def test_a_mistake_of_the_data_is_told_once_by_ranks_that_train(parent, tmp_path, cache_dir):
    """Each of the four meets it at its own time, after torch was imported; they share a file."""
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*FITS, "model.data.text_files=[nowhere.txt]"])
    done = parent.complete(4, arguments, 120, {})
    assert done.returncode == 1, "as torchrun's"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error: model.data.text_files")


def test_torchrun_shows_a_mistake_at_once_and_as_its_last_word():
    done = run_ranks(3, ["-m", "gpt_pretrain", *TYPO, "trainer.max_step=1"])
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2
    before, after = done.stderr.split("Root Cause (first observed failure):")
    for line in lines:
        assert before.count(line) == 1, "no rank repeats it"
        assert line in after
    assert "To enable traceback" not in after


@pytest.mark.parametrize("order", [1, -1])
def test_of_ranks_that_fail_in_the_same_second_the_one_that_tells_is_the_cause(order, tmp_path):
    places = [{"TORCHELASTIC_ERROR_FILE": str(tmp_path / str(rank))} for rank in range(2)]
    with (tmp_path / "errors").open("a") as errors:
        launch = Launch(TYPO, places, errors)
        assert [process.wait(timeout=60) for process in launch.processes] == [2, 2]
    failures = [ProcessFailure(rank, 0, 2, str(tmp_path / str(rank))) for rank in range(2)]
    _, cause = ChildFailedError("", dict(enumerate(failures[::order]))).get_first_failure()
    assert "error: model.hiden_size" in cause.message["message"]


def test_a_crash_is_left_for_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError):
        run_alone("", lambda given: 1 // 0, [])
    assert ProcessFailure(0, 0, 1, str(tmp_path / "error.json")).message["message"].startswith("ZeroDivisionError: ")
