"""Saving: what is in a checkpoint, that training goes on meanwhile, and what happens where the disk does not take it.

`tests/programs/saving.py` has the cases that need several ranks.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent import futures

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from gpt_pretrain.checkpoint import save, writing
from gpt_pretrain.checkpoint.directory import complete_checkpoints, latest_checkpoint, step_of
from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress, check_files, read_manifest
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.checkpoint.writing import Item, Share
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.plan.forecast import forecast_checkpoint
from tests.checkpoint_files import disk_that, file_size_limit
from tests.emulated_training import build_training, emulate, emulated_training, save_checkpoint
from tests.forked_runs import fork_ranks
from tests.optimizer_states import LEAN, SMALLEST

DATA = {"tokenizer": "t", "tokens": "x"}


@pytest.fixture(scope="module")
def training():
    with emulated_training(*emulate("delayed"), "trainer.precision=bf16") as built:
        built.step()
        yield built


@pytest.fixture
def saver(training, tmp_path):
    with CheckpointSaver(tmp_path / "checkpoints", training.trainable, training.config, DATA) as built:
        yield built


def at(step):
    return TrainingProgress(step=step, consumed_samples=4 * step)


def weights(training):
    return {
        name: tensor.detach().clone()
        for chunk in training.chunks
        for name, tensor in chunk.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


@pytest.fixture
def slow_writer():
    """Writers wait until the event is set."""
    may_write = threading.Event()
    with disk_that(lambda path: may_write.wait(60)):
        yield may_write
        may_write.set()


def test_a_checkpoint_describes_itself_and_every_file_of_it(training, tmp_path):
    began = time.time()
    path = save_checkpoint(tmp_path / "checkpoints", training.trainable, at(7), training.config, DATA)
    assert path == tmp_path / "checkpoints" / "step_00000007"
    manifest = read_manifest(path)
    assert {file.name for file in path.iterdir()} == {"manifest.json", *manifest.files}
    assert {"metadata.json", ".metadata", "__0_0.distcp"} == set(manifest.files)
    assert check_files(path, manifest) == []
    assert (manifest.step, manifest.consumed_samples) == (7, 28)
    assert began <= manifest.time_unix <= time.time()
    assert manifest.config == config_to_dict(training.config)
    assert manifest.data == DATA
    assert {"torch", "megatron-core", "gpt_pretrain"} <= set(manifest.versions)
    assert manifest.architecture["model.num_layers"] == "2"
    assert manifest.layout["processes"] == "1"
    assert manifest.fp8["model.fp8_recipe"] == "delayed"
    assert [file.name for file in (tmp_path / "checkpoints").iterdir() if file.name.startswith(".")] == []


def test_training_goes_on_while_a_checkpoint_of_the_earlier_step_is_written(training, saver, slow_writer):
    saved = weights(training)
    assert saver.save(at(1)) == []
    training.step()
    assert saver.poll() == []
    assert latest_checkpoint(saver.directory) is None, "it is not complete"
    slow_writer.set()
    (outcome,) = saver.wait()
    assert outcome.problem is None
    assert outcome.num_bytes == read_manifest(outcome.path).num_bytes
    assert 0 < outcome.stall_s < outcome.time_s
    assert latest_checkpoint(saver.directory) == outcome.path
    now = weights(training)
    assert any(not torch.equal(now[name], tensor) for name, tensor in saved.items()), "the step trained nothing"
    loaded = build_training(*emulate("delayed"), "trainer.precision=bf16")
    load_checkpoint(verify_checkpoint(outcome.path), loaded.trainable, loaded.config, DATA)
    for name, tensor in weights(loaded).items():
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_writers_leave_the_processors_to_the_training_loop(training, tmp_path):
    seen = []

    class Asking(io.BytesIO):
        def getbuffer(self):
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().getbuffer()

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    item = Item(WriteItem(index=MetadataIndex("x"), type=WriteItemType.BYTE_IO), Asking(b"x"))
    assert not isinstance(writing._write_own_files(tmp_path, Share([item], None)), str), "it is no problem"
    assert seen[-1] == min(before + 10, 19), "the writer's"
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before, "this thread's is as it was"


def test_no_checksum_is_computed_that_nothing_reads(training, tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", training.trainable, at(1), training.config, DATA)
    # Each tensor is a zip archive of torch's; Python finds the file's last one.
    with zipfile.ZipFile(path / "__0_0.distcp") as archive:
        assert {entry.CRC for entry in archive.infolist()} == {0}
    kept = io.BytesIO()
    torch.save(torch.ones(3), kept)
    with zipfile.ZipFile(kept) as archive:
        assert archive.testzip() is None, "what others save has it"
    loaded = build_training(*emulate("delayed"), "trainer.precision=bf16")
    load_checkpoint(verify_checkpoint(path), loaded.trainable, loaded.config, DATA)


def test_poll_tells_of_the_save_once_it_is_complete(training, saver, slow_writer):
    saver.reserve()
    saver.save(at(1))
    assert [saver.poll() for _ in range(3)] == [[], [], []]
    slow_writer.set()
    deadline = time.monotonic() + 60
    while not (outcomes := saver.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [(outcome.step, outcome.problem) for outcome in outcomes] == [(1, None)]
    assert saver.poll() == []
    assert saver.wait() == []


def test_waiting_for_the_save_before_is_part_of_what_training_stood_still_for(training, saver, slow_writer):
    saver.save(at(1))
    threading.Timer(0.2, slow_writer.set).start()
    (first,) = saver.wait()
    assert first.step == 1
    assert latest_checkpoint(saver.directory) == first.path
    (second,) = [*saver.save(at(2)), *saver.wait()]
    assert second.step == 2
    assert second.stall_s >= 0.1


def test_the_end_of_a_run_that_fails_waits_for_the_writer(training, tmp_path, slow_writer):
    def fail():
        with CheckpointSaver(tmp_path, training.trainable, training.config, DATA) as saver:
            saver.save(at(1))
            threading.Timer(0.2, slow_writer.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert check_files(tmp_path / "step_00000001", read_manifest(tmp_path / "step_00000001")) == []


def test_without_async_save_the_checkpoint_is_there_when_the_call_returns(training, tmp_path):
    config = build_training(*emulate("delayed"), "checkpoint.async_save=false").config
    with CheckpointSaver(tmp_path, training.trainable, config, DATA) as saver:
        (outcome,) = saver.save(at(1))
        assert latest_checkpoint(tmp_path) == outcome.path
        assert outcome.stall_s >= outcome.time_s
        assert saver.poll() == saver.wait() == []


def test_a_writer_that_dies_is_told_at_the_next_step(training, saver):
    def die(path):
        raise RuntimeError("torch said no")

    (good,) = [*saver.save(at(1)), *saver.wait()]
    with disk_that(die):
        saver.save(at(2))
        futures.wait([saver._running.written])
    (outcome,) = saver.poll()
    assert outcome.problem == (
        "the checkpoint of step 2 could not be saved: "
        f"{saver.directory}/.step_00000002.unfinished: RuntimeError: torch said no; "
        f"the newest complete one is {good.path}"
    )
    assert sorted(path.name for path in saver.directory.iterdir()) == ["latest", "step_00000001"]
    (again,) = [*saver.save(at(3)), *saver.wait()]
    assert again.problem is None


def saved_steps(directory):
    return [step_of(path) for path in complete_checkpoints(directory)]


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        # By the clock, by the clock, by steps, by the clock, by steps, by steps.
        ((), [[1], [2], [3], [3, 4], [3, 5], [3, 5, 6]]),
        (("checkpoint.keep_last=2",), [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]),
        (("checkpoint.keep_last=2", "checkpoint.save_interval=100"), [[1], [2], [3], [3, 4], [3, 5], [5, 6]]),
        (
            ("checkpoint.keep_last=1", "checkpoint.keep_every=2", "checkpoint.save_interval=100"),
            [[1], [2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 6]],
        ),
    ],
)
def test_a_checkpoint_of_the_clocks_gives_way_to_the_next(training, tmp_path, overrides, kept):
    config = build_training(*emulate("delayed"), *overrides).config
    for step, by_clock in enumerate((True, True, False, True, False, False), start=1):
        # Also where the process that saved it was killed.
        with CheckpointSaver(tmp_path, training.trainable, config, DATA) as saver:
            (outcome,) = [*saver.save(at(step), by_clock=by_clock), *saver.wait()]
            assert outcome.problem is None
            assert saved_steps(tmp_path) == kept[step - 1]
            assert latest_checkpoint(tmp_path) == outcome.path


def test_a_checkpoint_of_the_clocks_stays_where_the_next_one_fails(training, saver):
    saver.save(at(1), by_clock=True)
    saver.wait()
    with file_size_limit(100_000):
        (failed,) = [*saver.save(at(2), by_clock=True), *saver.wait()]
    assert failed.problem is not None
    assert saved_steps(saver.directory) == [1]
    saver.save(at(3))
    saver.wait()
    assert saved_steps(saver.directory) == [3]


@pytest.mark.parametrize(
    "overrides",
    [(), ("trainer.precision=bf16",), ("model.optim.name=sgd",), ("optimizer=muon",), LEAN, (*LEAN, *SMALLEST)],
)
def test_the_plan_knows_the_size_of_a_checkpoint(training, tmp_path, overrides):
    built = build_training(*overrides)
    built.step()
    path = save_checkpoint(tmp_path, built.trainable, at(1), built.config, DATA)
    model = built.trainable.model
    forecast = forecast_checkpoint(model.spec, model.num_parameters)
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    assert sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors) == forecast.num_bytes
    assert forecast.bytes_per_gpu == forecast.num_bytes


def test_a_save_that_does_not_fit_is_refused_before_it_is_written(training, saver, monkeypatch):
    (good,) = [*saver.save(at(1)), *saver.wait()]
    usage = shutil.disk_usage(saver.directory)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage._replace(free=good.num_bytes // 2))
    (outcome,) = saver.save(at(2))
    assert f"{saver.directory} has {good.num_bytes // 2:,} bytes free, and the checkpoint needs " in outcome.problem
    needed = int(outcome.problem.split("needs ")[1].split(";")[0].replace(",", ""))
    assert good.num_bytes * 0.9 < needed < good.num_bytes * 1.5
    assert outcome.problem.endswith(f"; the newest complete one is {good.path}")
    assert latest_checkpoint(saver.directory) == good.path
    assert sorted(path.name for path in saver.directory.iterdir()) == ["latest", "step_00000001"]


def test_what_the_system_says_of_a_file_is_told_with_its_path(training, saver):
    (good,) = [*saver.save(at(1)), *saver.wait()]
    with file_size_limit(100_000):
        (outcome,) = [*saver.save(at(2)), *saver.wait()]
    assert f"{saver.directory}/.step_00000002.unfinished/__0_0.distcp: File too large" in outcome.problem
    assert latest_checkpoint(saver.directory) == good.path
    assert check_files(good.path, read_manifest(good.path)) == []
    assert sorted(path.name for path in saver.directory.iterdir()) == ["latest", "step_00000001"]


@pytest.fixture
def tmpfs(tmp_path):
    """Disks of their own, each of the size that it is given."""
    mounted = []

    def mount(size):
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this process may not mount a disk")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_while_it_is_written_leaves_the_last_checkpoint(training, tmpfs, monkeypatch):
    whole = save_size(training, tmpfs("64m"))
    disk = tmpfs(int(1.5 * whole))
    usage = shutil.disk_usage(disk)
    # Somebody else's files come after the free space was looked at.
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage._replace(free=10 * whole))
    with CheckpointSaver(disk / "checkpoints", training.trainable, training.config, DATA) as saver:
        (good,) = [*saver.save(at(1)), *saver.wait()]
        (outcome,) = [*saver.save(at(2)), *saver.wait()]
        assert f"{disk}/checkpoints/.step_00000002.unfinished/" in outcome.problem
        assert "No space left on device" in outcome.problem
        assert latest_checkpoint(saver.directory) == good.path
        assert check_files(good.path, read_manifest(good.path)) == []
        shutil.rmtree(good.path)
        (again,) = [*saver.save(at(3)), *saver.wait()]
        assert again.problem is None, "the failed save gave its space back"


def save_size(training, directory):
    return read_manifest(save_checkpoint(directory, training.trainable, at(1), training.config, DATA)).num_bytes


def test_a_directory_that_cannot_be_written_is_named(training, tmpfs):
    disk = tmpfs("64m")
    with CheckpointSaver(disk / "checkpoints", training.trainable, training.config, DATA) as saver:
        (good,) = [*saver.save(at(1)), *saver.wait()]
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        (outcome,) = saver.save(at(2))
        unfinished = disk / "checkpoints" / ".step_00000002.unfinished"
        assert f"could not be saved: {unfinished}: Read-only file system; " in outcome.problem
        assert latest_checkpoint(saver.directory) == good.path
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    # A file where the directory belongs.
    (disk / "file").write_text("")
    with pytest.raises(RunError, match="there is none yet"):
        save_checkpoint(disk / "file", training.trainable, at(1), training.config, DATA)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What both ranks of tests/programs/saving.py were told, by case; and where they saved."""
    folder = tmp_path_factory.mktemp("ranks")
    done = fork_ranks(2, ["tests/programs/saving.py", str(folder)])
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder / "checkpoints"


def test_ranks_with_the_same_tensors_share_the_writing(two_ranks):
    told, directory = two_ranks
    assert told[0]["good"]["problem"] is None
    manifest = read_manifest(directory / "step_00000001")
    first, second = (manifest.files[f"__{rank}_0.distcp"].num_bytes for rank in range(2))
    assert first == pytest.approx(second, rel=0.2)
    assert check_files(directory / "step_00000001", manifest) == []
    assert told[0]["good"]["num_bytes"] == manifest.num_bytes


def test_all_ranks_know_at_the_same_step(two_ranks):
    (first, second), _ = two_ranks
    assert first == second
    assert first["slow disk"]["problem"] is None
    assert first["slow disk"]["num_polls"] > 3, "rank 0 was done long before and waited for rank 1"


@pytest.mark.parametrize(
    ("case", "step", "told"),
    [
        ("full disk", 2, ".step_00000002.unfinished/__1_0.distcp: No space left on device; "),
        ("disk of its own", 4, "__1_0.distcp is missing: 1 bytes were written. Do all nodes share this directory?"),
        ("little memory", 5, "rank 1 has no "),
    ],
)
def test_one_rank_that_fails_fails_the_save_on_all(two_ranks, case, step, told):
    (first, second), directory = two_ranks
    assert first[case]["problem"] == second[case]["problem"]
    assert told in first[case]["problem"]
    assert f"the newest complete one is {directory}/step_0000000" in first[case]["problem"]
    assert not (directory / f"step_{step:08d}").exists()


def test_what_failed_leaves_the_good_checkpoints_and_no_rest(two_ranks):
    _, directory = two_ranks
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step_00000001", "step_00000003"]
    assert (directory / "latest").read_text() == "step_00000003\n"
