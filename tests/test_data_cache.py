import json
import signal
import threading
import time

import numpy
import pytest
from filelock import FileLock
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import TokenizerConfig
from gpt_pretrain.data.cache import Progress, hold_lock
from gpt_pretrain.data.sources.text import FileSource
from gpt_pretrain.data.tokenizer import load_tokenizer
from gpt_pretrain.data.tokenizing import tokenize_source
from tests.forked_runs import fork_ranks

PROGRAM = "tests/programs/prepare_text.py"
BPE = TokenizerConfig(library=TokenizerLibrary.bpe, model=None, vocab_size=300, eod_token=None)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"document {i}: some words, some more words, and some numbers {i * i}\n" * 5)
    return folder


def tokenize(texts, cache, config=BPE):
    with Progress(show=False) as progress:
        return tokenize_source(FileSource([f"{texts}/*.txt"], "text"), config, cache, progress, name="text")


def entries(cache):
    """Finished and unfinished entries; locks and statuses are no entries."""
    return sorted(path.name for path in (cache / "corpora").iterdir() if path.is_dir())


def test_documents_come_back_from_the_token_file_as_they_were(tmp_path, texts):
    (texts / "4.txt").write_text("")
    prefix, tokenizer = tokenize(texts, tmp_path / "cache")
    dataset = IndexedDataset(str(prefix))
    assert dataset.index.dtype is numpy.uint16
    decoded = [tokenizer.decode(tokens.tolist()) for tokens in dataset]
    expected = [path.read_text() + "<|endoftext|>" for path in sorted(texts.iterdir()) if path.stat().st_size]
    assert decoded == expected
    assert all(tokens[-1] == tokenizer.eod for tokens in dataset)
    manifest = json.loads((prefix.parent / "manifest.json").read_text())
    assert (manifest["num_documents"], manifest["num_empty_documents"]) == (7, 1)
    assert manifest["num_tokens"] == sum(map(len, dataset))


@pytest.mark.parametrize(
    "status", ["[" * 100_000, "[]", "{", '{"pid": 1}', '{"pid": 1, "host": 2, "stage": [], "done": "x", "total": {}}']
)
def test_what_the_holder_of_a_lock_says_is_only_shown(status, tmp_path):
    entry = tmp_path / "corpora" / "entry"
    entry.parent.mkdir()
    (entry.parent / "entry.status.json").write_text(status)
    held = FileLock(entry.parent / "entry.lock", thread_local=False)
    held.acquire()
    release = threading.Timer(0.5, held.release)
    release.start()
    with hold_lock(entry, Progress(show=True)):
        assert not held.is_locked
    release.join()


def test_a_second_call_finds_the_entry_and_does_not_write(tmp_path, texts):
    first, _ = tokenize(texts, tmp_path / "cache")
    written = (first.parent / "corpus.bin").stat().st_mtime_ns
    second, _ = tokenize(texts, tmp_path / "cache")
    assert second == first
    assert (second.parent / "corpus.bin").stat().st_mtime_ns == written


def test_other_text_or_another_tokenizer_is_another_entry(tmp_path, texts):
    cache = tmp_path / "cache"
    first, _ = tokenize(texts, cache)
    other_bpe = TokenizerConfig(library=TokenizerLibrary.bpe, model=None, vocab_size=290, eod_token=None)
    from_file = TokenizerConfig(
        library=TokenizerLibrary.file, model=str(first.parent / "tokenizer.json"), vocab_size=1, eod_token=None
    )
    prefixes = {first, tokenize(texts, cache, other_bpe)[0], tokenize(texts, cache, from_file)[0]}
    (texts / "3.txt").write_text("changed")
    prefixes.add(tokenize(texts, cache)[0])
    assert len(prefixes) == 4


def test_a_file_tokenizer_makes_the_same_tokens_as_the_bpe_it_was_saved_from(tmp_path, texts):
    first, _ = tokenize(texts, tmp_path / "cache")
    path = first.parent / "tokenizer.json"
    config = TokenizerConfig(library=TokenizerLibrary.file, model=str(path), vocab_size=1, eod_token=None)
    second, tokenizer = tokenize(texts, tmp_path / "cache", config)
    assert tokenizer.fingerprint == load_tokenizer(path).fingerprint
    assert second.with_suffix(".bin").read_bytes() == first.with_suffix(".bin").read_bytes()


def test_a_corpus_of_empty_documents_is_refused_and_leaves_nothing(tmp_path, texts):
    for path in texts.iterdir():
        path.write_text("")
    with pytest.raises(UserError, match=r"\b8 documents .*0\.txt"):
        tokenize(texts, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


class ChangingSource(FileSource):
    """A file of which grows while it is read."""

    def read_file(self, path):
        yield from super().read_file(path)
        with self.files[0].open("a") as file:
            file.write("more")


def test_files_that_change_while_they_are_read_are_refused(tmp_path, texts):
    source = ChangingSource([f"{texts}/*.txt"], "text")
    with Progress(show=False) as progress, pytest.raises(UserError, match=r"changed .*\.txt"):
        tokenize_source(source, BPE, tmp_path / "cache", progress, name="text")
    assert entries(tmp_path / "cache") == []


def start(parent, folder, *arguments):
    """The program as a process of its own, which prints into FOLDER.out and FOLDER.err."""
    outputs = folder.with_suffix(".out"), folder.with_suffix(".err")
    return parent.start_program([PROGRAM, *map(str, arguments)], [outputs], {}, {})


def wait_for_partial(cache, run):
    while not list(cache.glob("corpora/.*.unfinished/corpus.bin")):
        assert not run.poll(), run.text()
        time.sleep(0.02)


def test_of_two_processes_one_tokenizes_and_the_other_says_whom_it_waits_for(parent, tmp_path, texts):
    cache, said = tmp_path / "cache", tmp_path / "second.err"
    first = start(parent, tmp_path / "first", cache, f"{texts}/*.txt", 0.2)
    wait_for_partial(cache, first)
    # So that the second meets it, however slow the machine is.
    first.signal(0, signal.SIGSTOP)
    second = start(parent, tmp_path / "second", cache, f"{texts}/*.txt")
    waits = f"waiting for process {first.pids[0]} on "
    while not said.exists() or waits not in said.read_text():
        assert not second.poll(), second.text()
        time.sleep(0.02)
    first.signal(0, signal.SIGCONT)
    assert (first.wait(60), second.wait(60)) == ([0], [0]), first.text() + second.text()
    assert "tokenized" in (tmp_path / "first.err").read_text()
    assert "tokenized" not in said.read_text(), "the second found what the first made"
    assert (tmp_path / "first.out").read_text() == (tmp_path / "second.out").read_text() != ""
    assert len(entries(cache)) == 1


def test_a_kill_in_the_middle_leaves_nothing_that_counts_as_complete(parent, tmp_path, texts):
    cache = tmp_path / "cache"
    run = start(parent, tmp_path / "killed", cache, f"{texts}/*.txt", 0.2)
    wait_for_partial(cache, run)
    run.kill()
    assert run.wait(60) == [-signal.SIGKILL]
    assert [name for name in entries(cache) if not name.endswith(".unfinished")] == []
    prefix, _ = tokenize(texts, cache)
    assert entries(cache) == [prefix.parent.name], "the leftover is gone"
    assert len(IndexedDataset(str(prefix))) == 8


def test_a_full_disk_is_reported_with_path_and_bytes(tmp_path, texts):
    for path in texts.iterdir():
        path.write_text("one two three four " * 3000)
    result = fork_ranks(1, [PROGRAM, str(tmp_path / "cache"), f"{texts}/*.txt", "0", "20000"])
    assert result.returncode == 1
    assert "UserError: no space left while writing" in result.stderr, result.stderr
    assert f"{tmp_path / 'cache'}" in result.stderr
    assert "20,000 bytes were written" in result.stderr
    assert entries(tmp_path / "cache") == []
