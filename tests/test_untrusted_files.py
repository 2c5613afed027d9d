"""No file runs code, whoever wrote it and its checksums: pickles in every place of a run, through every command."""

import dataclasses
import io
import json
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from gpt_pretrain.checkpoint.manifest import MANIFEST, check_files, hash_files, read_manifest, write_manifest
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.megatron.pickles import harmless_state, restricted, unreadable_told
from tests.forked_runs import fork_ranks
from tests.hostile_pickles import as_if_written_so, hostile_pickles, plant_index, plant_object
from tests.runs import SAVED, run_small, small_run_arguments
from tests.saved_models import PUBLISHED_LLAMA

SHAPES = tuple(hostile_pickles(Path("canary")))
STEP = "step_00000002"
RANDOM_STATES = "random_states/shard_0_1"
IN_FP8 = ("fp8=delayed", "model.fp8_emulate=true", "model.num_layers=1", "model.global_batch_size=4")


@pytest.fixture
def checkpoint(run_dir):
    return run_dir / "checkpoints" / STEP


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
def test_none_runs_in_an_index_an_object_or_a_layers_state(shape, checkpoint, tmp_path):
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
    assert not canary.exists()


def test_a_directory_named_after_gloo_is_a_directory(tmp_path):
    checkpoint = tmp_path / "gloo" / "step_1"
    with pytest.raises(UserError, match="cannot be read"), unreadable_told(checkpoint):
        raise RuntimeError(f"{checkpoint} is garbled")
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match="by peer"), unreadable_told(checkpoint):
        raise lost


def test_a_number_in_a_pickle_takes_no_memory(checkpoint):
    """A place in the memo: the unpickler in C makes room for all that lie before it."""
    planted = b"\x80\x03N" + b"r" + (2**32 - 1).to_bytes(4, "little") + b"."
    plant_index(checkpoint, planted)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        CheckpointTensors(checkpoint)
    harmless_state("state", torch.frombuffer(bytearray(planted), dtype=torch.uint8))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_layers_state_arrives_as_it_was(checkpoint):
    state = {"scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(4, 3), "extra_fp8_variables": {"num_gemms": 1}}
    arrived = harmless_state("state", torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8))
    loaded = pickle.loads(arrived.numpy().tobytes())
    assert loaded.keys() == state.keys()
    assert loaded["amax_history_fwd"].equal(state["amax_history_fwd"])


def _resume(run_dir, arguments):
    return [*arguments, "trainer.max_steps=4"]


def _init_from(run_dir, arguments):
    others = [each for each in arguments if not each.startswith("run_dir=")]
    return [*others, f"run_dir={run_dir.parent / 'other'}", f"checkpoint.init_from={run_dir / 'checkpoints' / STEP}"]


def _export(run_dir, arguments):
    return [*_module("export"), f"checkpoint={run_dir / 'checkpoints' / STEP}", f"out={run_dir.parent / 'exported'}"]


def _generate(run_dir, arguments):
    return [*_module("generate"), f"checkpoint={run_dir / 'checkpoints' / STEP}", "prompt='def '", "max_new_tokens=2"]


def _import(run_dir, arguments):
    return [*_module("import_hf"), f"path={run_dir}", f"out={run_dir.parent / 'imported'}"]


def _module(name):
    return ["-m", f"gpt_pretrain.{name}"]


COMMANDS = {
    "resume": _resume,
    "init_from": _init_from,
    "export": _export,
    "generate": _generate,
    "list": lambda run_dir, _: [*_module("checkpoint"), "list", str(run_dir)],
    "verify": lambda run_dir, _: [*_module("checkpoint"), "verify", str(run_dir)],
    "plan": lambda run_dir, arguments: [*_module("plan"), *arguments[2:]],
    "prepare_data": lambda run_dir, arguments: [*_module("prepare_data"), *arguments[2:]],
    "compare": lambda run_dir, _: [
        *_module("compare"),
        f"runs=[{run_dir},{run_dir}]",
        f"run_dir={run_dir.parent / 'compared'}",
    ],
    "compare files": lambda run_dir, _: [
        *_module("compare"),
        f"runs=[{run_dir / 'compare.json'}]",
        f"run_dir={run_dir.parent / 'compared'}",
    ],
    "import_hf": _import,
}
OF_CHECKPOINTS = ("resume", "init_from", "export", "generate", "list", "verify", "plan", "compare")


def in_place(*names):
    """Plants the bytes in the first of the files that is there, or makes it, as one of the checkpoint's own."""

    def plant(run_dir, planted):
        found = [path for name in names for path in sorted(run_dir.glob(name))]
        (found[0] if found else run_dir / names[0]).write_bytes(planted)
        if (run_dir / "checkpoints" / STEP / MANIFEST).read_bytes() != planted:
            as_if_written_so(run_dir / "checkpoints" / STEP)

    return plant


def known_to_the_manifest(run_dir, planted):
    checkpoint = run_dir / "checkpoints" / STEP
    (checkpoint / "common.pt").write_bytes(planted)
    manifest = read_manifest(checkpoint)
    write_manifest(
        checkpoint, dataclasses.replace(manifest, files=hash_files(checkpoint, [*manifest.files, "common.pt"]))
    )


def as_scales(run_dir, planted):
    """As Transformer Engine keeps the scales of a layer: a pickle as the bytes of a tensor."""
    saved = io.BytesIO()
    torch.save(torch.frombuffer(bytearray(planted), dtype=torch.uint8), saved)
    index = pickle.loads((run_dir / "checkpoints" / STEP / ".metadata").read_bytes())
    name = next(key.fqn for key in index.storage_data if "_extra_state" in key.fqn)
    plant_object(run_dir / "checkpoints" / STEP, saved.getvalue(), name)


# A kind of file → who puts other bytes into it, and the commands that may read it.
FILES = {
    ".metadata": (lambda run_dir, planted: plant_index(run_dir / "checkpoints" / STEP, planted), OF_CHECKPOINTS),
    "random states": (lambda run_dir, planted: plant_object(run_dir / "checkpoints" / STEP, planted), OF_CHECKPOINTS),
    "what is no tensor": (
        lambda run_dir, planted: plant_object(run_dir / "checkpoints" / STEP, planted, "common_state/shard_0_1"),
        OF_CHECKPOINTS,
    ),
    "scales": (as_scales, OF_CHECKPOINTS),
    "a tensor": (in_place(f"checkpoints/{STEP}/*.distcp"), OF_CHECKPOINTS),
    "common.pt": (in_place(f"checkpoints/{STEP}/common.pt"), OF_CHECKPOINTS),
    "common.pt of the manifest": (known_to_the_manifest, OF_CHECKPOINTS),
    "metadata.json": (in_place(f"checkpoints/{STEP}/metadata.json"), OF_CHECKPOINTS),
    "manifest.json": (in_place(f"checkpoints/{STEP}/{MANIFEST}"), OF_CHECKPOINTS),
    "latest": (in_place("checkpoints/latest"), ("resume", "list", "verify", "plan")),
    "tokenizer.json": (in_place("tokenizer.json"), ("generate", "export", "resume")),
    "config.yaml": (in_place("config.yaml"), ("resume", "compare", "plan")),
    "metrics.jsonl": (in_place("metrics.jsonl"), ("resume", "compare")),
    "TensorBoard's": (
        lambda run_dir, planted: in_place("compare.json")(run_dir, bytes(9) + b"brain.Event:2" + planted),
        ("compare files",),
    ),
    "lock": (in_place("lock"), ("resume", "plan")),
    "a tokenizer in the cache": (in_place("cache/corpora/*/tokenizer.json"), ("resume", "prepare_data")),
    "tokens in the cache": (in_place("cache/corpora/*/corpus.bin"), ("resume", "prepare_data")),
    "their index": (in_place("cache/corpora/*/corpus.idx"), ("resume", "prepare_data")),
    "a scan": (in_place("cache/scans/*.json"), ("resume", "prepare_data")),
    "samples": (in_place("cache/index/*/*sample_index.npy"), ("resume", "prepare_data")),
    "documents": (in_place("cache/index/*/*document_index.npy"), ("resume", "prepare_data")),
    "config.json": (in_place("config.json"), ("import_hf",)),
    "safetensors": (in_place("model.safetensors"), ("import_hf",)),
    "safetensors' index": (in_place("model.safetensors.index.json"), ("import_hf",)),
    "pytorch_model.bin": (in_place("pytorch_model.bin"), ("import_hf",)),
    "a comparison or a benchmark": (in_place("compare.json"), ("compare files",)),
}


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory, cache_dir):
    """A run with scales in its checkpoint, its cache inside, and a Hugging Face model's configuration beside it."""
    run_dir = tmp_path_factory.mktemp("in_fp8") / "run"
    run_small(1, run_dir, cache_dir, [*SAVED, *IN_FP8, f"model.data.cache_dir={run_dir / 'cache'}"])
    (run_dir / "config.json").write_text(json.dumps(PUBLISHED_LLAMA))
    return run_dir


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("all_shapes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FILES)
def test_no_file_of_any_kind_runs_code_by_any_command(kind, all_shapes, in_fp8, cache_dir, tmp_path):
    plant, commands = FILES[kind]
    canary, saved = tmp_path / "canary", tmp_path / "saved"
    in_fp8.rename(saved)
    first = list(FILES).index(kind)
    try:
        for number, command in enumerate(commands):
            for shape in SHAPES if all_shapes else [SHAPES[(first + number) % len(SHAPES)]]:
                # In its place: the cache knows its files by their paths and times.
                shutil.copytree(saved, in_fp8)
                plant(in_fp8, hostile_pickles(canary)[shape])
                own = [*SAVED, *IN_FP8, f"model.data.cache_dir={in_fp8 / 'cache'}"]
                done = fork_ranks(1, COMMANDS[command](in_fp8, small_run_arguments(in_fp8, cache_dir, own)))
                assert not canary.exists(), (command, shape)
                assert done.returncode in (0, 2), (command, shape, done.stderr[-3000:])
                assert "Traceback" not in done.stderr, (command, shape, done.stderr[-3000:])
                for path in in_fp8.parent.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(in_fp8, ignore_errors=True)
        saved.rename(in_fp8)


@pytest.mark.parametrize("command", ["resume", "init_from", "export", "generate"])
@pytest.mark.parametrize("place", ["index", "object"])
def test_every_command_refuses_the_checkpoint(place, command, run_dir, cache_dir, tmp_path):
    canary, checkpoint = tmp_path / "canary", run_dir / "checkpoints" / STEP
    planted = hostile_pickles(canary)["reduce"]
    if place == "index":
        plant_index(checkpoint, planted)
    else:
        # Which every command reads.
        plant_object(checkpoint, planted, "common_state/shard_0_1")
    done = fork_ranks(1, COMMANDS[command](run_dir, small_run_arguments(run_dir, cache_dir, SAVED)))
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
        done = fork_ranks(1, COMMANDS[command](run_dir, small_run_arguments(run_dir, cache_dir, SAVED)))
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
    assert "metadata.json is not a regular file" in problem
    (checkpoint / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="garbled"):
        read_manifest(checkpoint)


def test_a_cached_index_of_samples_runs_nothing(cache_dir, tmp_path):
    canary, own_cache = tmp_path / "canary", f"model.data.cache_dir={tmp_path / 'cache'}"
    run_small(1, tmp_path / "first", cache_dir, [*SAVED, own_cache])
    indices = sorted((tmp_path / "cache").rglob("*.npy"))
    assert indices
    for index in indices:
        index.write_bytes(hostile_pickles(canary)["reduce"])
    done = fork_ranks(1, [*small_run_arguments(tmp_path / "second", cache_dir, SAVED), own_cache])
    assert not canary.exists()
    assert done.returncode == 2, done.stderr[-3000:]
    assert str(indices[0].parent) in done.stderr
