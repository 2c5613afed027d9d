"""Text tokenized once into megatron-core's `.bin/.idx` in the cache: by all cores, and resumed where it was killed.

The key of a cache entry covers the source's files, the tokenizer and this format. The entry holds `corpus.bin`,
`corpus.idx`, `tokenizer.json` and `manifest.json`. Each document is one sequence of the index and ends with the
end-of-document token; empty documents are left out and counted.

A long document comes in pieces. The end of one piece is the context of the next, so that a tokenizer that adds
something to the start of a text adds it to the document alone.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import DType

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import TokenizerConfig
from gpt_pretrain.data.cache import Progress, fingerprint, hold_lock, make_once, new_entry
from gpt_pretrain.data.encoders import Batch, Encoders, Part
from gpt_pretrain.data.sources import Piece, TextSource
from gpt_pretrain.data.token_writer import TokenWriter, Written
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, train_bpe

FORMAT_VERSION = 2
# Enough text to train any vocabulary, in under a minute on two cores.
_BPE_SAMPLE_BYTES = 64 * 1024 * 1024
# Characters of a batch: a third of a second of one core's work.
_BATCH_CHARACTERS = 1024 * 1024
# Characters at the end of a piece that the next one is tokenized with, and that tell whether a cut is one of tokens.
_CONTEXT = 512
# Pieces that are joined if the tokenizer has no cut between them; a word of more has its tokens cut.
_MOST_JOINED = 4


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
        given = load_tokenizer(config.model, eod_token=config.eod_token)
    if given is not None:
        recipe = ["file", given.fingerprint, given.eod]
    identity = source.identity()
    entry = cache / "corpora" / f"{name}-{fingerprint([FORMAT_VERSION, recipe, identity])[:16]}"
    if not entry.is_dir():
        with hold_lock(entry, progress):
            # The previous holder of the lock may have made it.
            if not entry.is_dir():
                # Trained in an entry of its own, so that whoever goes on finds it.
                tokenizer = given or train_once(source, config.vocab_size, cache, progress)
                with new_entry(entry, goes_on=True) as folder:
                    summary = _fill(folder, source, identity, tokenizer, progress)
                progress.note(f"{summary}: {entry}")
    return entry / "corpus", load_tokenizer(entry / TOKENIZER_FILE, eod_token=config.eod_token)


def _fill(folder: Path, source: TextSource, identity: list[Any], tokenizer: Tokenizer, progress: Progress) -> str:
    """Writes the files of an entry, and returns what was tokenized, for people."""
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    with TokenWriter(folder, dtype) as writer, Encoders(tokenizer, dtype) as encoders:
        written = writer.written
        if written.num_source_bytes:
            progress.note(f"{written.num_source_bytes:,} bytes are tokenized already; going on with them")
        at_first, began_at = written.num_source_bytes, time.monotonic()
        progress.start("tokenizing", source.num_bytes, done=written.num_source_bytes, is_bytes=True)
        for batch, encoded in encoders.encode_all(_batches(_parts(source, tokenizer, written))):
            writer.write(batch, encoded)
            progress.advance(sum(part.num_source_bytes for part in batch))
        if written.num_documents == 0:
            raise UserError(f"all {written.num_empty:,} documents of the corpus are empty: {_name_files(source)}")
        if source.identity() != identity:
            raise UserError(
                f"the files of the corpus changed while they were tokenized ({_name_files(source)}); start again when "
                "they are complete"
            )
        duration_s = max(time.monotonic() - began_at, 1e-6)
        speed = f"{duration_s:.1f} s at {(source.num_bytes - at_first) / duration_s / 1e6:.1f} MB/s"
        progress.finish()
        writer.finish()
    tokenizer.save(folder / TOKENIZER_FILE)
    manifest = {
        "format_version": FORMAT_VERSION,
        "files": [str(path) for path in source.files],
        "num_bytes": source.num_bytes,
        "num_documents": written.num_documents,
        "num_empty_documents": written.num_empty,
        "num_tokens": written.num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    skipped = f", {written.num_empty:,} empty ones left out" if written.num_empty else ""
    counts = f"{written.num_tokens:,} tokens of {written.num_documents:,} documents{skipped}"
    return f"tokenized {source.num_bytes:,} bytes into {counts} in {speed}"


def train_once(source: TextSource, vocab_size: int, cache: Path, progress: Progress) -> Tokenizer:
    """A BPE trained on a source, from the cache if it is there."""
    entry = cache / "tokenizers" / f"bpe-{fingerprint([FORMAT_VERSION, vocab_size, source.identity()])[:16]}"
    make_once(entry, progress, lambda folder: _train(source, vocab_size, progress).save(folder / TOKENIZER_FILE))
    return load_tokenizer(entry / TOKENIZER_FILE)


def _train(source: TextSource, vocab_size: int, progress: Progress) -> Tokenizer:
    total = min(_BPE_SAMPLE_BYTES, source.num_bytes)
    progress.start(f"training a BPE of {vocab_size} tokens", total)

    def texts() -> Iterator[str]:
        for text in source.sample(_BPE_SAMPLE_BYTES):
            progress.advance(len(text))
            yield text

    return train_bpe(texts(), vocab_size)


def joined(pieces: Iterable[Piece], tokenizer: Tokenizer, most_characters: int) -> Iterator[tuple[str, Piece]]:
    """Pieces with the context of each; two are one where the tokenizer has no cut between them.

    A piece of `most_characters` or more is left as it is, so that no text takes all memory. A word as long, such as
    megabytes of base64, may have other tokens at its cuts than the whole would have.
    """
    context, held = "", None
    for piece in pieces:
        if held is not None:
            end = held.text[-_CONTEXT:]
            if len(held.text) >= most_characters or tokenizer.cuts(end, piece.text[:_CONTEXT]):
                yield context, held
                context = end
            else:
                text, num_bytes = held.text + piece.text, held.num_source_bytes + piece.num_source_bytes
                piece = Piece(text, ends_document=piece.ends_document, num_source_bytes=num_bytes)  # noqa: PLW2901
        held = piece
        if piece.ends_document:
            yield context, piece
            context, held = "", None


def _parts(source: TextSource, tokenizer: Tokenizer, written: Written) -> Iterator[Part]:
    """What follows the documents that are written already."""
    first, documents_to_skip = written.file, written.documents_of_file
    most_characters = _MOST_JOINED * source.piece_size
    for number in range(first, len(source.files)):
        document = 1
        for context, piece in joined(source.read_file(source.files[number]), tokenizer, most_characters):
            if number > first or document > documents_to_skip:
                yield Part(context, piece.text, piece.ends_document, piece.num_source_bytes, (number, document))
            document += piece.ends_document


def _batches(parts: Iterable[Part]) -> Iterator[Batch]:
    batch: list[Part] = []
    num_characters = 0
    for part in parts:
        batch.append(part)
        num_characters += len(part.text) + 1
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _name_files(source: TextSource) -> str:
    names = [os.fspath(path) for path in source.files[:3]]
    return ", ".join(names) + (f" and {len(source.files) - 3} more" if len(source.files) > len(names) else "")
