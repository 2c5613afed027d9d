"""The tokenizer: a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus itself.

`Tokenizer` adds what pretraining needs beyond `tokenizers`: the token that ends a document, a fingerprint, and an
encoding without special tokens: `<|endoftext|>` inside a document becomes ordinary tokens, so a document cannot forge
its own end.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, expand_user, read_foreign_text
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.cache import fingerprint
from gpt_pretrain.extend.registry import registered_choice

# The name that Hugging Face gives the file.
TOKENIZER_FILE = "tokenizer.json"
BPE_EOD = "<|endoftext|>"
# In order of preference: GPT-2/NeoX/Qwen base, Llama 3 base, DeepSeek, Llama 2/Mistral/T5, Gemma, Phi and others.
EOD_CANDIDATES = (BPE_EOD, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>")

_LONGEST_WORD = 1024
# Each is tried once, at its first character: time must not grow with the square of the length here either.
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD + 1},}}|(?<!\s)\s{{{_LONGEST_WORD + 1},}}")


class Tokenizer:
    """A `tokenizers.Tokenizer` that has one of the known end-of-document tokens, or a UserError."""

    def __init__(self, backend: tokenizers.Tokenizer, origin: str) -> None:
        # Both serve inference and would corrupt the documents of a corpus.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        ids = backend.get_vocab(with_added_tokens=True)
        eod = next((token for token in EOD_CANDIDATES if token in ids), None)
        if eod is None:
            raise UserError(
                f"{origin}: no end-of-document token; one of {', '.join(EOD_CANDIDATES)} must be in the vocabulary: "
                "add one to the file's added_tokens"
            )
        self.eod_token = eod
        self.eod: int = ids[eod]
        # A vocabulary with holes has larger ids than tokens.
        self.vocab_size: int = max(ids.values()) + 1
        self.fingerprint = _fingerprint(backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        self._backend.encode_special_tokens = True
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def cuts(self, before: str, after: str) -> bool:
        """Whether the tokens of `before` stay what they are if `after` follows: text can be cut there."""
        ids = self.encode(before)
        return self.encode(before + after)[: len(ids)] == ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; ids beyond the vocabulary (the model's padding rows) are left out."""
        return self._backend.decode(
            [token for token in token_ids if token < self.vocab_size], skip_special_tokens=False
        )

    def to_json(self) -> str:
        """The content of its `tokenizer.json`."""
        self._backend.encode_special_tokens = False
        return self._backend.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Writes the `tokenizer.json`."""
        path.write_text(self.to_json(), encoding="utf-8")


def _fingerprint(backend: tokenizers.Tokenizer) -> str:
    content = json.loads(backend.to_str())
    for detail in ("version", "truncation", "padding"):
        content.pop(detail, None)
    return fingerprint(content)


def _cut_words(text: str) -> Iterator[str]:
    start = 0
    for word in _LONG_WORD.finditer(text):
        for end in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (GPT-2's scheme: Sennrich et al. 2016 over bytes).

    `vocab_size` includes the 256 bytes and the end-of-document token. A small text may yield fewer tokens. Training
    takes time by the square of a word's length: longer runs of characters without a space, or of spaces, count as
    several words.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[BPE_EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((part for text in texts for part in _cut_words(text)), trainer=trainer)
    return Tokenizer(backend, "the BPE trained on the corpus")


def load_tokenizer(path: str | Path, key: str = "model.tokenizer.model") -> Tokenizer:
    """Reads a Hugging Face `tokenizer.json`, or raises a UserError that names the `key` of its path."""
    path = expand_user(path, key)
    if path.is_dir():
        raise UserError(f"{key}={path} is a directory; name the file: {path / TOKENIZER_FILE}")
    try:
        content = read_foreign_text(path)
    except (OSError, ForeignFileError) as error:
        raise UserError(f"{key}={path} cannot be read ({error}); it must be a Hugging Face tokenizer.json") from error
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # `tokenizers` raises plain Exception for any malformed file
        raise UserError(f"{key}={path} is not a Hugging Face tokenizer.json: {error}") from error
    return Tokenizer(backend, f"{key}={path}")


def own_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that an extension makes for the configuration; None if the library is one of the program's own."""
    registered = registered_choice("tokenizer", config.model.tokenizer.library)
    if registered is None:
        return None
    with registered.named("build"):
        backend = registered.value(config)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UserError(f"it returned {type(backend).__name__}, which is no tokenizers.Tokenizer")
        return Tokenizer(backend, "its vocabulary")
