"""In which order a run reads its documents, counted from the tokens of its samples."""

from dataclasses import replace
from itertools import pairwise

import numpy
import pytest
import torch

from gpt_pretrain.checkpoint.manifest import read_manifest, write_manifest
from gpt_pretrain.data.corpus import ORDER, prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.token_files import split_of_documents
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.runs import SMALL_RUN, run_small, small_run_arguments
from tests.token_files import SEQUENCE_LENGTH, counting_documents, data_config, write_token_file

VOCABULARY = "model.vocab_size=20000"
# Each is one sample, and its tokens are its number.
SAMPLES = [[number] * SEQUENCE_LENGTH for number in range(1000)]


def corpus_of(tmp_path, prefix, *overrides):
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{prefix}]", *overrides, VOCABULARY)
    return config, prepare_corpus(config, show_progress=False)


def train_tokens(tmp_path, prefix, num_samples, *overrides):
    """int64 [num_samples, s]"""
    config, corpus = corpus_of(tmp_path, prefix, *overrides)
    dataset, _ = build_datasets(config, corpus, num_train_samples=num_samples)
    return torch.stack([dataset[index]["tokens"] for index in range(num_samples)]).numpy()


def whole(tmp_path, num_samples):
    """The document of each sample, of 1,000 that all are for training."""
    prefix = write_token_file(tmp_path / "samples", SAMPLES)
    tokens = train_tokens(tmp_path, prefix, num_samples, "model.data.splits_string='1'", "trainer.limit_val_batches=0")
    return tokens[:, 0]


# In megatron-core's order 67 documents were never read, and 100 three times.
def test_a_run_of_four_fifths_of_an_epoch_that_is_made_twice_as_long(tmp_path):
    read = numpy.concatenate([whole(tmp_path, 800), whole(tmp_path, 1600)[800:]])
    times = numpy.bincount(read, minlength=1000)
    assert numpy.bincount(times, minlength=4).tolist() == [0, 400, 600, 0]


# In megatron-core's order 240 are missing.
def test_the_first_999_samples_of_two_epochs_of_1000_documents(tmp_path):
    assert 1000 - len(set(whole(tmp_path, 2000)[:999].tolist())) == 1


def uneven_documents(num_documents, seed, first_token=0):
    """Documents of 0 to 60 tokens; all tokens differ."""
    lengths = numpy.random.default_rng(seed).integers(0, 61, num_documents)
    ends = first_token + numpy.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def training_of(documents, splits):
    """tests/test_data_token_files.py shows what they are."""
    found = split_of_documents(len(documents), splits)
    return [document for document, split in zip(documents, found, strict=True) if split == 0]


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
    tokens = train_tokens(tmp_path, prefix, 1000, "model.data.splits_string='80,20,0'").flatten()
    assert check_epochs(tokens, training_of(documents, "80,20,0")) >= 5


def test_tokens_of_every_file_of_a_blend_are_read_once_before_any_is_read_twice(tmp_path):
    web, code = uneven_documents(60, seed=6), uneven_documents(200, seed=7, first_token=10_000)
    blend = f"0.7,{write_token_file(tmp_path / 'web', web)},0.3,{write_token_file(tmp_path / 'code', code)}"
    tokens = train_tokens(tmp_path, blend, 2000, "model.data.splits_string='90,10,0'")
    is_code = tokens[:, 0] >= 10_000
    assert is_code.mean() == pytest.approx(0.3, abs=0.001)
    assert check_epochs(tokens[~is_code].flatten(), training_of(web, "90,10,0")) >= 10
    assert check_epochs(tokens[is_code].flatten(), training_of(code, "90,10,0")) >= 1


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


def test_the_first_losses_are_the_same_however_long_the_run_is(tmp_path, cache_dir):
    """With a schedule of its own, runs of two and of three epochs begin alike."""
    prefix = write_token_file(tmp_path / "web", counting_documents(20, 40))
    sizes = [each for each in SMALL_RUN if not each.startswith(("data=", "model.data.", "model.tokenizer"))]
    fixed = ["model.encoder_seq_length=16", "model.vocab_size=1024", "model.optim.sched.decay_steps=100"]
    files = ["data=mmap", f"model.data.data_prefix=[{prefix}]", "model.data.splits_string='1'"]
    sizes.remove("trainer.val_check_interval=10")
    off = ["trainer.limit_val_batches=0", f"model.data.cache_dir={tmp_path / 'cache'}"]
    losses = []
    for max_steps in (12, 19):
        run = [f"run_dir={tmp_path / str(max_steps)}", f"trainer.max_steps={max_steps}"]
        done = fork_ranks(1, ["-m", "gpt_pretrain", *sizes, *fixed, *files, *off, *run])
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append([record.loss for record in load_metrics(tmp_path / str(max_steps)).train][:10])
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


@pytest.mark.parametrize("order", [None, "epoch by epoch"])
def test_a_checkpoint_of_another_order_is_refused_with_the_key_that_accepts_a_new_one(order, tmp_path, cache_dir):
    short = ["model.encoder_seq_length=32", "trainer.limit_val_batches=0"]
    run_dir = tmp_path / "run"
    run_small(1, run_dir, cache_dir, [*short, "trainer.max_steps=2"])
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    manifest = read_manifest(checkpoint)
    data = {name: value for name, value in manifest.data.items() if name != ORDER} | ({ORDER: order} if order else {})
    write_manifest(checkpoint, replace(manifest, data=data))
    longer = [*short, "trainer.max_steps=4"]
    refused = fork_ranks(1, small_run_arguments(run_dir, cache_dir, longer))
    assert refused.returncode == 2
    assert "another order" in refused.stderr
    assert "checkpoint.allow_data_change=true" in refused.stderr
    run_small(1, run_dir, cache_dir, [*longer, "checkpoint.allow_data_change=true"])
    assert read_manifest(run_dir / "checkpoints" / "step_00000004").data[ORDER] == manifest.data[ORDER]
