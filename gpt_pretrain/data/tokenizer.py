"""From text to token ids: a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus itself.

The wrapper adds what pretraining needs and `tokenizers` leaves open: which token ends a document, a fingerprint that
tells one tokenizer from another, and encoding that takes text for text: `<|endoftext|>` inside a document becomes
ordinary tokens, so that a document cannot forge the end of itself.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.cache import fingerprint

# What Hugging Face calls the file, and every program that reads one.
TOKENIZER_FILE = "tokenizer.json"
BPE_EOD = "<|endoftext|>"
# In order of preference: GPT-2/NeoX/Qwen base, Llama 3 base, DeepSeek, Llama 2/Mistral/T5, Gemma, Phi and others.
EOD_CANDIDATES = (BPE_EOD, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>")
# One token per byte, and the end of a document.
MIN_BPE_VOCAB_SIZE = 257


class Tokenizer:
    """A `tokenizers.Tokenizer` whose end-of-document token is known.

    Args:
        backend: The tokenizer.
        origin: Where it comes from, for error messages.

    Raises:
        UserError: It has none of the known end-of-document tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: str) -> None:
        # Both belong to serving a model, not to tokenising a corpus; either would corrupt documents.
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
        # Not the number of tokens: a vocabulary with holes has ids beyond it.
        self.vocab_size: int = max(ids.values()) + 1
        self.fingerprint = _fingerprint(backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, on all cores."""
        self._backend.encode_special_tokens = True
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; ids beyond the vocabulary (the model's padding rows) give no text."""
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


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (GPT-2's scheme: Sennrich et al. 2016 over bytes).

    Args:
        texts: The text to learn merges from.
        vocab_size: Tokens, the 256 bytes and the end-of-document token included. A small text may give fewer.

    Raises:
        UserError: vocab_size is too small even for the bytes.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise UserError(
            f"model.tokenizer.vocab_size={vocab_size} is too small for a byte-level BPE: 256 bytes and {BPE_EOD} "
            f"need at least {MIN_BPE_VOCAB_SIZE}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[BPE_EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(backend, "the BPE trained on the corpus")


def load_tokenizer(path: str | Path, key: str = "model.tokenizer.model") -> Tokenizer:
    """Reads a Hugging Face `tokenizer.json`.

    Args:
        path: The file.
        key: The key that names it, for error messages.

    Raises:
        UserError: The file is missing, is no tokenizer, or has no end-of-document token.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise UserError(f"{key}={path} is a directory; name the file: {path / 'tokenizer.json'}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={path} cannot be read ({error}); it must be a Hugging Face tokenizer.json") from error
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # `tokenizers` raises plain Exception for any malformed file
        raise UserError(f"{key}={path} is not a Hugging Face tokenizer.json: {error}") from error
    return Tokenizer(backend, f"{key}={path}")
