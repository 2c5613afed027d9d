"""Text and token files of a store, here a web server: what a local file gives, or a reason."""

import bz2
import gzip
import json
import random
import signal
import subprocess
import sys
import time

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import InterruptedReadError, UserError
from gpt_pretrain.config.schema import TokenizerConfig
from gpt_pretrain.config.urls import url_problems
from gpt_pretrain.data import remote
from gpt_pretrain.data.cache import Progress
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.sources.text import FileSource
from gpt_pretrain.data.tokenizer import train_bpe
from gpt_pretrain.data.tokenizing import tokenize_source
from tests.token_files import counting_documents, data_config, write_token_file
from tests.web_server import serving

TEXTS = [f"document {number} é " + random.Random(number).randbytes(40).hex() for number in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = pyarrow.table({"number": range(len(TEXTS)), "text": TEXTS})


def write_stream(path):
    with pyarrow.ipc.new_stream(str(path), TABLE.schema) as stream:
        stream.write_table(TABLE, max_chunksize=700)


def write_file(path):
    with pyarrow.ipc.new_file(str(path), TABLE.schema) as stream:
        stream.write_table(TABLE, max_chunksize=700)


FORMATS = {
    "x.jsonl": lambda path: path.write_bytes(LINES),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "x.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "x.txt": lambda path: path.write_bytes(LINES),
    "x.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=500),
    "stream.arrow": write_stream,
    "file.arrow": write_file,
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves `tmp_path/store`. Ranges are small, so that a file takes several, and nobody waits."""
    monkeypatch.setattr(remote, "_FIRST_RANGE", 4096)
    monkeypatch.setattr(remote, "_LAST_RANGE", 65536)
    monkeypatch.setattr(remote, "_ASK_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(remote, "_READ_DELAYS_S", (0.0, 0.0))
    (tmp_path / "store").mkdir()
    with serving(tmp_path / "store") as server:
        yield server


def documents(path):
    source = FileSource([str(path)], "text")
    found = [(piece.text, piece.ends_document) for file in source.files for piece in source.read_file(file)]
    return found, source.num_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_as_from_a_disk(name, server):
    FORMATS[name](server.folder / name)
    assert documents(f"{server.url}/{name}") == documents(server.folder / name)
    assert len(server.ranges) > 3, "read by ranges"


@pytest.mark.parametrize("fault", ["503", "cut", "empty"])
def test_a_server_that_fails_twice_is_asked_again(fault, server):
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    expected = documents(server.folder / "x.jsonl")
    server.faults = [None, None, fault, fault]
    assert documents(f"{server.url}/x.jsonl") == expected
    assert not server.faults


def test_the_beginning_of_a_file_takes_one_small_range(server):
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    source = FileSource([f"{server.url}/x.jsonl"], "text")
    assert next(iter(source.sample(10))) == TEXTS[0][:10]
    assert server.ranges == [("x.jsonl", 0, 4096)]


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_changes_while_it_is_read_is_refused(same_size, server):
    path = server.folder / "x.jsonl"
    path.write_bytes(LINES)
    source = FileSource([f"{server.url}/x.jsonl"], "text")
    pieces = source.read_file(source.files[0])
    next(pieces)
    path.write_bytes(LINES.replace(b"document", b"DOCUMENT") if same_size else LINES[: len(LINES) // 2])
    with pytest.raises(UserError, match=r"x\.jsonl changed while it was read"):
        list(pieces)


def refused(server, name, key="model.data.text_files"):
    with pytest.raises(UserError) as error:
        documents(f"{server.url}/{name}")
    assert f"{server.url}/{name}" in str(error.value)
    assert key in str(error.value)
    return str(error.value)


def test_what_is_not_there_is_told(server):
    assert "there is no such file" in refused(server, "x.jsonl")
    (server.folder / "x.csv").write_text("")
    assert "'.csv'; known are" in refused(server, "x.csv")


def test_credentials_come_from_netrc_and_their_lack_is_told(server, tmp_path, monkeypatch):
    FORMATS["x.txt"](server.folder / "x.txt")
    server.authorization = "Basic dXNlcjpwYXNz"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password wrong")
    told = refused(server, "x.txt")
    assert "no access" in told
    assert "~/.netrc" in told
    assert "wrong" not in told
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password pass")
    assert documents(f"{server.url}/x.txt") == documents(server.folder / "x.txt")


def test_a_server_whose_files_cannot_be_told_apart_or_read_by_ranges_is_refused(server):
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    server.has_ranges = False
    assert "answers a range with more" in refused(server, "x.jsonl", key="")
    server.tells_version = False
    assert "ETag" in refused(server, "x.jsonl", key="")


def test_the_signature_of_an_address_that_a_store_redirects_to_is_not_told(server):
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    server.faults = ["redirect"]
    told = refused(server, "x.jsonl", key="")
    assert "no access" in told
    assert "403" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://key:hunter2@bucket/x.jsonl", "AWS_ACCESS_KEY_ID"),
        ("https://user:hunter2@host/x.jsonl", "~/.netrc"),
        ("https://host/x.jsonl?signature=hunter2", "https://host/x.jsonl?…"),
        ("https://host/*.jsonl", "name each file"),
        ("ftp://host/x.jsonl", "s3://, gs://, hf://"),
    ],
)
def test_addresses_with_secrets_and_of_other_stores_are_refused_before_they_are_written_anywhere(path, expected):
    (problem,) = url_problems("model.data.text_files", path)
    assert expected in problem
    assert "model.data.text_files" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "path", ["s3://b/x?.jsonl", "hf://datasets/a/b@main/*.parquet", "/a/b", "a:b", "https://h/x.txt"]
)
def test_other_addresses_pass(path):
    assert not list(url_problems("model.data.text_files", path))


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf", "http"])
def test_the_library_that_a_scheme_needs_is_named_with_the_command(scheme, monkeypatch):
    remote._of_scheme.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{scheme}:// needs \w+, .*pip install .*\[remote\]"):
        FileSource([f"{scheme}://bucket/x.jsonl"], "text")


def tokenize(path, cache, tokenizer):
    config = TokenizerConfig(library=TokenizerLibrary.file, vocab_size=300, model=str(tokenizer), eod_token=None)
    source = FileSource([str(path)], "text")
    prefix, _ = tokenize_source(source, config, cache, Progress(show=True), name="text")
    return [(prefix.parent / f"corpus{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def test_tokens_are_those_of_a_local_file_also_after_the_store_was_away(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpt_pretrain.data.tokenizing._BATCH_CHARACTERS", 4096)
    train_bpe(TEXTS[:100], 300).save(tmp_path / "tokenizer.json")
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    expected = tokenize(server.folder / "x.jsonl", tmp_path / "local", tmp_path / "tokenizer.json")
    server.faults = [None] * 5 + ["503"] * 1000
    with pytest.raises(InterruptedReadError, match=r"503.* after 3 attempts; the same command goes on"):
        tokenize(f"{server.url}/x.jsonl", tmp_path / "cache", tmp_path / "tokenizer.json")
    server.faults = []
    assert tokenize(f"{server.url}/x.jsonl", tmp_path / "cache", tmp_path / "tokenizer.json") == expected
    assert "bytes are tokenized already; going on" in capsys.readouterr().err


def test_token_files_are_downloaded_once_and_a_download_goes_on(server, tmp_path):
    write_token_file(server.folder / "web", [numpy.arange(start, start + 100) % 1000 for start in range(3000)])
    local = data_config(tmp_path / "local", "data=mmap", f"model.data.data_prefix=[{server.folder}/web]")
    stored = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=['{server.url}/web']")
    size = (server.folder / "web.bin").stat().st_size
    # The index and a part of the tokens come.
    server.faults = [None] * 12 + ["503"] * 1000
    with pytest.raises(InterruptedReadError):
        prepare_corpus(stored, show_progress=False)
    server.faults, server.ranges = [], []
    corpus = prepare_corpus(stored, show_progress=False)
    assert corpus.fingerprints == prepare_corpus(local, show_progress=False).fingerprints
    (prefix,) = corpus.files
    for suffix in (".bin", ".idx"):
        with open(prefix + suffix, "rb") as file:
            assert file.read() == (server.folder / f"web{suffix}").read_bytes()
    again = [(first, end) for name, first, end in server.ranges if name == "web.bin"]
    assert min(again)[0] > 0
    assert max(again)[1] == size
    server.ranges = []
    assert prepare_corpus(stored, show_progress=False).files == (prefix,)
    assert not server.ranges


def test_a_download_that_does_not_fit_is_refused_before_it(server, tmp_path, monkeypatch):
    write_token_file(server.folder / "web", counting_documents(20, 40))
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=['{server.url}/web']")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match=r"100 B free.*model\.data\.cache_dir"):
        prepare_corpus(config, show_progress=False)
    assert not server.ranges


def test_a_missing_half_of_a_pair_is_told_before_anything_is_downloaded(server, tmp_path):
    for name in ("web", "code"):
        write_token_file(server.folder / name, counting_documents(20, 40))
    (server.folder / "code.bin").unlink()
    paths = f"'{server.url}/web','{server.url}/code'"
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{paths}]")
    with pytest.raises(UserError, match=r"model\.data\.data_prefix: .*/code\.bin: there is no such file"):
        prepare_corpus(config, show_progress=False)
    assert not server.ranges


def test_a_program_ends_at_a_signal_while_a_store_keeps_it_waiting(server):
    FORMATS["x.jsonl"](server.folder / "x.jsonl")
    server.faults = ["hang"]
    code = (
        "from gpt_pretrain.data.sources.text import FileSource\n"
        f"source = FileSource(['{server.url}/x.jsonl'], 'text')\n"
        "print('reading', flush=True)\n"
        "next(source.read_file(source.files[0]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"reading\n"
        while server.faults:
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=20)[1]
        assert time.monotonic() - began < 5
