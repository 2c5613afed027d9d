import os
import re

import numpy
import pytest

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.check import check_token_file, check_token_ids, content_fingerprint
from gpt_pretrain.data.progress import Progress
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
    assert file.lengths().tolist() == [20] * 10


def test_a_sound_file_of_multimodal_data_is_accepted(prefix):
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(10))
    assert check_token_file(prefix).num_tokens == 200


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, suffix):
    os.remove(prefix + suffix)
    with pytest.raises(UserError, match=re.escape(f"{prefix}{suffix} does not exist")):
        check_token_file(prefix)


def test_a_prefix_with_its_suffix_is_explained(prefix):
    with pytest.raises(UserError, match=r"name the path without \.bin and \.idx"):
        check_token_file(prefix + ".bin")


# 34 bytes of header, 10 × (int32 length + int64 offset), 11 × int64 boundaries; 200 tokens of two bytes.
@pytest.mark.parametrize(
    ("suffix", "num_bytes", "message"),
    [
        (".idx", 0, "truncated: it has 0 bytes, its header alone has 34"),
        (".idx", 20, "truncated: it has 20 bytes, its header alone has 34"),
        (".idx", 34, r"truncated: it has 34 bytes, its header \(10 documents\) implies 242"),
        (".idx", 241, r"truncated: it has 241 bytes, its header \(10 documents\) implies 242"),
        (".idx", 243, "damaged: it has 243 bytes"),
        (".bin", 0, r"truncated: it has 0 bytes, web.idx \(200 tokens of uint16\) implies 400"),
        (".bin", 399, r"truncated: it has 399 bytes, web.idx \(200 tokens of uint16\) implies 400"),
        (".bin", 402, "longer than its index says: it has 402 bytes, .* implies 400"),
    ],
)
def test_a_file_of_the_wrong_size_is_refused_with_both_byte_counts(prefix, suffix, num_bytes, message):
    os.truncate(prefix + suffix, num_bytes)
    with pytest.raises(UserError, match=message):
        check_token_file(prefix)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"x", "is no megatron-core index"),
        (9, b"\x02", "has index version 2; version 1 is known"),
        (17, b"\x63", "unknown token type code 99"),
        (17, b"\x07", "its tokens are float32; token ids are whole numbers"),
    ],
)
def test_a_damaged_header_is_refused(prefix, position, value, message):
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(position)
        file.write(value)
    with pytest.raises(UserError, match=message):
        check_token_file(prefix)


@pytest.mark.parametrize(
    ("documents", "message"), [([], "holds no document"), ([[], []], "no token: all 2 documents are empty")]
)
def test_a_file_without_documents_or_with_empty_ones_only_is_refused(tmp_path, documents, message):
    with pytest.raises(UserError, match=message):
        check_token_file(write_token_file(tmp_path / "x", documents))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (HEADER_BYTES + 40 + 8 * 3, "its offsets do not follow from its lengths"),
        (HEADER_BYTES + 40 + 80 + 8 * 10, "its last document ends with sequence"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(prefix, tmp_path, position, message):
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(position)
        file.write(b"\x07")
    with pytest.raises(UserError, match=message):
        check_ids(prefix, 1000, tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_with_position_and_document(prefix, tmp_path):
    check_ids(prefix, 200, tmp_path)
    with pytest.raises(UserError, match=r"web.bin: token id 150 at position 150 \(document 7\) is outside .*=150;"):
        check_ids(prefix, 150, tmp_path)


def test_a_negative_token_is_outside_the_vocabulary(tmp_path):
    prefix = write_token_file(tmp_path / "x", [[1, 2], [], [3, -1]], numpy.int32)
    with pytest.raises(UserError, match=r"token id -1 at position 3 \(document 2\)"):
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
    with pytest.raises(UserError, match="token id 9999 at position 5"):
        check_ids(prefix, 200, tmp_path)


def test_the_content_fingerprint_follows_the_content_and_not_the_place(prefix, tmp_path):
    (tmp_path / "copy").mkdir()
    copy = write_token_file(tmp_path / "copy" / "other_name", DOCUMENTS)
    assert content_fingerprint(check_token_file(copy)) == content_fingerprint(check_token_file(prefix))
    changed = write_token_file(tmp_path / "changed", [*DOCUMENTS[:-1], [0] * 20])
    assert content_fingerprint(check_token_file(changed)) != content_fingerprint(check_token_file(prefix))
