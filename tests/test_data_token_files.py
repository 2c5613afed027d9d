import decimal
import os
import re
from decimal import Decimal
from pathlib import Path

import numpy
import pytest

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.cache import Progress
from gpt_pretrain.data.token_files import (
    check_splits,
    check_token_file,
    check_token_ids,
    content_fingerprint,
    split_of_documents,
    split_sizes,
)
from tests.token_files import counting_documents, write_token_file

HEADER_BYTES = 34
DOCUMENTS = counting_documents(10, 20)


@pytest.fixture
def prefix(tmp_path):
    return write_token_file(tmp_path / "web", DOCUMENTS)


def check_ids(prefix, vocab_size, cache):
    with Progress(show=False) as progress:
        check_token_ids(check_token_file(prefix), vocab_size, cache, progress)


def test_a_sound_file_is_described(prefix):
    file = check_token_file(prefix)
    assert (file.num_documents, file.num_tokens, file.dtype) == (10, 200, numpy.uint16)
    assert file.lengths.tolist() == [20] * 10


def test_a_sound_file_of_multimodal_data_is_accepted(prefix):
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(10))
    assert check_token_file(prefix).num_tokens == 200


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, suffix):
    os.remove(prefix + suffix)
    with pytest.raises(UserError, match=re.escape(f"{prefix}{suffix} ")):
        check_token_file(prefix)


def test_a_prefix_with_its_suffix_is_explained(prefix):
    with pytest.raises(UserError, match=r"web\.bin\.bin .*; .*\.bin.*\.idx"):
        check_token_file(prefix + ".bin")


def test_a_missing_pair_is_answered_with_the_keys_that_train_on_text(tmp_path):
    with pytest.raises(UserError, match=r"corpus\.bin .*model\.data\.data_prefix=\[\].*model\.data\.text_files"):
        check_token_file(str(tmp_path / "corpus"))


def test_a_folder_is_answered_with_its_pairs(prefix):
    folder = Path(prefix).parent
    with pytest.raises(UserError, match=re.escape(f"; {folder} is a folder: name its pairs, [{prefix}]")):
        check_token_file(str(folder))


@pytest.mark.parametrize("named", ["", "/00000_tokens", "/00000_tokens.ds"])
def test_the_token_files_of_datatrove_are_answered_with_what_writes_pairs(named, tmp_path):
    (tmp_path / "00000_tokens.ds").touch()
    with pytest.raises(UserError, match="MegatronDocumentTokenizer"):
        check_token_file(f"{tmp_path}{named}")


# 34 bytes of header, 10 × (int32 length + int64 offset), 11 × int64 boundaries; 200 tokens of two bytes.
@pytest.mark.parametrize(
    ("suffix", "num_bytes", "needed"),
    [
        (".idx", 0, 34),
        (".idx", 20, 34),
        (".idx", 34, 242),
        (".idx", 241, 242),
        (".idx", 243, 242),
        (".bin", 0, 400),
        (".bin", 399, 400),
        (".bin", 402, 400),
    ],
)
def test_a_file_of_the_wrong_size_is_refused_with_both_byte_counts(prefix, suffix, num_bytes, needed):
    os.truncate(prefix + suffix, num_bytes)
    with pytest.raises(UserError, match=rf"web\{suffix} .*\b{num_bytes} bytes.*\b{needed}\b") as caught:
        check_token_file(prefix)
    assert ("truncated" in str(caught.value)) == (num_bytes < needed)


@pytest.mark.parametrize(
    ("position", "value", "named"),
    [
        (0, b"x", "b'xMIDIDX"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "99"),
        (17, b"\x07", "float32"),
    ],
)
def test_a_damaged_header_is_refused(prefix, position, value, named):
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(position)
        file.write(value)
    with pytest.raises(UserError, match=rf"web\.idx .*{named}"):
        check_token_file(prefix)


@pytest.mark.parametrize(("documents", "named"), [([], r"x\.idx"), ([[], []], r"x\.bin .*\b2 documents")])
def test_a_file_without_documents_or_with_empty_ones_only_is_refused(tmp_path, documents, named):
    with pytest.raises(UserError, match=named):
        check_token_file(write_token_file(tmp_path / "x", documents))


@pytest.mark.parametrize(
    ("position", "named"),
    [(HEADER_BYTES + 40 + 8 * 3, "offsets"), (HEADER_BYTES + 40 + 80 + 8 * 10, "sequence 7, .* 10;")],
)
def test_an_index_that_contradicts_itself_is_refused(prefix, tmp_path, position, named):
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(position)
        file.write(b"\x07")
    with pytest.raises(UserError, match=rf"web\.idx .*{named}"):
        check_ids(prefix, 1000, tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_with_position_and_document(prefix, tmp_path):
    check_ids(prefix, 200, tmp_path)
    with pytest.raises(UserError, match=r"web\.bin: .*\b150 .*\b150 .*\b7\b.*model\.vocab_size=150;.* 0 to 199"):
        check_ids(prefix, 150, tmp_path)


def test_a_negative_token_is_outside_the_vocabulary(tmp_path):
    prefix = write_token_file(tmp_path / "x", [[1, 2], [], [3, -1]], numpy.int32)
    with pytest.raises(UserError, match=r" -1 .*\b3 .*\b2\b"):
        check_ids(prefix, 100, tmp_path)


def test_a_passed_scan_is_remembered_until_the_file_changes(prefix, tmp_path):
    check_ids(prefix, 200, tmp_path)
    path, before = f"{prefix}.bin", os.stat(f"{prefix}.bin")
    tokens = numpy.fromfile(path, dtype=numpy.uint16)
    tokens[5] = 9999
    tokens.tofile(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    check_ids(prefix, 200, tmp_path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"\b9999 .*\b5 "):
        check_ids(prefix, 200, tmp_path)


def test_the_content_fingerprint_follows_the_content_and_not_the_place(prefix, tmp_path):
    (tmp_path / "copy").mkdir()
    copy = write_token_file(tmp_path / "copy" / "other_name", DOCUMENTS)
    assert content_fingerprint(check_token_file(copy)) == content_fingerprint(check_token_file(prefix))
    changed = write_token_file(tmp_path / "changed", [*DOCUMENTS[:-1], [0] * 20])
    assert content_fingerprint(check_token_file(changed)) != content_fingerprint(check_token_file(prefix))


def by_the_golden_ratio(num_documents):
    """Documents in the order of the fractional parts of the multiples of 1 over the golden ratio, with 40 digits."""
    with decimal.localcontext(prec=40):
        step = (Decimal(5).sqrt() - 1) / 2
        return sorted(range(num_documents), key=lambda number: number * step % 1)


# megatron-core's rounding: to the nearest document, halves to even.
@pytest.mark.parametrize(
    ("splits", "documents"),
    [
        ("1", (10, 0, 0)),
        ("900,50,50", (9, 1, 0)),
        ("80,20", (8, 2, 0)),
        ("8,1,1", (8, 1, 1)),
        ("0.5,0.25,0.25", (5, 3, 2)),
        ("0.5,0,0.5", (5, 0, 5)),
    ],
)
def test_splits_are_shares_of_the_documents(tmp_path, splits, documents):
    file = check_token_file(write_token_file(tmp_path / "x", [[0] * n for n in range(1, 11)]))
    sizes = split_sizes(file, splits)
    assert tuple(size.num_documents for size in sizes) == documents
    order, begin = by_the_golden_ratio(10), 0
    for size in sizes:
        # Document n has n + 1 tokens.
        assert size.num_tokens == sum(number + 1 for number in order[begin : begin + size.num_documents])
        begin += size.num_documents


@pytest.mark.parametrize("num_documents", [100, 1000, 99_991])
def test_every_split_is_an_even_sample_of_the_whole_file(num_documents):
    found = split_of_documents(num_documents, "90,5,5")
    order = by_the_golden_ratio(num_documents)
    ends = round(0.9 * num_documents), round(0.95 * num_documents)
    assert sorted(numpy.flatnonzero(found == 0)) == sorted(order[: ends[0]])
    assert sorted(numpy.flatnonzero(found == 1)) == sorted(order[ends[0] : ends[1]])
    for tenth in numpy.array_split(found, 10):
        assert (tenth == 1).sum() == pytest.approx(0.05 * len(tenth), abs=3)


def test_a_split_that_cannot_fill_one_sample_is_refused_with_the_counts(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(10, 20)))
    check = {"sequence_length": 19, "with_validation": True}
    check_splits(file, "8,1,1", **check)
    with pytest.raises(UserError, match=r"validation .*\b1 .*\b20 .*model\.encoder_seq_length=20 .*\b21 ") as caught:
        check_splits(file, "8,1,1", **{**check, "sequence_length": 20})
    assert "training 8 documents with 160 tokens" in str(caught.value)
    assert "model.data.splits_string='8,1,1'" in str(caught.value)
    assert "trainer.limit_val_batches=0" in str(caught.value)


def test_a_sequence_longer_than_the_corpus_is_refused(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(10, 20)))
    with pytest.raises(UserError, match=r"training .*\b10 .*\b200 .*=200 .*\b201 "):
        check_splits(file, "1", sequence_length=200, with_validation=False)


def test_a_validation_split_without_documents_is_refused_only_if_the_run_validates(tmp_path):
    file = check_token_file(write_token_file(tmp_path / "x", counting_documents(2, 50)))
    check_splits(file, "900,50,50", sequence_length=16, with_validation=False)
    with pytest.raises(UserError, match=r"validation .*\b0 .*\b0 "):
        check_splits(file, "900,50,50", sequence_length=16, with_validation=True)
