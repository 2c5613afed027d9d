"""Bits per byte of a validation: bytes counted from the tokenizer, against texts and a table of bytes of one's own."""

import json
import math

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.text_bytes import count_tokens_and_bytes, token_bytes, why_unknown
from gpt_pretrain.data.tokenizer import load_tokenizer, train_bpe
from gpt_pretrain.rules.jobs import load_config
from tests.runs import SMALL_RUN, run_small, small_corpus

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass  # ünïcode 😀\n" * 20]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


def bytes_by_hand(token):
    """GPT-2's table: printable characters of Latin-1 are themselves, the others stand from 256 on in their order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    of = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return bytes(of[character] for character in token)


@pytest.mark.parametrize(
    "text", ["def f(x):", "  \n\t x", "ünïcode 😀 漢字", "", "\x00\r\n", "a<|endoftext|>b", "e\u0301 ﬁ", "\u2028"]
)
def test_the_tokens_of_any_text_have_its_bytes(bpe, text):
    assert why_unknown(bpe) is None
    assert token_bytes(bpe)[bpe.encode(text)].sum() == len(text.encode())


def test_each_token_has_the_bytes_of_its_characters_and_the_end_of_a_document_none(bpe):
    words = json.loads(bpe.to_json())["model"]["vocab"]
    counts = token_bytes(bpe)
    assert counts[bpe.eod] == 0
    for word, token in words.items():
        if token != bpe.eod:
            assert counts[token] == len(bytes_by_hand(word)), word
    text = "ünï 😀"
    rows = {token: word for word, token in words.items()}
    assert b"".join(bytes_by_hand(rows[token]) for token in bpe.encode(text)).decode() == text


def changed(bpe, path, change):
    backend = Tokenizer.from_str(bpe.to_json())
    backend = change(backend) or backend
    backend.save(str(path))
    return load_tokenizer(path)


def normalizing(backend):
    backend.normalizer = normalizers.NFC()


def with_a_space(backend):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def without_bytes(backend):
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()


def dropping(backend):
    split = pre_tokenizers.Split(" ", behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def stripping(backend):
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])


def lacking(backend):
    vocab = {"a": 0, "b": 1, "<|endoftext|>": 2}
    other = Tokenizer(models.BPE(vocab, []))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.add_special_tokens(["<|endoftext|>"])
    return other


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (normalizing, "normalizer"),
        (with_a_space, "space"),
        (without_bytes, "byte-level"),
        (dropping, "byte-level"),
        (stripping, "space"),
        (lacking, "lacks a byte"),
    ],
)
def test_where_bytes_are_not_known_the_reason_is_told(bpe, tmp_path, change, told):
    assert told in why_unknown(changed(bpe, tmp_path / "t.json", change))


def test_text_cut_by_a_pattern_and_tokens_added_to_it_are_counted(bpe, tmp_path):
    """As Llama 3's is; an added token stands for its own text, a special one for none."""

    def change(backend):
        split = pre_tokenizers.Split(" ", behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        backend.add_tokens(["日本"])
        backend.add_special_tokens(["<|pad|>"])

    tokenizer = changed(bpe, tmp_path / "t.json", change)
    assert why_unknown(tokenizer) is None
    text = "in 日本 <|pad|> there"
    ids = tokenizer.encode(text)
    assert max(ids) == bpe.vocab_size, "the added token is used"
    assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert token_bytes(tokenizer)[-1] == 0


def test_without_a_tokenizer_nobody_knows():
    assert why_unknown(None) == "there is no tokenizer"


def test_a_run_logs_the_bits_of_its_validations_bytes(tmp_path, cache_dir):
    overrides = ["trainer.max_steps=2", "trainer.val_check_interval=2", "model.data.eod_mask_loss=true"]
    metrics = run_small(2, tmp_path / "run", cache_dir, [*overrides, "parallelism=pp2"])
    config = load_config([*SMALL_RUN, *small_corpus(cache_dir), *overrides])
    corpus = prepare_corpus(config, show_progress=False)
    _, valid = build_datasets(config, corpus, num_train_samples=2 * config.model.global_batch_size)
    words = {token: word for word, token in json.loads(corpus.tokenizer.to_json())["model"]["vocab"].items()}
    tokens, text = 0, b""
    for index in range(config.trainer.limit_val_batches * config.model.global_batch_size):
        sample = valid[index]
        for label, counts in zip(sample["labels"].tolist(), sample["loss_mask"].tolist(), strict=True):
            tokens += int(counts)
            if counts and label != corpus.tokenizer.eod:
                text += bytes_by_hand(words[label])
    assert count_tokens_and_bytes(valid, range(16), token_bytes(corpus.tokenizer)) == (tokens, len(text))
    assert len(metrics.validation) == 2
    for record in metrics.validation:
        nats = record.loss * tokens
        assert record.bits_per_byte == pytest.approx(nats / math.log(2) / len(text))
