"""No file runs code, whoever wrote it and its checksums: pickles in every place of a run, through every command."""

import dataclasses
import io
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.safe_globals import safe_numpy_load
from torch.distributed.checkpoint import FileSystemReader, load

from gpt_pretrain.checkpoint.manifest import check_files, hash_files, read_manifest, write_manifest
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.megatron.pickles import harmless_state, restricted
from tests.forked_runs import fork_ranks
from tests.hostile_pickles import hostile_pickles
from tests.runs import run_small, small_run_arguments

SHAPES = tuple(hostile_pickles(Path("canary")))
STEP = "step_00000002"
RANDOM_STATES = "random_states/shard_0_1"
RUN = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "checkpoint.save_at_end=true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir):
    """A run with a checkpoint and a tokenizer."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run_small(1, run_dir, cache_dir, RUN)
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(run_dir):
    return run_dir / "checkpoints" / STEP


def as_if_written_so(checkpoint):
    """Gives a checkpoint the checksums of what it holds now, as its writer could."""
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, dataclasses.replace(manifest, files=hash_files(checkpoint, manifest.files)))


def plant_index(checkpoint, planted):
    (checkpoint / ".metadata").write_bytes(planted)
    as_if_written_so(checkpoint)


def plant_object(checkpoint, planted, name=RANDOM_STATES):
    """Puts other bytes in the place of an object."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    (entry,) = [key for key in index.storage_data if key.fqn == name]
    info = index.storage_data[entry]
    file = checkpoint / info.relative_path
    index.storage_data[entry] = dataclasses.replace(info, offset=file.stat().st_size, length=len(planted))
    with file.open("ab") as stream:
        stream.write(planted)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    as_if_written_so(checkpoint)


# In a process of its own: megatron-core replaces what torch's tensors are unpickled with.
LOADED_FREELY = """
import pathlib, pickle, sys
for file in pathlib.Path(sys.argv[1]).glob("*.pickle"):
    try:
        pickle.loads(file.read_bytes())
    except Exception:
        pass  # What comes after the call does not matter.
"""


def test_each_pickle_runs_code_where_it_is_loaded_freely(tmp_path):
    for shape in SHAPES:
        (tmp_path / f"{shape}.pickle").write_bytes(hostile_pickles(tmp_path / shape.replace(" ", "_"))[shape])
    subprocess.run([sys.executable, "-c", LOADED_FREELY, tmp_path], check=True, timeout=120)
    assert [shape for shape in SHAPES if not (tmp_path / shape.replace(" ", "_")).exists()] == []


@pytest.mark.parametrize("shape", SHAPES)
def test_none_runs_in_an_index_an_object_a_layers_state_or_a_cached_index(shape, checkpoint, tmp_path):
    canary = tmp_path / "canary"
    planted = hostile_pickles(canary)[shape]
    plant_object(checkpoint, planted)
    with pytest.raises(UserError, match=r"random_states.* cannot be read"), restricted(checkpoint):
        load({RANDOM_STATES: io.BytesIO()}, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    plant_index(checkpoint, planted)
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        CheckpointTensors(checkpoint)
    with pytest.raises(UserError, match=r"qkv\._extra_state in the checkpoint cannot be read"):
        harmless_state("qkv._extra_state", torch.frombuffer(bytearray(planted), dtype=torch.uint8))
    (tmp_path / "index.npy").write_bytes(planted)
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        safe_numpy_load(tmp_path / "index.npy", allow_pickle=True, mmap_mode="r")
    assert not canary.exists()


def test_a_layers_state_arrives_as_it_was(checkpoint):
    state = {"scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(4, 3), "extra_fp8_variables": {"num_gemms": 1}}
    arrived = harmless_state("state", torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8))
    loaded = pickle.loads(arrived.numpy().tobytes())
    assert loaded.keys() == state.keys()
    assert loaded["amax_history_fwd"].equal(state["amax_history_fwd"])


COMMANDS = {
    "resume": lambda run_dir, arguments: [*arguments, "trainer.max_steps=4"],
    "init_from": lambda run_dir, arguments: [
        *(each for each in arguments if not each.startswith("run_dir=")),
        f"run_dir={run_dir.parent / 'other'}",
        f"checkpoint.init_from={run_dir / 'checkpoints' / STEP}",
    ],
    "export": lambda run_dir, arguments: [
        *("-m", "gpt_pretrain.export"),
        f"checkpoint={run_dir / 'checkpoints' / STEP}",
        f"out={run_dir.parent / 'exported'}",
    ],
    "generate": lambda run_dir, arguments: [
        *("-m", "gpt_pretrain.generate"),
        f"checkpoint={run_dir / 'checkpoints' / STEP}",
        *("prompt='def '", "max_new_tokens=2"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["index", "object"])
def test_every_command_refuses_the_checkpoint(place, command, run_dir, cache_dir, tmp_path):
    canary, checkpoint = tmp_path / "canary", run_dir / "checkpoints" / STEP
    planted = hostile_pickles(canary)["reduce"]
    if place == "index":
        plant_index(checkpoint, planted)
    else:
        # Which every command reads.
        plant_object(checkpoint, planted, "common_state/shard_0_1")
    done = fork_ranks(1, COMMANDS[command](run_dir, small_run_arguments(run_dir, cache_dir, RUN)))
    assert not canary.exists()
    # Exporting reads tensors alone.
    expected = 0 if (place, command) == ("object", "export") else 2
    assert done.returncode == expected, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    if expected:
        assert [line for line in done.stderr.splitlines() if line.startswith("error: ") and "cannot be read" in line]


def test_a_file_that_the_manifest_does_not_know_is_not_read(run_dir, checkpoint, cache_dir):
    torch.save({"optimizer": {"step": 7}}, checkpoint / "common.pt")
    (checkpoint / "notes.txt").write_text("mine")
    (problem,) = check_files(checkpoint, read_manifest(checkpoint))
    assert str(checkpoint / "common.pt") in problem
    for command in ("resume", "init_from", "export", "generate"):
        done = fork_ranks(1, COMMANDS[command](run_dir, small_run_arguments(run_dir, cache_dir, RUN)))
        assert done.returncode == 2, done.stderr[-3000:]
        assert str(checkpoint / "common.pt") in done.stderr


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "a/b", "."])
def test_names_do_not_leave_the_directory(name, checkpoint):
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, dataclasses.replace(manifest, files={name: manifest.files[".metadata"]}))
    with pytest.raises(UserError, match="garbled"):
        read_manifest(checkpoint)
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    index.storage_data = {
        key: dataclasses.replace(info, relative_path=name) for key, info in index.storage_data.items()
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="outside"):
        CheckpointTensors(checkpoint)


def test_a_deep_manifest_and_a_pipe_are_told(checkpoint):
    (checkpoint / "metadata.json").unlink()
    subprocess.run(["mkfifo", checkpoint / "metadata.json"], check=True)
    (problem,) = check_files(checkpoint, read_manifest(checkpoint))
    assert "metadata.json is no regular file" in problem
    (checkpoint / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="garbled"):
        read_manifest(checkpoint)


def test_a_cached_index_of_samples_runs_nothing(cache_dir, tmp_path):
    canary, own_cache = tmp_path / "canary", f"model.data.cache_dir={tmp_path / 'cache'}"
    run_small(1, tmp_path / "first", cache_dir, [*RUN, own_cache])
    indices = sorted((tmp_path / "cache").rglob("*.npy"))
    assert indices
    for index in indices:
        index.write_bytes(hostile_pickles(canary)["reduce"])
    done = fork_ranks(1, [*small_run_arguments(tmp_path / "second", cache_dir, RUN), own_cache])
    assert not canary.exists()
    assert done.returncode == 2, done.stderr[-3000:]
    assert str(indices[0].parent) in done.stderr
