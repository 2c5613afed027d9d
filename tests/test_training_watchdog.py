"""A rank that dies or hangs ends the run on all ranks, with stack traces; a healthy run is left alone.

Nobody watches the ranks here, as under srun: what ends them is the watchdog alone. Its times are shortened.
"""

import re
import shutil
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from gpt_pretrain.commands.command import ALONE
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.watchdog import EXIT_CODE, STEP_FACTOR, Watchdog
from tests.runs import small_run_arguments

SIGKILL = -9
TINY = (
    "model.num_layers=2",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "trainer.limit_val_batches=0",
    "checkpoint.save_at_end=false",
)
# From here on a step has 5 s.
LEARNT = 8
# Only a watchdog that fails takes so long, however busy the machine is.
WAIT_S = 150


@contextmanager
def starting(parent, cache_dir, folder):
    """Starts runs, in a folder unless it is given another, and ends those that are left."""
    runs, usual = [], folder

    def start_run(*overrides, num_ranks=1, faults=None, max_steps=100000, times="hurry", env=None, folder=usual):
        layout = ["parallelism=dp"] if num_ranks > 1 else []
        arguments = small_run_arguments(
            folder / "run", cache_dir, [*TINY, *layout, f"trainer.max_steps={max_steps}", *overrides]
        )
        folder.mkdir(exist_ok=True)
        faults = {rank: [[times], *([faults[rank]] if rank in (faults or {}) else [])] for rank in range(num_ranks)}
        runs.append(parent.start(arguments[2:], folder / "output", num_ranks=num_ranks, faults=faults, env=env))
        return runs[-1]

    yield start_run
    for run in runs:
        run.poll()
        run.kill()


@pytest.fixture
def start(parent, tmp_path, cache_dir):
    with starting(parent, cache_dir, tmp_path) as start_run:
        yield start_run


# By the fault of rank 1: what its own stacks show.
SILENT = {"stop_at_step": "", "hold_interpreter_at_step": "in hang_in_c"}


@pytest.fixture(scope="module")
def silent(parent, tmp_path_factory, cache_dir):
    """Runs with a rank that falls silent, and their folders. Side by side: they wait for their watchdogs for 8 s."""
    folder = tmp_path_factory.mktemp("silent")
    with starting(parent, cache_dir, folder) as start_run:
        yield {
            fault: (start_run(num_ranks=2, faults={1: [fault, 3]}, folder=folder / fault), folder / fault)
            for fault in SILENT
        }


def stacks(folder, rank):
    path = folder / "run" / "stacks" / f"rank_{rank}.txt"
    return path.read_text() if path.exists() else ""


def store_in_rank_zero():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free.getsockname()[1])}


@pytest.fixture(params=["the launcher has the store", "rank 0 has it"])
def env(request):
    """As torchrun starts ranks, or srun."""
    return {} if request.param == "the launcher has the store" else store_in_rank_zero()


# Serves a store as torchrun does, and lives on without its ranks.
LAUNCHER = """
import os, pathlib, sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
unfinished = pathlib.Path(sys.argv[0] + ".unfinished")
unfinished.write_text(str(store.port))
unfinished.rename(sys.argv[0] + ".port")
time.sleep(600)
"""


@pytest.fixture
def launcher(parent, tmp_path):
    """A process with the ranks' store, and the port."""
    program, output = tmp_path / "launcher.py", tmp_path / "launcher.0"
    program.write_text(LAUNCHER)
    process = parent.start_program([str(program)], [(output, output)], {}, {})
    port, deadline = tmp_path / "launcher.py.port", time.monotonic() + WAIT_S
    while not port.exists():
        assert time.monotonic() < deadline, process.text()
        time.sleep(0.02)
    yield process, port.read_text()
    process.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_with_their_stacks(rank, env, start, tmp_path):
    run = start(num_ranks=2, faults={rank: ["die_at_step", 3]}, times="end_soon", env=env)
    codes = run.wait(WAIT_S)
    # Also where gloo breaks off a collective with an error of its own.
    assert (codes[rank], codes[1 - rank]) == (SIGKILL, EXIT_CODE), run.text()
    text = stacks(tmp_path, 1 - rank)
    assert re.search(rf"watchdog: rank {rank} on \S+ died", text)
    assert "gpt_pretrain/__main__.py" in text


def test_a_rank_that_crashes_leaves_its_own_stack(start, tmp_path):
    run = start(num_ranks=2, faults={1: ["abort_at_step", 3]}, times="end_soon")
    assert run.wait(WAIT_S) == [EXIT_CODE, -signal.SIGABRT], run.text()
    text = stacks(tmp_path, 1)
    assert "Fatal Python error: Aborted" in text
    assert "in abort" in text


def test_an_error_is_told_with_the_death_of_another_rank(start, tmp_path):
    dying = str(tmp_path / "dying")
    faults = {0: ["fail_at_step", 3, dying], 1: ["die_at_step", 3, dying]}
    run = start(num_ranks=2, faults=faults, times="end_soon")
    assert run.wait(WAIT_S) == [EXIT_CODE, SIGKILL]
    for text in (stacks(tmp_path, 0), run.text()):
        assert "RuntimeError: a fault of the test" in text
        assert re.search(r"watchdog: rank 1 on \S+ died", text)


def test_a_rank_that_hangs_in_python_ends_all_and_the_stacks_name_the_function(start, tmp_path):
    # Side by side: a run waits for its watchdog most of the time.
    folders = [tmp_path / str(rank) for rank in (0, 1)]
    first_step_s = 5
    runs = [
        start(num_ranks=2, faults={rank: ["sleep_at_step", LEARNT, first_step_s]}, folder=folder)
        for rank, folder in enumerate(folders)
    ]
    for rank, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        assert run.wait(WAIT_S) == [EXIT_CODE, EXIT_CODE], run.text()
        assert "in hang_in_python" in stacks(folder, rank)
        assert "in hang_in_python" not in stacks(folder, 1 - rank)
        for each in (0, 1):
            # Five seconds, or ten times the longest step after the first where that is more.
            told = rf"has made no progress for (\d+) s in step {LEARNT} \(trainer\.hang_timeout=1800\)"
            limit_s = int(re.search(told, stacks(folder, each))[1])
            assert limit_s < STEP_FACTOR * first_step_s
            assert "gpt_pretrain/training/trainer.py" in stacks(folder, each)
            assert f"rank_{each}.txt" not in run.text(), "the terminal names the folder, not each file"
        assert run.text().count("in hang_in_python") == 1


@pytest.mark.parametrize(("fault", "own"), SILENT.items())
def test_a_rank_that_falls_silent_ends_the_others(fault, own, silent):
    run, folder = silent[fault]
    deadline = time.monotonic() + WAIT_S
    while 0 not in run.codes:
        assert time.monotonic() < deadline, run.text()
        assert not run.poll(), "the silent rank cannot end itself"
        time.sleep(0.05)
    assert run.codes[0] == EXIT_CODE
    assert re.search(r"watchdog: rank 1 on \S+ has given no sign of life for 8 s", stacks(folder, 0))
    assert own in stacks(folder, 1)


def test_a_rank_that_fails_alone_is_named_by_the_others(start, tmp_path):
    run = start(num_ranks=2, faults={1: ["fail_at_step", 3]}, times="end_soon")
    codes = run.wait(WAIT_S)
    assert codes[1] == 1
    assert "RuntimeError: a fault of the test" in stacks(tmp_path, 1)
    assert "watchdog: rank 0" not in stacks(tmp_path, 1)
    # Gloo's own error, whatever it says, or the watchdog: which of them is first is open.
    assert codes[0] in (EXIT_CODE, 1), run.text()
    for text in (stacks(tmp_path, 0), run.text()):
        assert re.search(r"watchdog: rank 1 on \S+ ended with RuntimeError: a fault of the test", text)


def test_a_single_process_that_hangs_ends(start, tmp_path):
    for_torchrun = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(for_torchrun)}
    run = start("trainer.hang_timeout=3", faults={0: ["sleep_at_step", 3]}, env=env)
    assert run.wait(WAIT_S) == [EXIT_CODE], run.text()
    for text in (stacks(tmp_path, 0), for_torchrun.read_text()):
        assert "has made no progress for 3 s in step 3 (trainer.hang_timeout=3)" in text
    assert "in hang_in_python" in stacks(tmp_path, 0)


def test_a_healthy_run_is_left_alone_also_when_it_or_its_launcher_was_suspended(start, launcher, tmp_path):
    """Ctrl-Z stops torchrun, and not the ranks, which have sessions of their own."""
    alone = start(faults={0: ["pause_at_step", LEARNT, 10]}, max_steps=LEARNT + 5, folder=tmp_path / "alone")
    process, port = launcher
    launched = start(num_ranks=2, env={"MASTER_PORT": port})
    deadline = time.monotonic() + WAIT_S
    wait_for_step(tmp_path, 3, deadline)
    process.signal(0, signal.SIGSTOP)
    # Longer than a rank may be silent.
    time.sleep(10)
    assert not launched.poll(), launched.text()
    process.signal(0, signal.SIGCONT)
    launched.signal(0, signal.SIGTERM)
    assert launched.wait(WAIT_S) == [75, 75], launched.text()
    assert not (tmp_path / "run" / "stacks").exists()
    assert alone.wait(WAIT_S) == [0], alone.text()
    assert load_metrics(tmp_path / "alone" / "run").summary.end_reason == "max_steps"
    assert not stacks(tmp_path / "alone", 0)


def wait_for_step(folder, step, deadline):
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_healthy_run_of_two_ranks_leaves_no_stacks(env, start, tmp_path):
    run = start(
        "trainer.val_check_interval=5",
        "trainer.limit_val_batches=2",
        num_ranks=2,
        max_steps=12,
        times="end_soon",
        env=env,
    )
    assert run.wait(WAIT_S) == [0, 0], run.text()
    assert not (tmp_path / "run" / "stacks").exists()


def test_a_directory_of_stacks_may_be_removed_meanwhile(tmp_path):
    with Watchdog(1800.0, learning_steps=20, launch=ALONE, run_dir=tmp_path):
        shutil.rmtree(tmp_path / "stacks")


def test_without_a_timeout_nothing_is_watched(start, tmp_path):
    run = start("trainer.hang_timeout=null", max_steps=3)
    assert run.wait(WAIT_S) == [0], run.text()
    assert not (tmp_path / "run" / "stacks").exists()


def test_steps_that_grow_have_the_whole_timeout_until_some_have_shown_how_long(tmp_path):
    watchdog = Watchdog(1800.0, learning_steps=2, launch=ALONE, run_dir=tmp_path)

    def limits(*steps):
        for step in steps:
            watchdog.step_begins(step)
            yield watchdog._limit_s(watchdog._mark)

    assert [*limits(1, 2, 3)] == [1800, 1800, 40]
    watchdog.step_begins(4)
    watchdog.steps_grow()
    assert [watchdog._limit_s(watchdog._mark), *limits(5, 6)] == [1800, 1800, 40]
