"""Text to token files: what the library itself gives for whole documents, whatever was cut, killed or joined."""

import json
import os
import random
import time

import numpy
import pytest
import tokenizers
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import models, normalizers, pre_tokenizers, trainers

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import TokenizerConfig
from gpt_pretrain.data import encoders, token_writer
from gpt_pretrain.data.cache import Progress
from gpt_pretrain.data.sources.text import FileSource
from gpt_pretrain.data.token_files import write_index
from gpt_pretrain.data.tokenizer import train_bpe
from gpt_pretrain.data.tokenizing import tokenize_source

SOURCE = "def f(x, y):\n    return x + y  # 12345 ünïcode – 漢字\n\n\nclass A:\n\tpass   \n"


def trained(normalizer, pre_tokenizer, in_use="same", **model):
    """A tokenizer that is trained with one pre-tokenizer and used with another."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", **model))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(pre_tokenizer, pre_tokenizers.ByteLevel) else []
    special = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([SOURCE] * 50, trainer=trainer)
    if in_use != "same":
        backend.pre_tokenizer = in_use
    return backend


def sentencepiece():
    """As Llama 2's: it prepends a mark of a space to the text, and the whole text is one word."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = trained(normalizers.Replace(" ", "▁"), pre_tokenizers.Split("▁", "merged_with_next"), None)
    backend.normalizer = marks
    return backend


def across_words():
    """Its tokens reach over spaces and line ends, so that few places divide them."""
    return trained(None, pre_tokenizers.Split("\n\n", "isolated"), None)


TOKENIZERS = {
    "gpt2": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "with a space before the text": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama2": sentencepiece,
    "mark before the text": lambda: trained(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "t5": lambda: trained(
        None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ),
    "across words": across_words,
}


def tokenize(pattern, cache, model, source=FileSource, eod_token=None):
    config = TokenizerConfig(library=TokenizerLibrary.file, model=str(model), vocab_size=1, eod_token=eod_token)
    with Progress(show=True) as progress:
        return tokenize_source(source([str(pattern)], "text"), config, cache, progress, name="text")[0]


def tokens_of(prefix):
    return [document.tolist() for document in IndexedDataset(str(prefix))]


def library_tokens(path, texts):
    """The tokens of whole documents, from the library alone."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    eod = backend.token_to_id("</s>")
    return [[*backend.encode(text, add_special_tokens=False).ids, eod] for text in texts if text]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_document_of_any_length_has_the_tokens_of_the_whole(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "piece_size", 3000)
    TOKENIZERS[kind]().save(str(tmp_path / "tokenizer.json"))
    choose = random.Random(1)
    words = SOURCE.split(" ")
    texts = ["".join(choose.choice(words) + choose.choice([" ", "  ", "\n"]) for _ in range(n)) for n in (9000, 3, 800)]
    texts += ["", "x" * 20]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "x.txt").write_text(texts[0])
    assert len(texts[0]) > 10 * 3000
    for name, of_file in (("x.jsonl", texts), ("x.txt", texts[:1])):
        prefix = tokenize(tmp_path / name, tmp_path / "cache", tmp_path / "tokenizer.json")
        assert tokens_of(prefix) == library_tokens(tmp_path / "tokenizer.json", of_file)


def test_documents_end_with_the_token_that_the_key_names(tmp_path):
    backend = trained(None, pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text(SOURCE)
    ends = []
    for token in (None, "<unk>"):
        prefix = tokenize(tmp_path / "x.txt", tmp_path / "cache", tmp_path / "tokenizer.json", eod_token=token)
        ends.append(tokens_of(prefix)[0][-1])
    assert ends == [backend.token_to_id("</s>"), backend.token_to_id("<unk>")]


def test_text_without_a_space_comes_in_bounded_pieces_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "piece_size", 2000)
    train_bpe([SOURCE] * 50, 300).save(tmp_path / "tokenizer.json")
    text = "".join(random.Random(1).choices("abcdefgh", k=50_000))
    (tmp_path / "x.txt").write_text(text)
    source = FileSource([str(tmp_path / "x.txt")], "text")
    assert max(len(piece.text) for piece in source.read_file(source.files[0])) <= 4000
    (tokens,) = tokens_of(tokenize(tmp_path / "x.txt", tmp_path / "cache", tmp_path / "tokenizer.json"))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.decode(tokens[:-1]) == text


@pytest.mark.parametrize("text", ["".join(random.Random(1).choices("etaoinsh", k=400_000)), " " * 400_000])
def test_a_bpe_is_trained_on_a_long_word_in_time_by_its_length(text):
    """By the square of it, this would take minutes; a second is usual."""
    start = time.process_time()
    tokenizer = train_bpe([text, "some words"], 4000)
    assert time.process_time() - start < 15
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_usual_length_are_trained_as_they_are():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = SOURCE * 30 + "x" * 1024
    backend.train_from_iterator([text], trainer=trainer)
    assert train_bpe([text], 320).encode(SOURCE) == backend.encode(SOURCE).ids


class InterruptedSource(FileSource):
    """Ctrl-C comes behind this many documents."""

    documents = 0

    def read_file(self, path):
        for piece in super().read_file(path):
            if type(self).documents == 0:
                raise KeyboardInterrupt
            type(self).documents -= piece.ends_document
            yield piece


class ForgetfulSource(FileSource):
    """Its documents have other text by now, except for the last ones; `identity` does not tell."""

    def read_file(self, path):
        for number, piece in enumerate(super().read_file(path)):
            is_old = path.stem == "a" or number < 3
            text = "other" if is_old and piece.ends_document else piece.text
            yield type(piece)(text, piece.ends_document, piece.num_source_bytes)


@pytest.fixture
def two_files(tmp_path):
    """Twenty documents of a.jsonl, one of them empty, then as many of b.jsonl; and a tokenizer."""
    train_bpe([SOURCE] * 50, 300).save(tmp_path / "tokenizer.json")
    for name in "ab":
        rows = [{"text": "" if number == 2 else f"{name} {number}: {SOURCE}" * 3} for number in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def interrupted(folder, monkeypatch):
    """The cache after Ctrl-C behind 30 documents, and the folder of what is written so far."""
    monkeypatch.setattr("gpt_pretrain.data.tokenizing._BATCH_CHARACTERS", 10)
    monkeypatch.setattr(encoders, "num_cores", lambda: 1)
    monkeypatch.setattr(InterruptedSource, "documents", 30)
    with pytest.raises(KeyboardInterrupt):
        tokenize(folder / "*.jsonl", folder / "cache", folder / "tokenizer.json", InterruptedSource)
    (unfinished,) = (folder / "cache" / "corpora").glob(".*.unfinished")
    return unfinished, json.loads((unfinished / "journal.json").read_text())


def files_of(prefix):
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


def test_an_interrupted_run_goes_on_where_it_was(two_files, monkeypatch, capsys):
    whole = files_of(tokenize(two_files / "*.jsonl", two_files / "other", two_files / "tokenizer.json"))
    unfinished, journal = interrupted(two_files, monkeypatch)
    # Batches that were read ahead are missing.
    assert journal["file"] == 1
    assert 3 <= journal["documents_of_file"] <= 10
    assert journal["num_empty"] == 2
    # Written behind the journal's last entry, as before a power cut.
    for name in ("corpus.bin", "lengths"):
        with (unfinished / name).open("ab") as file:
            file.write(b"torn")
    prefix = tokenize(two_files / "*.jsonl", two_files / "cache", two_files / "tokenizer.json", ForgetfulSource)
    assert files_of(prefix) == whole, "nothing is tokenized twice, and nothing is missing"
    assert f"{journal['num_source_bytes']:,} bytes are tokenized already" in capsys.readouterr().err
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "corpus.bin",
        "corpus.idx",
        "manifest.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("damage", ["no journal", "no JSON", "too few tokens", "a link"])
def test_what_the_journal_does_not_cover_is_made_again(damage, two_files, monkeypatch):
    whole = files_of(tokenize(two_files / "*.jsonl", two_files / "other", two_files / "tokenizer.json"))
    unfinished, _ = interrupted(two_files, monkeypatch)
    elsewhere = two_files / "elsewhere"
    if damage == "no journal":
        (unfinished / "journal.json").unlink()
    elif damage == "no JSON":
        (unfinished / "journal.json").write_text("{")
    elif damage == "too few tokens":
        os.truncate(unfinished / "corpus.bin", 10)
    else:
        (unfinished / "corpus.bin").rename(elsewhere)
        (unfinished / "corpus.bin").symlink_to(elsewhere)
        before = elsewhere.read_bytes()
    prefix = tokenize(two_files / "*.jsonl", two_files / "cache", two_files / "tokenizer.json")
    assert files_of(prefix) == whole
    assert damage != "a link" or elsewhere.read_bytes() == before


def test_the_journal_is_written_while_the_run_goes_on(two_files, monkeypatch):
    """A run that is killed without warning loses what came after it."""
    monkeypatch.setattr(token_writer, "_SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr("gpt_pretrain.data.tokenizing._BATCH_CHARACTERS", 10)
    found = []

    class Watched(FileSource):
        def read_file(self, path):
            for piece in super().read_file(path):
                found.extend((two_files / "cache" / "corpora").glob(".*.unfinished/journal.json"))
                yield piece

    tokenize(two_files / "*.jsonl", two_files / "cache", two_files / "tokenizer.json", Watched)
    assert found


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_the_index_is_the_one_that_megatron_core_writes(dtype, tmp_path):
    lengths = [3, 1, 40_000, 7]
    builder = IndexedDatasetBuilder(str(tmp_path / "core.bin"), dtype=dtype)
    for length in lengths:
        builder.add_document(numpy.arange(length, dtype=dtype), [length])
    builder.finalize(str(tmp_path / "core.idx"))
    write_index(tmp_path / "ours.idx", dtype, numpy.array(lengths, dtype="<i4"))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "core.idx").read_bytes()


def test_a_text_that_the_tokenizer_cannot_encode_ends_in_its_words(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"known": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("known unknown")
    with pytest.raises(UserError, match=r"cannot encode the text: .*\[UNK\]"):
        tokenize(tmp_path / "x.txt", tmp_path / "cache", tmp_path / "tokenizer.json")


def test_a_process_that_is_killed_is_told_and_ends_the_others(tmp_path, monkeypatch):
    train_bpe([SOURCE] * 50, 300).save(tmp_path / "tokenizer.json")
    (tmp_path / "x.txt").write_text("known unknown")
    (tmp_path / "killed.py").write_text("import os, sys\nsys.stdin.buffer.read(4)\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(encoders, "_PROGRAM", tmp_path / "killed.py")
    with pytest.raises(UserError, match=r"ended with -9; .*memory"):
        tokenize(tmp_path / "x.txt", tmp_path / "cache", tmp_path / "tokenizer.json")


def test_progress_tells_the_speed_and_the_time_that_is_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(show=True)
    # 40 MB were done before this process; it does 20 MB in 10 s, and 40 MB are left.
    progress.start("tokenizing", 100_000_000, done=40_000_000, is_bytes=True)
    now[0] += 10
    progress.advance(20_000_000)
    assert capsys.readouterr().err == "tokenizing: 60%, 2.0 MB/s, 0:00:20 left\n"
