"""Files that are what was written, by their checksums, and hold what no run has written: one line, exit code 2."""

import dataclasses
import io
import os
import pickle
import shutil

import numpy
import pytest
import torch

from gpt_pretrain.checkpoint.__main__ import main as checkpoint_command
from gpt_pretrain.checkpoint.manifest import MANIFEST
from tests.checkpoint_files import publish, rewrite_manifest
from tests.forked_runs import fork_ranks
from tests.hostile_pickles import as_if_written_so, plant_index, plant_object
from tests.runs import SAVED, run_small, small_run_arguments

STEP = "checkpoints/step_00000002"


def refused(arguments, named):
    """Ends with one error that names the file."""
    done = fork_ranks(1, arguments, timeout_s=60)
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(named) in line
    assert len(line) < 1000
    assert "Traceback" not in done.stderr


def in_index(change):
    def plant(checkpoint):
        index = pickle.loads((checkpoint / ".metadata").read_bytes())
        change(index)
        plant_index(checkpoint, pickle.dumps(index))

    return plant


def of_embedding(**changes):
    def change(index):
        name = "embedding.word_embeddings.weight"
        index.state_dict_metadata[name] = dataclasses.replace(index.state_dict_metadata[name], **changes)

    return in_index(change)


def of_storage(**changes):
    def change(index):
        index.storage_data = {key: dataclasses.replace(info, **changes) for key, info in index.storage_data.items()}

    return in_index(change)


def of_object(name, value):
    def plant(checkpoint):
        saved = io.BytesIO()
        torch.save(value, saved)
        plant_object(checkpoint, saved.getvalue(), f"{name}/shard_0_1")

    return plant


def in_file(name, content):
    def plant(checkpoint):
        (checkpoint / name).write_text(content)
        as_if_written_so(checkpoint)

    return plant


INDICES = {
    "no tensors": in_index(lambda index: setattr(index, "state_dict_metadata", None)),
    "a number for a tensor": in_index(lambda index: index.state_dict_metadata.update(mine=3)),
    # Which would leave the model's own random weights in their place.
    "a tensor without pieces": of_embedding(chunks=[]),
    "a tensor that no memory holds": of_embedding(size=torch.Size([2**40, 2**10])),
    "an offset beyond the file": of_storage(offset=10**15),
    "an offset before it": of_storage(offset=-5),
    "an offset in words": of_storage(offset="x"),
    "no places": in_index(lambda index: setattr(index, "storage_data", [1])),
}
OBJECTS = {
    "random states": of_object("random_states", {"python": 3, "numpy": None}),
    "a list for what is no tensor": of_object("common_state", [1, 2]),
    "nothing for what is no tensor": of_object("common_state", None),
    "deep JSON": in_file("metadata.json", "[" * 100_000),
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_of_other_contents_is_told_by_every_command(kind, run_dir, cache_dir):
    checkpoint = run_dir / STEP
    INDICES[kind](checkpoint)
    resume = [*small_run_arguments(run_dir, cache_dir, SAVED), "trainer.max_steps=4"]
    export = ["-m", "gpt_pretrain.export", f"checkpoint={checkpoint}", f"out={run_dir}/exported"]
    generate = ["-m", "gpt_pretrain.generate", f"checkpoint={checkpoint}", "prompt=x", "max_new_tokens=2"]
    for arguments in (resume, export, generate):
        refused(arguments, checkpoint / ".metadata")


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_of_other_contents_is_told(kind, run_dir, cache_dir):
    OBJECTS[kind](run_dir / STEP)
    refused([*small_run_arguments(run_dir, cache_dir, SAVED), "trainer.max_steps=4"], run_dir / STEP)


NO_RUN = {
    "layout": [{"processes": 1}],
    "config": [{}, {"model": None}, {"model": {"fp8": True}}],
    "time_unix": [1e300, -1, "now"],
    "step": [-1, 2**70, True],
    "given_up": [[[1]], [["a", "b"]], 3],
    "gives_way": [1, "no", None],
    "passed_over": [[[1, 2, 3]], [[1.5, 2]]],
    "losses": [["a"], [None]],
    "versions": [{"torch": 3}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in NO_RUN.items() for value in values])
def test_a_manifest_of_no_run_is_told_in_the_list(field, value, tmp_path, capsys):
    publish(tmp_path, 10)
    rewrite_manifest(publish(tmp_path, 20), **{field: value})
    assert checkpoint_command(["list", str(tmp_path)]) == 0
    # A cell of the table is folded.
    out = "".join(capsys.readouterr().out.split())
    assert MANIFEST in out
    assert "1970" in out, "the other one is listed"


def written_as(content):
    def plant(path):
        path.unlink()
        path.write_bytes(content)

    return plant


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def other_numbers(change):
    def plant(path):
        numpy.save(path, change(numpy.load(path)))

    return plant


GARBAGE = {"garbage": written_as(b"\xff\x00"), "deep": written_as(b"[" * 100_000), "empty": written_as(b"")}
CACHED = {
    "scans/*.json": {
        **GARBAGE,
        "a word": written_as(b'"x"'),
        "words": written_as(b'["a","b"]'),
        "an object": written_as(b"{}"),
    },
    "corpora/*/tokenizer.json": {**GARBAGE, "an object": written_as(b"{}"), "a pipe": pipe},
    "index/*/*sample_index.npy": {
        "empty": written_as(b""),
        "garbage": written_as(b"x" * 100),
        "a pipe": pipe,
        "fractions": other_numbers(lambda numbers: numbers.astype(float)),
        "too large": other_numbers(lambda numbers: numbers + 10**6),
        "too few": other_numbers(lambda numbers: numbers[:2]),
        "one": other_numbers(lambda numbers: numpy.array(3)),
    },
    "index/*/*document_index.npy": {"too large": other_numbers(lambda numbers: numbers + 10**6)},
    "index/*/*shuffle_index.npy": {"too large": other_numbers(lambda numbers: numbers + 10**6)},
}


@pytest.mark.parametrize("pattern", CACHED)
def test_a_cached_file_of_other_contents_is_told(pattern, cache_dir, tmp_path):
    cache = tmp_path / "cache"
    own_cache = [f"model.data.cache_dir={cache}"]
    run_small(1, tmp_path / "first", cache_dir, [*SAVED, *own_cache])
    (path, *_) = sorted(cache.glob(pattern))
    shutil.copy2(path, tmp_path / "saved")
    for number, plant in enumerate(CACHED[pattern].values()):
        plant(path)
        # Data-loading processes tell no more than the rank itself.
        workers = [f"model.data.num_workers={number % 2}"]
        arguments = small_run_arguments(tmp_path / "second", cache_dir, [*SAVED, *own_cache, *workers])
        refused(arguments, path if path.suffix == ".json" else path.parent)
        path.unlink()
        shutil.copy2(tmp_path / "saved", path)
    run_small(1, tmp_path / "second", cache_dir, [*SAVED, *own_cache])
