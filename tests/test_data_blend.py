import re

import pytest

from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.data.blend import check_splits, plan_blend, split_sizes
from gpt_pretrain.data.check import check_token_file
from tests.token_files import counting_documents, write_token_file


@pytest.mark.parametrize(
    ("entries", "prefixes", "weights"),
    [
        (["/a"], ("/a",), None),
        (["/a", "/b"], ("/a", "/b"), None),
        ([0.7, "/a", 0.3, "/b"], ("/a", "/b"), (0.7, 0.3)),
        (["70", "/a", 30, "/b"], ("/a", "/b"), (0.7, 0.3)),
        ([0.3333, "/a", 0.3333, "/b", 0.3333, "/c"], ("/a", "/b", "/c"), (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_prefixes_come_alone_or_with_shares(entries, prefixes, weights):
    assert plan_blend(entries)[0] == prefixes
    assert plan_blend(entries)[1] == (None if weights is None else pytest.approx(weights))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [0.7, "/a", 0.2, "/b"],
            "the weights 0.7, 0.2 have the sum 0.9; they must sum to 1 or 100. .*=[0.7778,/a,0.2222,/b]",
        ),
        ([3, "/a", 1, "/b"], "the weights 3, 1 have the sum 4; .*=[0.75,/a,0.25,/b]"),
        ([70, "/a", 29, "/b"], "have the sum 99"),
    ],
)
def test_weights_that_do_not_sum_are_refused_with_the_ones_that_do(entries, message):
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        plan_blend(entries)


# 10 documents of 1 to 10 tokens; megatron-core rounds the borders to the nearest document, halves to even.
@pytest.mark.parametrize(
    ("splits", "documents", "tokens"),
    [
        ("1", (10, 0, 0), (55, 0, 0)),
        ("900,50,50", (9, 1, 0), (45, 10, 0)),
        ("80,20", (8, 2, 0), (36, 19, 0)),
        ("8,1,1", (8, 1, 1), (36, 9, 10)),
        ("0.5,0.25,0.25", (5, 3, 2), (15, 21, 19)),
    ],
)
def test_splits_are_contiguous_shares_of_the_documents(tmp_path, splits, documents, tokens):
    file = check_token_file(write_token_file(tmp_path / "x", [[0] * n for n in range(1, 11)]))
    sizes = split_sizes(file, splits)
    assert tuple(size.num_documents for size in sizes) == documents
    assert tuple(size.num_tokens for size in sizes) == tokens


def test_a_split_that_cannot_fill_one_sample_is_refused_with_the_counts(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(10, 20)))
    check = {"sequence_length": 19, "with_validation": True}
    check_splits(file, "8,1,1", **check)
    with pytest.raises(UserError) as caught:
        check_splits(file, "8,1,1", **{**check, "sequence_length": 20})
    message = str(caught.value)
    assert "the validation split has 1 documents with 20 tokens" in message
    assert "model.encoder_seq_length=20 needs 21" in message
    assert "training 8 documents with 160 tokens, validation 1 documents with 20 tokens, test 1 documents" in message
    assert "trainer.limit_val_batches=0" in message


def test_a_sequence_longer_than_the_corpus_is_refused(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(10, 20)))
    with pytest.raises(UserError, match=r"the training split has 10 documents with 200 tokens, .*=200 needs 201"):
        check_splits(file, "1", sequence_length=200, with_validation=False)


def test_a_validation_split_without_documents_is_refused_only_if_the_run_validates(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(2, 50)))
    check_splits(file, "900,50,50", sequence_length=16, with_validation=False)
    with pytest.raises(UserError, match="the validation split has 0 documents with 0 tokens"):
        check_splits(file, "900,50,50", sequence_length=16, with_validation=True)
