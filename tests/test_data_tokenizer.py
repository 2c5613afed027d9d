import json
import re

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.tokenizer import load_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass  # ünïcode 😀\n" * 20]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 280)


@pytest.mark.parametrize("text", ["def f(x):", "  \n\t x", "ünïcode 😀 漢字", "", "\x00\r\n"])
def test_any_text_survives_the_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer_and_other_text_another(bpe):
    assert train_bpe(iter(TEXTS), 280).fingerprint == bpe.fingerprint
    assert train_bpe(TEXTS, 281).fingerprint != bpe.fingerprint


def test_a_saved_tokenizer_loads_with_the_same_tokens_and_fingerprint(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.fingerprint, loaded.vocab_size, loaded.eod) == (bpe.fingerprint, 280, bpe.eod)
    assert loaded.encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_the_end_of_a_document_cannot_be_forged_by_text(bpe):
    assert bpe.eod_token == "<|endoftext|>"
    ids = bpe.encode("a<|endoftext|>b")
    assert bpe.eod not in ids
    assert bpe.decode(ids) == "a<|endoftext|>b"


def test_ids_beyond_the_vocabulary_decode_to_nothing(bpe):
    assert bpe.decode([*bpe.encode("x"), 280, 5000]) == "x"


def word_level(path, vocab, **settings):
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if settings:
        backend.enable_truncation(max_length=settings["max_length"])
        backend.enable_padding(length=8)
    backend.save(str(path))


@pytest.mark.parametrize("token", ["</s>", "<|end_of_text|>", "<eos>"])
def test_a_tokenizer_file_tells_its_end_of_document_token(tmp_path, token):
    word_level(tmp_path / "t.json", {"<unk>": 0, "a": 1, token: 9})
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.eod_token, tokenizer.eod) == (token, 9)
    assert tokenizer.vocab_size == 10, "an id beyond the number of tokens needs a row of the embedding too"


def test_truncation_and_padding_of_a_tokenizer_file_do_not_touch_documents(tmp_path):
    vocab = {"<unk>": 0, "a": 1, "</s>": 2}
    word_level(tmp_path / "t.json", vocab, max_length=3)
    word_level(tmp_path / "plain.json", vocab)
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.encode("a a a a a"), tokenizer.encode("a")) == ([1] * 5, [1])
    assert tokenizer.fingerprint == load_tokenizer(tmp_path / "plain.json").fingerprint


def test_a_tokenizer_without_end_of_document_names_the_candidates(tmp_path):
    word_level(tmp_path / "t.json", {"<unk>": 0, "a": 1})
    with pytest.raises(UserError, match=re.escape("<|endoftext|>, <|end_of_text|>")):
        load_tokenizer(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not a Hugging Face"), (json.dumps({"a": 1}), "is not a Hugging Face")],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"model.tokenizer.model={re.escape(str(path))} {message}"):
        load_tokenizer(path)


def test_a_directory_instead_of_a_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer\.model=.*tokenizer\.json$"):
        load_tokenizer(tmp_path)
