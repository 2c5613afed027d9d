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
_KEY, _EOD_KEY = "model.tokenizer.model", "model.tokenizer.eod_token"
# What a file that is no tokenizer.json may be, by its beginning, and the command that makes one of it.
_CONVERT = (
    (
        re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n"),
        "tiktoken",
        'pip install transformers tiktoken; python -c "from transformers.convert_slow_tokenizer import '
        "TikTokenConverter as C; C('{path}', extra_special_tokens=['<|endoftext|>']).converted()"
        ".save('tokenizer.json')\" (such a file has neither its special tokens nor its pattern of words: name the "
        "tokens in the order of their ids, and give pattern=… unless it is that of Llama 3)",
    ),
    (
        re.compile(rb"\n.[\n\x08]", re.DOTALL),
        "SentencePiece",
        # transformers leaves out the space that SentencePiece puts before a text, or all but one of several.
        'pip install transformers sentencepiece protobuf; python -c "import sentencepiece as s; '
        "from transformers import LlamaTokenizer as L; from tokenizers.normalizers import Prepend, Replace, Sequence; "
        "m = s.SentencePieceProcessor(model_file='{path}'); b = L.from_pretrained('{path.parent}').backend_tokenizer; "
        "b.pre_tokenizer = None; "
        "space = m.encode('a', out_type=str)[0][0] == '▁'; "
        "b.normalizer = Sequence([Prepend('▁')] * space + [Replace(' ', '▁')]); "
        "t = ' The  ﬁrst\\n\\ttext'; assert b.encode(t, add_special_tokens=False).ids == m.encode(t), 'no plain BPE'; "
        "b.save('tokenizer.json')\" (of a file named tokenizer.model; one that is no plain BPE, as T5's, needs its own "
        "class of transformers)",
    ),
)
_BEGINNING_BYTES = 1024
_MOST_NAMED = 20
_LONGEST_WORD = 1024
# Each is tried once, at its first character: time must not grow with the square of the length here either.
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD + 1},}}|(?<!\s)\s{{{_LONGEST_WORD + 1},}}")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end-of-document token: `eod_token`, or the known one that is special in it.

    Raises:
        UserError: There is no such token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: str, eod_token: str | None = None) -> None:
        # Both serve inference and would corrupt the documents of a corpus.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        ids = backend.get_vocab(with_added_tokens=True)
        special = [each.content for each in backend.get_added_tokens_decoder().values() if each.special]
        if eod_token is not None and eod_token not in ids:
            raise UserError(
                f"{_EOD_KEY}={eod_token} is not in the vocabulary of {origin}; its special tokens are "
                f"{', '.join(special[:_MOST_NAMED]) or 'none'}"
            )
        # An ordinary one may be a word of the text, as HTML's </s> is to Gemma.
        eod = eod_token or next((token for token in EOD_CANDIDATES if token in special), None)
        if eod is None:
            ordinary = [token for token in EOD_CANDIDATES if token in ids]
            also = f" ({', '.join(ordinary)} is an ordinary token)" if ordinary else ""
            raise UserError(
                f"{origin}: no end-of-document token; none of {', '.join(EOD_CANDIDATES)} is marked as special{also}; "
                f"name one with {_EOD_KEY}, or mark it in the file's added_tokens"
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


def load_tokenizer(path: str | Path, key: str = _KEY, *, eod_token: str | None = None) -> Tokenizer:
    """Reads a Hugging Face `tokenizer.json`, or raises a UserError that names the `key` of its path."""
    path = expand_user(path, key)
    if path.is_dir():
        raise UserError(f"{key}={path} is a directory; name the file: {path / TOKENIZER_FILE}")
    try:
        content = read_foreign_text(path)
    except (OSError, ForeignFileError) as error:
        way_out = _how_to_convert(path) or "it must be a Hugging Face tokenizer.json"
        raise UserError(f"{key}={path} cannot be read ({error}); {way_out}") from error
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # `tokenizers` raises plain Exception for any malformed file
        known = _how_to_convert(path)
        reason = f": {error}" if known is None else f"; {known}"
        raise UserError(f"{key}={path} is not a Hugging Face tokenizer.json{reason}") from error
    return Tokenizer(backend, f"{key}={path}", eod_token)


def _how_to_convert(path: Path) -> str | None:
    """What a file of another kind is and how it becomes a `tokenizer.json`; None for an unknown kind."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    known = ((kind, command) for pattern, kind, command in _CONVERT if pattern.match(beginning))
    return next((f"it is a file of {kind}; convert it: {command.format(path=path)}" for kind, command in known), None)


def own_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that an extension makes for the configuration; None if the library is one of the program's own."""
    registered = registered_choice("tokenizer", config.model.tokenizer.library)
    if registered is None:
        return None
    with registered.named("build"):
        backend = registered.value(config)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UserError(f"it returned {type(backend).__name__}, which is no tokenizers.Tokenizer")
        return Tokenizer(backend, "its vocabulary", config.model.tokenizer.eod_token)
