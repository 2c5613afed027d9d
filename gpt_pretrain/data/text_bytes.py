"""Bytes of text behind token ids, so that losses of runs with different tokenizers can be compared.

Bits per byte are nats per token ÷ ln 2 × tokens ÷ bytes. A byte-level tokenizer writes each byte of a text as one
character, so the bytes of a token are its length. Other tokenizers, and those that change the text first, have no exact
number here: `why_unknown` says which.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
from tokenizers import pre_tokenizers

from gpt_pretrain.data.datasets import SampleDataset
from gpt_pretrain.data.tokenizer import Tokenizer

# Steps before the model that cut text and drop nothing, unless they remove what they match.
_CUTS = ("Split", "Punctuation", "Digits")


def _steps(content: Any) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokenizer, one after the other."""
    if content is None:
        return
    if content["type"] == "Sequence":
        for each in content["pretokenizers"]:
            yield from _steps(each)
    else:
        yield content


def why_unknown(tokenizer: Tokenizer | None) -> str | None:
    """Why nobody can say how many bytes a token stands for; None if `token_bytes` can."""
    if tokenizer is None:
        return "there is no tokenizer"
    return next(_obstacles(json.loads(tokenizer.to_json())), None)


def _obstacles(content: dict[str, Any]) -> Iterator[str]:
    """What in a `tokenizer.json` keeps the characters of a token from being the bytes of the text."""
    if content["normalizer"] is not None:
        yield "the tokenizer's normalizer changes the text"
    steps, model = list(_steps(content["pre_tokenizer"])), content["model"]
    levels = [each for each in steps if each["type"] == "ByteLevel"]
    cuts = [each for each in steps if each["type"] in _CUTS and each.get("behavior") != "Removed"]
    if not levels or len(levels) + len(cuts) < len(steps) or model["type"] != "BPE" or model["byte_fallback"]:
        yield "the tokenizer is not a byte-level one"
        return
    if any(each["add_prefix_space"] for each in levels):
        yield "the tokenizer adds a space to the text"
    added = {each["content"]: each for each in content["added_tokens"]}
    if any(each["lstrip"] or each["rstrip"] for each in added.values()):
        yield "a token of the tokenizer's takes in the space beside it"
    alphabet, words = set(pre_tokenizers.ByteLevel.alphabet()), model["vocab"]
    if not alphabet <= words.keys():
        yield "the tokenizer's vocabulary lacks a byte"
    marks = model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    if marks or any(not alphabet.issuperset(word) for word in words if word not in added):
        yield "the tokenizer's vocabulary has other characters than bytes"


def token_bytes(tokenizer: Tokenizer) -> numpy.ndarray:
    """Bytes of text that each token id stands for, int64 [vocab_size]; 0 for the end of a document and special tokens.

    Call it where `why_unknown` is None.
    """
    content = json.loads(tokenizer.to_json())
    found = numpy.zeros(tokenizer.vocab_size, dtype=numpy.int64)
    for word, token in content["model"]["vocab"].items():
        found[token] = len(word)
    for each in content["added_tokens"]:
        found[each["id"]] = 0 if each["special"] else len(each["content"].encode())
    found[tokenizer.eod] = 0
    return found


def count_tokens_and_bytes(data: SampleDataset, samples: Iterable[int], of_token: numpy.ndarray) -> tuple[int, int]:
    """Tokens of samples that the loss counts, and the bytes of text that they stand for."""
    num_tokens = num_bytes = 0
    for index in samples:
        sample = data[index]
        counted = sample["labels"][sample["loss_mask"] > 0].numpy()
        num_tokens += counted.size
        # A model's vocabulary may be larger; such ids stand for nothing.
        num_bytes += int(of_token[counted[counted < of_token.size]].sum())
    return num_tokens, num_bytes
