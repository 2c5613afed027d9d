import base64
import json
import os
import re
import subprocess
import sys

import pytest
import sentencepiece
import tiktoken
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


def word_level(path, vocab, special=(), **settings):
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    if settings:
        backend.enable_truncation(max_length=settings["max_length"])
        backend.enable_padding(length=8)
    backend.save(str(path))


@pytest.mark.parametrize("token", ["</s>", "<|end_of_text|>", "<eos>"])
def test_a_tokenizer_file_tells_its_end_of_document_token(tmp_path, token):
    word_level(tmp_path / "t.json", {"<unk>": 0, "a": 1, token: 9}, [token])
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.eod_token, tokenizer.eod) == (token, 9)
    assert tokenizer.vocab_size == 10, "an id beyond the number of tokens needs a row of the embedding too"


def test_truncation_and_padding_of_a_tokenizer_file_do_not_touch_documents(tmp_path):
    vocab = {"<unk>": 0, "a": 1, "</s>": 2}
    word_level(tmp_path / "t.json", vocab, ["</s>"], max_length=3)
    word_level(tmp_path / "plain.json", vocab, ["</s>"])
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.encode("a a a a a"), tokenizer.encode("a")) == ([1] * 5, [1])
    assert tokenizer.fingerprint == load_tokenizer(tmp_path / "plain.json").fingerprint


def test_a_tokenizer_without_end_of_document_names_the_candidates(tmp_path):
    word_level(tmp_path / "t.json", {"<unk>": 0, "a": 1})
    with pytest.raises(UserError, match=re.escape("<|endoftext|>, <|end_of_text|>")):
        load_tokenizer(tmp_path / "t.json")


def test_an_ordinary_token_never_ends_a_document_unless_a_key_names_it(tmp_path):
    """Gemma's </s> is an HTML tag among its ordinary tokens, and <eos> is the special one."""
    gemma = {"<unk>": 0, "a": 1, "</s>": 2, "<eos>": 3}
    word_level(tmp_path / "gemma.json", gemma, ["<eos>"])
    assert load_tokenizer(tmp_path / "gemma.json").eod == 3
    named = load_tokenizer(tmp_path / "gemma.json", eod_token="</s>")
    assert (named.eod_token, named.eod) == ("</s>", 2)
    with pytest.raises(UserError, match=r"model\.tokenizer\.eod_token=<end> .*gemma\.json.* are <eos>$"):
        load_tokenizer(tmp_path / "gemma.json", eod_token="<end>")
    word_level(tmp_path / "ordinary.json", {"<unk>": 0, "a": 1, "</s>": 2})
    with pytest.raises(UserError, match=r"\(</s> is an ordinary token\); .*model\.tokenizer\.eod_token"):
        load_tokenizer(tmp_path / "ordinary.json")


# What SentencePiece writes: the first pieces of a vocabulary, as protocol buffers.
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03\xff"


@pytest.mark.parametrize(
    ("name", "content", "kind", "command"),
    [
        ("tokenizer.model", SENTENCEPIECE, "SentencePiece", "LlamaTokenizer as L; "),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken", "TikTokenConverter as C; C('{folder}/tokenizer.model'"),
        ("cl100k_base.tiktoken", b"IQ== 0\r\nIg== 1\r\n", "tiktoken", "C('{folder}/cl100k_base.tiktoken'"),
    ],
)
def test_a_tokenizer_of_another_format_is_answered_with_the_command_that_converts_it(
    name, content, kind, command, tmp_path
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"model.tokenizer.model=.* a file of {kind}; convert it: ") as refused:
        load_tokenizer(tmp_path / name)
    assert command.format(folder=tmp_path) in str(refused.value)


# Llama 3's words (huggingface meta-llama/Meta-Llama-3-8B, tokenizer.json).
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = ("The first\n\n  line of a text", " two  spaces é 漢", "</s> is a tag", "\n\tx", "a")


def told_command(path):
    """The Python program of the command that a refusal tells."""
    with pytest.raises(UserError) as refused:
        load_tokenizer(path)
    return re.search(r'python -c "([^"]*)"', str(refused.value))[1]


def convert(path):
    """Carries it out in the file's folder."""
    command = [sys.executable, "-c", told_command(path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("puts_a_space_before", [True, False])
def test_a_converted_sentencepiece_model_makes_its_tokens(puts_a_space_before, tmp_path):
    train_sentencepiece(tmp_path, model_type="bpe", add_dummy_prefix=puts_a_space_before)
    done = convert(tmp_path / "tokenizer.model")
    assert done.returncode == 0, done.stderr[-2000:]
    converted = load_tokenizer(tmp_path / "tokenizer.json")
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert [converted.encode(text) for text in SAMPLES] == original.encode(list(SAMPLES))
    assert converted.eod_token == "</s>"


def test_a_sentencepiece_model_that_the_command_would_change_is_refused_by_it(tmp_path):
    train_sentencepiece(tmp_path, model_type="unigram")
    assert "no plain BPE" in convert(tmp_path / "tokenizer.model").stderr
    assert not (tmp_path / "tokenizer.json").exists()


def train_sentencepiece(folder, **options):
    """Of the settings of Llama's and Gemma's, on this file."""
    sentencepiece.SentencePieceTrainer.train(
        input=__file__,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )


def test_a_converted_tiktoken_file_makes_its_tokens(tmp_path):
    words = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", b"in", b" th", b"\n\n"]
    lines = (base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(words))
    (tmp_path / "x.tiktoken").write_bytes(b"".join(lines))
    done = convert(tmp_path / "x.tiktoken")
    assert done.returncode == 0, done.stderr[-2000:]
    converted = load_tokenizer(tmp_path / "tokenizer.json")
    ranks = {word: rank for rank, word in enumerate(words)}
    original = tiktoken.Encoding("x", pat_str=LLAMA_3_WORDS, mergeable_ranks=ranks, special_tokens={})
    assert [converted.encode(text) for text in SAMPLES] == original.encode_ordinary_batch(list(SAMPLES))
    assert (converted.eod_token, converted.eod) == ("<|endoftext|>", len(words))


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
