"""What hypothesis makes up: command lines and files, each of which is refused in a line or taken, at once.

The oracle of a refusal: exit code 2, every line an `error:` or its continuation, no traceback, and at most 10 s of
processor time. Every run of the suite draws the same cases; `slow` draws more of them.
"""

import contextlib
import hashlib
import io
import json
import struct
import tempfile
import time
from pathlib import Path

import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter, save

from gpt_pretrain.checkpoint.__main__ import main as checkpoint
from gpt_pretrain.checkpoint.directory import find_checkpoints
from gpt_pretrain.checkpoint.manifest import MANIFEST, check_files, read_manifest
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.keys import schema_keys, schema_sections
from gpt_pretrain.data.sources.text import FileSource
from gpt_pretrain.data.token_files import check_token_file
from gpt_pretrain.data.tokenizer import load_tokenizer
from gpt_pretrain.import_hf import main as import_hf
from gpt_pretrain.plan.__main__ import main as plan
from tests.checkpoint_files import publish
from tests.launching import REPOSITORY
from tests.saved_models import PUBLISHED_LLAMA
from tests.token_files import write_token_file

LIMIT_S = 10.0
NUM_CASES, NUM_SLOW = 60, 2000

ODD = st.sampled_from(
    [
        *("0", "-1", "1", "2", "3", "1e3", "1e30", "99999999999999999999", "nan", "inf", ".5", "null", "true", "False"),
        *("", "''", "[]", "[1,2]", "{}", "{a: 1}", "a,b", "'a b'", "${name}", "${oc.env:HOME}", "${nowhere}", "ü"),
        *(
            "\x00",
            "~",
            "??",
            "???",
            "\\",
            '"',
            "[",
            "(",
            "$(",
            "`id`",
            "../x",
            "/dev/zero",
            "hybrid",
            "delayed",
            "tiny",
            "=",
        ),
    ]
)
VALUES = ODD | st.integers().map(str) | st.floats().map(str) | st.text(max_size=12)
KEYS = st.sampled_from(
    [*schema_keys(), *schema_sections(), "fp8", "model", "data", "experiment", "parallelism", "hydra.run.dir"]
)
NAMES = KEYS | st.text("abcdefmodel._/@:", max_size=16)
OVERRIDES = st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "++", "~"]), NAMES, VALUES)
OPTIONS = st.builds("--{}".format, st.text("abcdefghilmnoprstz-=8", min_size=1, max_size=14)) | st.text(max_size=8)
# What prints or writes elsewhere is Hydra's own.
SHOWN = ("-h", "--h", "-v", "--v", "--cfg", "-c", "--info", "-i", "-s", "--shell", "-m")
COMMAND_LINES = st.lists(OVERRIDES | OVERRIDES | OVERRIDES | OPTIONS, min_size=1, max_size=4).filter(
    lambda line: not any(word.startswith(SHOWN) for word in line)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=8), child, max_size=3),
    max_leaves=8,
)


def fuzz(**drawn):
    """The test twice: with a few cases, and with many."""

    def decorate(test):
        def cases(number):
            chosen = settings(
                max_examples=number,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            chosen(given(**drawn)(test))()

        return pytest.mark.parametrize(
            "number", [NUM_CASES, pytest.param(NUM_SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
        )(cases)

    return decorate


def judged(command):
    """Runs it, and what it has printed on its standard error; raises for what is no good end."""
    err, began = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = command()
    assert time.process_time() - began < LIMIT_S
    lines = err.getvalue().splitlines()
    assert code in (0, 2), (code, lines)
    if code == 2:
        assert lines[0].startswith("error: ")
        assert all(line.startswith(("error: ", "       ")) for line in lines), lines
        assert "Traceback" not in err.getvalue()
    return code


def read_or_refused(read):
    """Whether a file was read; any other end than a `UserError` is a failure."""
    began = time.process_time()
    try:
        read()
    except UserError:
        return False
    finally:
        assert time.process_time() - began < LIMIT_S
    return True


def damaged(content, draw):
    """Bytes with some of them changed, cut or put in."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["cut", "change", "insert"])):
            case "cut":
                del content[place:]
            case "change" if place < len(content):
                content[place] = draw(st.integers(0, 255))
            case _:
                content[place:place] = draw(st.binary(max_size=9))
    return bytes(content)


@pytest.mark.usefixtures("no_launcher")
@fuzz(line=COMMAND_LINES)
def test_a_command_line_is_planned_or_refused(line):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(REPOSITORY):
        judged(lambda: plan([*line, f"run_dir={folder}"]))


@fuzz(data=st.data())
def test_a_damaged_run_directory_is_found_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "checkpoints")
        for step in (10, 20):
            publish(directory, step)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
            match data.draw(st.sampled_from(["damage", "remove", "directory", "link"])):
                case "damage":
                    path.write_bytes(damaged(path.read_bytes(), data.draw))
                case "remove":
                    path.unlink()
                case "directory":
                    path.unlink()
                    path.mkdir()
                case "link":
                    path.unlink()
                    path.symlink_to(data.draw(st.sampled_from(["gone", "/dev/zero", path.name])))

        def read():
            found = find_checkpoints(directory)
            assert found.paths, "never a fresh start"
            problems = check_files(found.paths[0], read_manifest(found.paths[0]))
            if problems:
                raise UserError("\n".join(problems))

        read_or_refused(read)


@fuzz(data=st.data())
def test_a_manifest_of_any_json_is_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        path = publish(Path(folder), 10)
        values = json.loads((path / MANIFEST).read_text())
        del values["sha256"]
        part = data.draw(
            st.sampled_from([values, values, values["layout"], values["config"]["model"], values["files"]])
        )
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
        # As its writer could; one without it is refused unread.
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        (path / MANIFEST).write_text(json.dumps({**values, "sha256": digest}))
        for command in ("list", "verify"):
            judged(lambda command=command: checkpoint([command, folder]))


@fuzz(data=st.data())
def test_an_index_of_tensors_is_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        state = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16)}
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        index = Path(folder, ".metadata")
        index.write_bytes(damaged(index.read_bytes(), data.draw))

        def read():
            tensors = CheckpointTensors(Path(folder))
            for name in tensors:
                tensors.read(name)

        read_or_refused(read)


@fuzz(data=st.data())
def test_an_index_of_tokens_is_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_token_file(Path(folder, "web"), [[1, 2, 3], [4, 5]])
        path = Path(f"{prefix}{data.draw(st.sampled_from(['.idx', '.idx', '.bin']))}")
        content = damaged(path.read_bytes(), data.draw)
        if data.draw(st.booleans()) and len(content) >= 34:
            counts = data.draw(st.tuples(*[st.integers(0, 2**64 - 1)] * 2))
            content = content[:18] + struct.pack("<QQ", *counts) + content[34:]
        path.write_bytes(content)
        read_or_refused(lambda: check_token_file(str(prefix)))


@fuzz(
    content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps({"text": value}).encode()),
    suffix=st.sampled_from([".txt", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".txt.bz2"]),
)
def test_a_text_file_is_read_or_refused(content, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"text{suffix}")
        path.write_bytes(content)
        read_or_refused(lambda: list(FileSource([], "text").read_file(path)))


@fuzz(data=st.data())
def test_an_arrow_file_is_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        path, table = Path(folder, "x.arrow"), pyarrow.table({"n": [[1], [2, 3]], "text": ["äbc", "d"]})
        with data.draw(st.sampled_from([pyarrow.ipc.new_stream, pyarrow.ipc.new_file]))(
            str(path), table.schema
        ) as file:
            file.write_table(table)
        path.write_bytes(damaged(path.read_bytes(), data.draw))
        read_or_refused(lambda: list(FileSource([], "text").read_file(path)))


@pytest.mark.usefixtures("no_launcher")
@fuzz(changes=st.dictionaries(st.sampled_from(sorted(PUBLISHED_LLAMA)), JSON, max_size=2), index=st.none() | JSON)
def test_a_hugging_face_directory_is_refused(changes, index):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(PUBLISHED_LLAMA | changes))
        if index is not None:
            Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert judged(lambda: import_hf([f"path={folder}", f"out={folder}/out"])) == 2


@fuzz(content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps({"model": value}).encode()))
def test_a_tokenizer_is_refused(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_bytes(content)
        assert not read_or_refused(lambda: load_tokenizer(path))
