"""Text and token files of a real S3 server: what a local file gives, or a reason."""

import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import s3fs

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data import remote
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.sources.text import FileSource
from tests.s3_server import S3Server
from tests.test_data_remote import FORMATS, LINES, documents
from tests.token_files import counting_documents, data_config, write_token_file


@pytest.fixture(scope="module")
def started():
    with S3Server().serving() as server:
        yield server


@pytest.fixture
def store(started, tmp_path, monkeypatch):
    """The server's client, and an empty bucket `corpora`. Credentials come from the environment alone."""
    for name, value in {
        "AWS_ENDPOINT_URL": started.url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        # Otherwise the library would ask the machine's network for credentials.
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(remote, "_FIRST_RANGE", 4096)
    monkeypatch.setattr(remote, "_LAST_RANGE", 65536)
    forget_connections()
    system = s3fs.S3FileSystem()
    system.mkdir("corpora")
    yield system
    forget_connections()
    started.reset()


def forget_connections():
    remote._of_scheme.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_as_from_a_disk(name, started, store, tmp_path):
    FORMATS[name](tmp_path / name)
    store.put_file(tmp_path / name, f"corpora/web/{name}")
    assert documents(f"s3://corpora/web/{name}") == documents(tmp_path / name)
    assert len(started.ranges) > 3, "read by ranges"


def test_a_pattern_finds_files_of_all_folders_in_their_order(store):
    for name in ("b/2.jsonl", "a/x/1.jsonl", "a/3.txt"):
        store.pipe_file(f"corpora/{name}", LINES)
    source = FileSource(["s3://corpora/**/*.jsonl"], "text")
    assert [str(file) for file in source.files] == ["s3://corpora/a/x/1.jsonl", "s3://corpora/b/2.jsonl"]
    with pytest.raises(UserError, match=r"text_files: s3://corpora/\*\.parquet matches no file"):
        FileSource(["s3://corpora/*.parquet"], "text")


def test_a_server_that_fails_twice_is_asked_again(started, store, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(LINES)
    store.pipe_file("corpora/x.jsonl", LINES)
    started.faults = [None, None, 503, 500]
    assert documents("s3://corpora/x.jsonl") == documents(tmp_path / "x.jsonl")
    assert not started.faults


def test_a_file_that_changes_while_it_is_read_is_refused(store):
    store.pipe_file("corpora/x.jsonl", LINES)
    source = FileSource(["s3://corpora/x.jsonl"], "text")
    pieces = source.read_file(source.files[0])
    next(pieces)
    store.pipe_file("corpora/x.jsonl", LINES.replace(b"document", b"DOCUMENT"))
    with pytest.raises(UserError, match=r"x\.jsonl changed while it was read"):
        list(pieces)


@pytest.fixture
def upload(store, tmp_path):
    """Stores documents as the pair `web`."""

    def put(documents):
        write_token_file(tmp_path / "web", documents)
        for suffix in (".bin", ".idx"):
            store.put_file(tmp_path / f"web{suffix}", f"corpora/web{suffix}")

    return put


def prepared(prefix, cache):
    config = data_config(cache, "data=mmap", f"model.data.data_prefix=['{prefix}']")
    return prepare_corpus(config, show_progress=False)


def test_token_files_are_downloaded_once_and_again_when_they_change(started, upload, tmp_path):
    upload([numpy.arange(start, start + 100) % 1000 for start in range(300)])
    (stored,) = (corpus := prepared("s3://corpora/web", tmp_path / "cache")).files
    assert corpus.fingerprints == prepared(tmp_path / "web", tmp_path / "local").fingerprints
    for suffix in (".bin", ".idx"):
        with open(stored + suffix, "rb") as file:
            assert file.read() == (tmp_path / f"web{suffix}").read_bytes()
    started.ranges.clear()
    assert prepared("s3://corpora/web", tmp_path / "cache").files == (stored,)
    assert not started.ranges
    upload(counting_documents(20, 40))
    assert prepared("s3://corpora/web", tmp_path / "cache").files != (stored,)


def test_a_cached_index_that_was_damaged_is_refused(started, upload, tmp_path):
    upload(counting_documents(20, 40))
    (stored,) = prepared("s3://corpora/web", tmp_path / "cache").files
    # A document has a token less, and the next one a token more; see the header in `data.token_files`.
    with open(f"{stored}.idx", "r+b") as file:
        content = file.read()
        lengths = numpy.full(20, 40, dtype="<i4")
        place = content.index(lengths.tobytes())
        lengths[3:5] = 39, 41
        file.seek(place)
        file.write(lengths.tobytes())
    with pytest.raises(UserError, match=rf"{stored}\.idx is not what was downloaded.*; remove {Path(stored).parent} "):
        prepared("s3://corpora/web", tmp_path / "cache")
    shutil.rmtree(Path(stored).parent)
    assert prepared("s3://corpora/web", tmp_path / "cache").files == (stored,)
    # By the program whose form it has.
    subprocess.run(["sha256sum", "--check", "web.idx.sha256"], cwd=Path(stored).parent, check=True, capture_output=True)


def refused(path):
    with pytest.raises(UserError) as error:
        FileSource([path], "text")
    told = str(error.value)
    assert f"model.data.text_files: {path}" in told
    assert "hunter2" not in told
    return told


def test_what_is_not_there_is_told(store):
    assert "there is no such file" in refused("s3://corpora/x.jsonl")
    assert "bucket" in refused("s3://nowhere/x.jsonl")
    assert "bucket" in refused("s3://nowhere/*.jsonl")


@pytest.mark.parametrize("path", ["s3://corpora/x.jsonl", "s3://corpora/*.jsonl"])
@pytest.mark.parametrize("credentials", ["none", "of nobody"])
def test_a_lack_of_credentials_is_told(credentials, path, started, store, monkeypatch):
    store.pipe_file("corpora/x.jsonl", LINES)
    if credentials == "none":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    else:
        started.demand_credentials()
    forget_connections()
    told = refused(path)
    assert "no access" in told
    assert "AWS_ACCESS_KEY_ID" in told
