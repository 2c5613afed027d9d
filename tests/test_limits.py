"""Limits of the system met outside of a save: a cause with its name and a way out, an exit code, and no traceback."""

import errno
import os
import subprocess
import sys

import pytest

from gpt_pretrain.launch.environment import limit_met
from tests.launching import REPOSITORY, clean_environment
from tests.runs import run_small, small_run_arguments

TINY = (
    "model.num_layers=1",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "trainer.limit_val_batches=0",
    "trainer.max_steps=60",
    "checkpoint.save_at_end=false",
)


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory, cache_dir):
    """What a cache takes is met in a test of its own."""
    run_small(1, tmp_path_factory.mktemp("before") / "run", cache_dir, TINY)
    return cache_dir


@pytest.fixture
def run(parent, tmp_path, full_cache):
    def run_limited(*overrides, faults=(), num_ranks=1):
        arguments = small_run_arguments(tmp_path / "run", full_cache, [*TINY, *overrides])[2:]
        faults = {rank: [["end_soon"], *faults] for rank in range(num_ranks)}
        # Of this run alone: what ranks print is appended.
        output = tmp_path / f"output_{len(list(tmp_path.glob('output_*.0')))}"
        return parent.run(arguments, output, num_ranks=num_ranks, faults=faults)

    return run_limited


def told(text, *named):
    """The error that names these."""
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error")]
    for name in named:
        assert str(name) in line, line


def test_a_log_that_the_disk_does_not_take_ends_the_run(run, tmp_path):
    codes, text = run(faults=[["limit", "FSIZE", 1024]])
    assert codes == [2], "it cannot begin"
    told(text, "config.yaml", os.strerror(errno.EFBIG), "ulimit -f is 1")
    codes, text = run(faults=[["limit", "FSIZE", 12 * 1024]])
    assert codes == [1], text
    told(text, "metrics.jsonl", os.strerror(errno.EFBIG), "ulimit -f is 12")
    assert not (tmp_path / "run" / "lock").exists()


def test_a_disk_that_is_full_for_rank_zero_ends_all(run, tmp_path):
    codes, text = run("parallelism=dp", faults=[["limit", "FSIZE", 12 * 1024]], num_ranks=2)
    assert codes[0] == 1, text
    assert codes[1] in (1, 71), text
    assert [line for line in text.splitlines() if line.startswith("error (rank 0): ") and "metrics.jsonl" in line]


def test_the_watchdogs_last_word_may_find_no_place(run, tmp_path):
    (tmp_path / "run" / "stacks").mkdir(parents=True)
    # The traces of earlier starts have used up what a file may have.
    full = ["limit", "FSIZE", 64 * 1024]
    (tmp_path / "run" / "stacks" / "rank_0.txt").write_text("x" * full[2])
    codes, text = run(faults=[full, ["fail_at_step", 3]])
    assert codes == [1]
    assert "RuntimeError: a fault of the test" in text, "what went wrong is told all the same"
    assert os.strerror(errno.EFBIG) not in text
    codes, text = run("trainer.hang_timeout=3", faults=[full, ["hurry"], ["sleep_at_step", 3]])
    assert codes == [71]
    assert "in hang_in_python" in text
    assert (tmp_path / "run" / "stacks" / "rank_0.txt").stat().st_size == full[2]


def test_an_index_of_samples_that_the_disk_does_not_take_is_told(run, cache_dir, tmp_path):
    cache = f"model.data.cache_dir={tmp_path / 'cache'}"
    run_small(1, tmp_path / "first", cache_dir, [*TINY, "trainer.max_steps=1", cache])
    # More samples, which are another index.
    codes, text = run("trainer.max_steps=90", cache, faults=[["limit", "FSIZE", 2000]])
    assert codes == [2], text
    told(text, tmp_path / "cache" / "index", "no space left", "model.data.cache_dir")
    run_small(1, tmp_path / "second", cache_dir, [*TINY, "trainer.max_steps=90", cache])


@pytest.mark.parametrize(
    ("limit", "cause", "way_out"),
    [
        (["NOFILE", 12], errno.EMFILE, "ulimit -n 4096"),
        # Less than it has already.
        (["AS", 1 << 30], errno.ENOMEM, "ulimit -v is 1048576"),
    ],
)
def test_too_few_descriptors_and_too_little_memory_are_told(limit, cause, way_out, run, tmp_path):
    codes, text = run(faults=[["limit", *limit]])
    assert codes == [1], text
    error = text[text.rindex("error: ") :]
    assert os.strerror(cause) in error or "out of memory" in error, text
    assert way_out in error or "out of memory" in error
    if cause == errno.EMFILE:
        # Of megatron-core's reader, which cannot be built, Python ignores an error of its destructor, and says so.
        assert "Traceback" not in text or "Exception ignored in: <function IndexedDataset.__del__" in text


def full_disk():
    return os.open("/dev/full", os.O_WRONLY)


def unread_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("command", "output", "cause"),
    [
        (["gpt_pretrain", "--help"], full_disk, errno.ENOSPC),
        (["gpt_pretrain", "--cfg", "job"], unread_pipe, errno.EPIPE),
        # So little that it is written as the process ends.
        (["gpt_pretrain.export", "--help"], full_disk, errno.ENOSPC),
        (["gpt_pretrain.export", "--help"], unread_pipe, errno.EPIPE),
    ],
)
def test_an_output_that_nothing_takes_is_told(command, output, cause):
    environment = {name: value for name, value in clean_environment(None).items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        env=environment,
        stdout=output(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    told(done.stderr, os.strerror(cause))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "said", "/disk/file"),
        OSError("1024 requested and 512 written"),
        MemoryError(),
        RuntimeError("[enforce fail at device.cc:186] rv != -1. Too many open files"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_limit_is_known_by_its_number_or_its_words_behind_other_errors(error):
    led_to = ValueError("what it led to")
    led_to.__cause__ = error
    assert limit_met(led_to)


@pytest.mark.parametrize(
    "error", [OSError(errno.ECONNRESET, "reset"), BlockingIOError(errno.EAGAIN, "later"), KeyError(3)]
)
def test_another_error_is_no_limit(error):
    assert limit_met(error) is None
