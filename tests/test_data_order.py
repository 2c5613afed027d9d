"""In which order a run reads its documents, counted from the tokens of its samples."""

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy
import pytest
import torch

from gpt_pretrain.checkpoint.manifest import read_manifest, write_manifest
from gpt_pretrain.data.corpus import ORDER, prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.runs import run_small, small_run_arguments
from tests.token_files import SEQUENCE_LENGTH, data_config, write_token_file

NEW, OLD = {ORDER: "epoch by epoch"}, {}
VOCABULARY = "model.vocab_size=20000"
# Each is one sample, and its tokens are its number.
SAMPLES = [[number] * SEQUENCE_LENGTH for number in range(1000)]


def corpus_of(tmp_path, prefix, saved=NEW, *overrides):
    """The configuration and the corpus of a run that goes on from a checkpoint with such fingerprints."""
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{prefix}]", *overrides, VOCABULARY)
    return config, prepare_corpus(config, show_progress=False).continued(saved)


def train_tokens(tmp_path, prefix, num_samples, saved=NEW, *overrides):
    """int64 [num_samples, s]"""
    config, corpus = corpus_of(tmp_path, prefix, saved, *overrides)
    dataset, _ = build_datasets(config, corpus, num_train_samples=num_samples)
    return torch.stack([dataset[index]["tokens"] for index in range(num_samples)]).numpy()


def whole(tmp_path, num_samples, saved):
    """The document of each sample, of 1,000 that all are for training."""
    prefix = write_token_file(tmp_path / "samples", SAMPLES)
    tokens = train_tokens(
        tmp_path, prefix, num_samples, saved, "model.data.splits_string='1'", "trainer.limit_val_batches=0"
    )
    return tokens[:, 0]


# How many of 1,000 documents were read never, once, twice and three times.
@pytest.mark.parametrize(("saved", "counts"), [(OLD, [67, 366, 467, 100]), (NEW, [0, 400, 600, 0])])
def test_a_run_of_four_fifths_of_an_epoch_that_is_made_twice_as_long(saved, counts, tmp_path):
    read = numpy.concatenate([whole(tmp_path, 800, saved), whole(tmp_path, 1600, saved)[800:]])
    times = numpy.bincount(read, minlength=1000)
    assert numpy.bincount(times, minlength=4).tolist() == counts


@pytest.mark.parametrize(("saved", "missing"), [(OLD, 240), (NEW, 1)])
def test_the_first_999_samples_of_two_epochs_of_1000_documents(saved, missing, tmp_path):
    assert 1000 - len(set(whole(tmp_path, 2000, saved)[:999].tolist())) == missing


def uneven_documents(num_documents, seed, first_token=0):
    """Documents of 0 to 60 tokens; all tokens differ."""
    lengths = numpy.random.default_rng(seed).integers(0, 61, num_documents)
    ends = first_token + numpy.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def check_epochs(tokens, documents):
    """Of tokens as they were read, each epoch's are all tokens of the documents, the last epoch's at most once."""
    num_tokens = sum(map(len, documents))
    epochs = [tokens[begin : begin + num_tokens] for begin in range(0, len(tokens), num_tokens)]
    *complete, last = epochs
    everything = numpy.sort(numpy.concatenate(documents))
    for epoch in complete:
        assert numpy.array_equal(numpy.sort(epoch), everything)
    assert len(numpy.unique(last)) == len(last)
    assert set(last) <= set(everything)
    for one, other in pairwise(complete):
        assert not numpy.array_equal(one, other)
    return len(complete)


def test_every_token_is_read_once_before_any_is_read_twice(tmp_path):
    documents = uneven_documents(100, seed=5)
    prefix = write_token_file(tmp_path / "web", documents)
    tokens = train_tokens(tmp_path, prefix, 1000, NEW, "model.data.splits_string='80,20,0'").flatten()
    assert check_epochs(tokens, documents[:80]) >= 5


def test_tokens_of_every_file_of_a_blend_are_read_once_before_any_is_read_twice(tmp_path):
    web, code = uneven_documents(60, seed=6), uneven_documents(200, seed=7, first_token=10_000)
    blend = f"0.7,{write_token_file(tmp_path / 'web', web)},0.3,{write_token_file(tmp_path / 'code', code)}"
    tokens = train_tokens(tmp_path, blend, 2000, NEW, "model.data.splits_string='90,10,0'")
    is_code = tokens[:, 0] >= 10_000
    assert is_code.mean() == pytest.approx(0.3, abs=0.001)
    assert check_epochs(tokens[~is_code].flatten(), web[:54]) >= 10
    assert check_epochs(tokens[is_code].flatten(), code[:180]) >= 1


def test_the_first_samples_are_the_same_however_many_follow(tmp_path):
    web = write_token_file(tmp_path / "web", uneven_documents(40, seed=8))
    code = write_token_file(tmp_path / "code", uneven_documents(90, seed=9, first_token=5000))
    for prefix in (web, f"0.55,{web},0.45,{code}"):
        longest = train_tokens(tmp_path, prefix, 500)
        for num_samples in (1, 40, 60, 61, 62, 120, 121, 333):
            tokens = train_tokens(tmp_path, prefix, num_samples)
            assert numpy.array_equal(tokens, longest[:num_samples]), num_samples
    # An epoch that ends with a sample, whose last label is the next epoch's first token.
    aligned = write_token_file(tmp_path / "aligned", SAMPLES[:40])
    longest = train_tokens(tmp_path, aligned, 200)
    for num_samples in (38, 39, 40, 41, 78, 79):
        assert numpy.array_equal(train_tokens(tmp_path, aligned, num_samples), longest[:num_samples]), num_samples


def test_labels_are_the_next_tokens_across_the_end_of_an_epoch(tmp_path):
    documents = uneven_documents(30, seed=10)
    config, corpus = corpus_of(tmp_path, write_token_file(tmp_path / "web", documents))
    dataset, _ = build_datasets(config, corpus, num_train_samples=300)
    follows = {one: other for document in documents for one, other in pairwise(document)}
    for index in range(300):
        sample = dataset[index]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            # The last token of a document is followed by any document's first.
            assert follows.get(token, label) == label


def digest(tokens):
    return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()[:16]


# What version 0.1.0 read before it had an order of its own.
@pytest.mark.parametrize(
    ("num_samples", "recorded"),
    [(800, "0c87953ce75cb4ce"), (1600, "b53fc4695c2d61b9"), (2000, "cc7cfc63a43d6e81")],
)
def test_an_old_checkpoint_keeps_its_order_bit_for_bit(num_samples, recorded, tmp_path):
    prefix = write_token_file(tmp_path / "samples", SAMPLES)
    everything = ["model.data.splits_string='1'", "trainer.limit_val_batches=0"]
    assert digest(train_tokens(tmp_path, prefix, num_samples, OLD, *everything)) == recorded
    # One cache holds the indices of both orders.
    assert digest(train_tokens(tmp_path, prefix, num_samples, NEW, *everything)) != recorded
    assert digest(train_tokens(tmp_path, prefix, num_samples, OLD, *everything)) == recorded


def test_an_old_checkpoint_keeps_the_order_of_its_blend_bit_for_bit(tmp_path):
    web = write_token_file(tmp_path / "a", SAMPLES[:100])
    code = write_token_file(tmp_path / "b", [[1000 + number] * (7 + number % 30) for number in range(100)])
    config, corpus = corpus_of(tmp_path, f"0.7,{web},0.3,{code}", OLD)
    datasets = build_datasets(config, corpus, num_train_samples=400)
    read = [torch.stack([each[index]["tokens"] for index in range(len(each))]).numpy() for each in datasets]
    assert list(map(digest, read)) == ["ae96bde1126402c7", "1aef4ec84cac1e8a"]


def test_a_run_goes_on_in_the_order_of_its_checkpoint(tmp_path, cache_dir):
    """A checkpoint that does not name its order is an older one's; the run's next checkpoint does not either."""
    short = ["model.encoder_seq_length=32", "trainer.limit_val_batches=0", f"model.data.cache_dir={tmp_path / 'cache'}"]
    shutil.copytree(cache_dir, tmp_path / "cache")
    run_small(1, tmp_path / "new", cache_dir, [*short, "trainer.max_steps=2"])
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "new", old)
    checkpoint = old / "checkpoints" / "step_00000002"
    manifest = read_manifest(checkpoint)
    assert manifest.data[ORDER] == "epoch by epoch"
    data = {name: value for name, value in manifest.data.items() if name != ORDER}
    write_manifest(checkpoint, replace(manifest, data=data))
    told, losses = {}, {}
    for run_dir in (old, tmp_path / "new"):
        before = indices(tmp_path)
        done = fork_ranks(1, small_run_arguments(run_dir, cache_dir, [*short, "trainer.max_steps=4"]))
        assert done.returncode == 0, done.stderr[-4000:]
        built = {"EpochDataset" if "EpochDataset" in name else "GPTDataset" for name in indices(tmp_path) - before}
        assert built == {"GPTDataset" if run_dir == old else "EpochDataset"}
        told[run_dir.name] = "the order of samples of the version that began it" in " ".join(done.stdout.split())
        losses[run_dir.name] = [record.loss for record in load_metrics(run_dir).train]
        saved = json.loads((run_dir / "checkpoints" / "step_00000004" / "manifest.json").read_text())
        assert (ORDER in saved["data"]) == (run_dir != old)
    assert told == {"old": True, "new": False}
    assert losses["old"][:2] == losses["new"][:2]
    assert losses["old"][2:] != losses["new"][2:]


def indices(tmp_path):
    return {path.name for path in (tmp_path / "cache" / "index").glob("*/*.npy")}
