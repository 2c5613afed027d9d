"""From text to token ids: the tokenizer, and text tokenized once into megatron-core's `.bin/.idx` in the cache.

A tokenizer is a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus itself. `Tokenizer` adds what
pretraining needs beyond `tokenizers`: the token that ends a document, a fingerprint, and an encoding without special
tokens: `<|endoftext|>` inside a document becomes ordinary tokens, so a document cannot forge its own end.

The key of a cache entry covers the source's files, the tokenizer and this format. The entry holds `corpus.bin`,
`corpus.idx`, `tokenizer.json` and `manifest.json`. Each document is one sequence of the index and ends with the
end-of-document token; empty documents are left out and counted.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import tokenizers
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import decoders, models, pre_tokenizers, trainers

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, expand_user, read_foreign_text
from gpt_pretrain.config.schema import Config, TokenizerConfig
from gpt_pretrain.data.cache import Progress, fingerprint, hold_lock, new_entry
from gpt_pretrain.data.sources import Piece, TextSource
from gpt_pretrain.extend.registry import registered_choice

# The name that Hugging Face gives the file.
TOKENIZER_FILE = "tokenizer.json"
BPE_EOD = "<|endoftext|>"
# In order of preference: GPT-2/NeoX/Qwen base, Llama 3 base, DeepSeek, Llama 2/Mistral/T5, Gemma, Phi and others.
EOD_CANDIDATES = (BPE_EOD, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>")


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
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, on all cores."""
        self._backend.encode_special_tokens = True
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

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


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (GPT-2's scheme: Sennrich et al. 2016 over bytes).

    `vocab_size` includes the 256 bytes and the end-of-document token. A small text may yield fewer tokens.
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
    backend.train_from_iterator(texts, trainer=trainer)
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


FORMAT_VERSION = 1
# Enough text to train any vocabulary, in under a minute on two cores.
_BPE_SAMPLE_BYTES = 64 * 1024 * 1024
# Characters per call of the tokenizer: enough to keep all cores busy, few enough for the progress bar.
_BATCH_CHARACTERS = 4 * 1024 * 1024
_MAX_DOCUMENT_TOKENS = numpy.iinfo(numpy.int32).max


def tokenize_source(
    source: TextSource,
    config: TokenizerConfig,
    cache: Path,
    progress: Progress,
    *,
    name: str,
    given: Tokenizer | None = None,
) -> tuple[Path, Tokenizer]:
    """Finds the source's entry in the cache, or makes it; `given` is an extension's tokenizer.

    Returns:
        The path of the `.bin/.idx` pair without suffix, and the tokenizer that made it.

    Raises:
        UserError: The text or the tokenizer is unusable, or the disk is full.
    """
    recipe: list[Any] = ["bpe", config.vocab_size]
    if config.library is TokenizerLibrary.file:
        assert config.model is not None, "the rules refuse library=file without a path"
        given = load_tokenizer(config.model)
    if given is not None:
        recipe = ["file", given.fingerprint]
    identity = source.identity()
    entry = cache / "corpora" / f"{name}-{fingerprint([FORMAT_VERSION, recipe, identity])[:16]}"
    if not entry.is_dir():
        with hold_lock(entry, progress):
            # The previous holder of the lock may have made it.
            if not entry.is_dir():
                with new_entry(entry) as folder:
                    tokenizer = given or _train(source, config.vocab_size, progress)
                    summary = _fill(folder, source, identity, tokenizer, progress)
                progress.note(f"{summary}: {entry}")
    return entry / "corpus", load_tokenizer(entry / TOKENIZER_FILE)


def _fill(folder: Path, source: TextSource, identity: list[Any], tokenizer: Tokenizer, progress: Progress) -> str:
    """Writes the files of an entry, and returns what was tokenized, for people."""
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=dtype)
    num_documents = num_empty = num_tokens = 0
    progress.start("tokenizing", source.num_bytes)
    with builder.data_file:
        for document in _documents(source, tokenizer, dtype, progress):
            if document.size == 0:
                num_empty += 1
                continue
            tokens = numpy.append(document, numpy.array([tokenizer.eod], dtype=dtype))
            if tokens.size > _MAX_DOCUMENT_TOKENS:
                raise UserError(
                    f"document {num_documents + num_empty + 1} of the corpus has {tokens.size:,} tokens, and the index "
                    f"format holds {_MAX_DOCUMENT_TOKENS:,}; split the file"
                )
            builder.add_document(tokens, [tokens.size])
            num_documents += 1
            num_tokens += tokens.size
    if num_documents == 0:
        raise UserError(f"all {num_empty:,} documents of the corpus are empty: {_name_files(source)}")
    if source.identity() != identity:
        raise UserError(
            f"the files of the corpus changed while they were tokenized ({_name_files(source)}); start again when "
            "they are complete"
        )
    progress.finish()
    builder.finalize(str(folder / "corpus.idx"))
    tokenizer.save(folder / TOKENIZER_FILE)
    manifest = {
        "format_version": FORMAT_VERSION,
        "files": [str(path) for path in source.files],
        "num_bytes": source.num_bytes,
        "num_documents": num_documents,
        "num_empty_documents": num_empty,
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    skipped = f", {num_empty:,} empty ones left out" if num_empty else ""
    return f"tokenized {source.num_bytes:,} bytes into {num_tokens:,} tokens of {num_documents:,} documents{skipped}"


def train_once(source: TextSource, vocab_size: int, cache: Path, progress: Progress) -> Tokenizer:
    """A BPE trained on a source, from the cache if it is there; for sources that are tokenized one by one."""
    entry = cache / "tokenizers" / f"bpe-{fingerprint([FORMAT_VERSION, vocab_size, source.identity()])[:16]}"
    if not entry.is_dir():
        with hold_lock(entry, progress):
            # The previous holder of the lock may have made it.
            if not entry.is_dir():
                with new_entry(entry) as folder:
                    _train(source, vocab_size, progress).save(folder / TOKENIZER_FILE)
    return load_tokenizer(entry / TOKENIZER_FILE)


def _train(source: TextSource, vocab_size: int, progress: Progress) -> Tokenizer:
    total = min(_BPE_SAMPLE_BYTES, source.num_bytes)
    progress.start(f"training a BPE of {vocab_size} tokens", total)

    def texts() -> Iterator[str]:
        for text in source.sample(_BPE_SAMPLE_BYTES):
            progress.advance(len(text))
            yield text

    return train_bpe(texts(), vocab_size)


def _documents(
    source: TextSource, tokenizer: Tokenizer, dtype: type[numpy.number], progress: Progress
) -> Iterator[numpy.ndarray]:
    """Token ids of each document, without the end-of-document token."""
    parts: list[numpy.ndarray] = []
    for batch in _batches(source):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, token_ids in zip(batch, encoded, strict=True):
            parts.append(numpy.array(token_ids, dtype=dtype))
            if piece.ends_document:
                yield numpy.concatenate(parts)
                parts = []
        progress.advance(sum(piece.num_source_bytes for piece in batch))


def _batches(source: TextSource) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in source.pieces():
        batch.append(piece)
        num_characters += len(piece.text) + 1
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _name_files(source: TextSource) -> str:
    names = [os.fspath(path) for path in source.files[:3]]
    return ", ".join(names) + (f" and {len(source.files) - 3} more" if len(source.files) > len(names) else "")
