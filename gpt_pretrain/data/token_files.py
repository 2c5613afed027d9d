"""Refuses wrong token files before the model is built.

megatron-core's reader trusts its files. A truncated copy, a token beyond the vocabulary or an empty split would end a
run minutes later in a crash, an illegal memory access of the embedding, or an endless loop. Here each is an error with
its numbers. The layout of `.idx`, all little-endian: magic (9 bytes), version (uint64), dtype code (uint8), number of
sequences n and of document boundaries d (uint64 each), lengths (int32 × n), byte offsets (int64 × n), boundaries
(int64 × d), and for multimodal data modes (int8 × n).

This module also divides the documents of every file into splits (`model.data.splits_string`).
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import DType

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, read_foreign_value, write_file
from gpt_pretrain.data.cache import Progress, file_identity, fingerprint, hold_lock

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 16 * 1024 * 1024
# Blocks of a file that its fingerprint reads.
_NUM_BLOCKS = 64
_BLOCK_BYTES = 64 * 1024
_KEY = "model.data.data_prefix"
# 2^64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
# That a message lists.
_SHOWN_PAIRS = 3
_SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFile:
    """A `.bin/.idx` pair, as its index describes it."""

    prefix: str
    dtype: type[numpy.number]
    lengths: numpy.ndarray
    """Tokens of each document, a sequence of the index that megatron-core splits and shuffles: int32, memory-mapped."""
    num_boundaries: int
    """Document boundaries in the index."""
    num_tokens: int

    @property
    def bin_path(self) -> Path:
        """The tokens."""
        return Path(self.prefix + ".bin")

    @property
    def idx_path(self) -> Path:
        """The documents' lengths and offsets."""
        return Path(self.prefix + ".idx")

    @property
    def num_documents(self) -> int:
        """Documents, the empty ones included."""
        return len(self.lengths)

    def identity(self) -> list[Any]:
        """Changes whenever one of the files does (`file_identity`)."""
        return [file_identity(self.bin_path), file_identity(self.idx_path)]


def _way_out(prefix: str) -> str:
    """What to name in place of a path that is no pair's."""
    if prefix.endswith((".bin", ".idx")):
        return "; name the path without .bin and .idx"
    folder = Path(prefix)
    if pairs := sorted(str(path.with_suffix("")) for path in folder.glob("*.idx")):
        more = ",…" if len(pairs) > _SHOWN_PAIRS else ""
        return f"; {prefix} is a folder: name its pairs, [{','.join(pairs[:_SHOWN_PAIRS])}{more}]"
    if prefix.endswith(".ds") or Path(prefix + ".ds").exists() or any(folder.glob("*.ds")):
        return "; datatrove's .ds files are not read: its MegatronDocumentTokenizer writes .bin and .idx"
    return (
        "; name the path of a .bin/.idx pair, or train on text: data=text 'model.data.data_prefix=[]' "
        "'model.data.text_files=[…]'"
    )


def check_token_file(prefix: str, key: str = _KEY) -> TokenFile:
    """Opens a `.bin/.idx` pair that `key` names.

    Raises:
        UserError: A file is missing, is not what its name says, or has another size than the index implies.
    """
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(f"{key}: {path} does not exist{_way_out(prefix)}")
    size = idx_path.stat().st_size
    with idx_path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise UserError(f"{idx_path} is truncated: it has {size} bytes, its header alone has {_HEADER.size}")
    if not header.startswith(_MAGIC):
        raise UserError(f"{idx_path} is no megatron-core index: it begins with {header[:9]!r}, not {_MAGIC!r}")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{idx_path} has index version {version}; version 1 is known")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise UserError(f"{idx_path} has the unknown token type code {code}; it is damaged or not an index") from None
    if not issubclass(dtype, numpy.integer):
        raise UserError(f"{idx_path} says that its tokens are {dtype.__name__}; token ids are integers")
    implied = _HEADER.size + num_sequences * (4 + 8) + num_boundaries * 8
    if size not in (implied, implied + num_sequences):
        raise UserError(
            f"{idx_path} is {'truncated' if size < implied else 'damaged'}: it has {size:,} bytes, its header "
            f"({num_sequences:,} documents) implies {implied:,}; copy or build it again"
        )
    if num_sequences == 0:
        raise UserError(f"{idx_path} holds no document")
    lengths = numpy.memmap(idx_path, dtype="<i4", mode="r", offset=_HEADER.size, shape=(num_sequences,))
    num_tokens = int(lengths.sum(dtype=numpy.int64))
    implied = num_tokens * numpy.dtype(dtype).itemsize
    size = bin_path.stat().st_size
    if size != implied:
        raise UserError(
            f"{bin_path} is {'truncated' if size < implied else 'longer than its index says'}: it has {size:,} bytes, "
            f"{idx_path.name} ({num_tokens:,} tokens of {numpy.dtype(dtype).name}) implies {implied:,}; "
            "copy or build both again"
        )
    if num_tokens == 0:
        raise UserError(f"{bin_path} holds no token: all {num_sequences:,} documents are empty")
    return TokenFile(prefix=prefix, dtype=dtype, lengths=lengths, num_boundaries=num_boundaries, num_tokens=num_tokens)


def sentences_warning(token_file: TokenFile) -> str | None:
    """Why the samples of a file are of sentences in any order; None if its documents are whole."""
    num_documents = token_file.num_boundaries - 1
    if not 0 < num_documents < token_file.num_documents:
        return None
    return (
        f"warning: {token_file.prefix} has {num_documents:,} documents that were split into "
        f"{token_file.num_documents:,} sentences, and a run shuffles the sentences as if they were documents; build it "
        "again without --split-sentences"
    )


def write_index(path: Path, dtype: type[numpy.number], lengths: numpy.ndarray) -> None:
    """Writes the `.idx` of documents of these lengths [n], each one sequence, whose tokens follow one another."""
    ends = numpy.cumsum(lengths, dtype="<i8") * numpy.dtype(dtype).itemsize
    with path.open("xb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, DType.code_from_dtype(dtype), lengths.size, lengths.size + 1))
        lengths.astype("<i4").tofile(file)
        numpy.concatenate([ends[:1] * 0, ends[:-1]]).tofile(file)
        numpy.arange(lengths.size + 1, dtype="<i8").tofile(file)


def check_token_ids(token_file: TokenFile, vocab_size: int, cache: Path, progress: Progress) -> None:
    """Refuses token ids outside the model's vocabulary, and an index whose offsets point elsewhere.

    Reads the files once: the cache keeps the smallest and the largest id of an unchanged file.
    """
    record = cache / "scans" / f"{fingerprint(token_file.identity())[:32]}.json"
    if not record.is_file():
        with hold_lock(record, progress):
            # The previous holder of the lock may have scanned it.
            if not record.is_file():
                _check_offsets(token_file)
                write_file(record, json.dumps(_scan(token_file, progress)))
    low, high = _read_scan(record)
    if low < 0 or high >= vocab_size:
        position, token = _first_outside(token_file, vocab_size)
        ends = numpy.cumsum(token_file.lengths, dtype=numpy.int64)
        document = int(numpy.searchsorted(ends, position, side="right"))
        raise UserError(
            f"{token_file.bin_path}: token id {token} at position {position:,} (document {document:,}) is outside the "
            f"vocabulary of model.vocab_size={vocab_size}; the file's ids run from {low} to {high}: it belongs to "
            f"another tokenizer, or model.vocab_size must be at least {high + 1}"
        )


def _read_scan(record: Path) -> tuple[int, int]:
    try:
        low, high = read_foreign_value(record)
        if type(low) is int and type(high) is int:
            return low, high
    except (ForeignFileError, ValueError, TypeError):
        pass
    raise UserError(
        f"{record} does not hold the smallest and the largest id of a token file; remove it to have it made again"
    )


def _chunks(token_file: TokenFile) -> Iterator[tuple[int, numpy.ndarray]]:
    tokens = numpy.memmap(token_file.bin_path, dtype=token_file.dtype, mode="r", shape=(token_file.num_tokens,))
    for start in range(0, tokens.size, _CHUNK):
        yield start, tokens[start : start + _CHUNK]


def _scan(token_file: TokenFile, progress: Progress) -> tuple[int, int]:
    progress.start(f"checking the token ids of {token_file.bin_path}", token_file.num_tokens)
    lows, highs = [], []
    for _, chunk in _chunks(token_file):
        lows.append(int(chunk.min()))
        highs.append(int(chunk.max()))
        progress.advance(chunk.size)
    progress.finish()
    return min(lows), max(highs)


def _first_outside(token_file: TokenFile, vocab_size: int) -> tuple[int, int]:
    for start, chunk in _chunks(token_file):
        outside = numpy.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if outside.size:
            return start + int(outside[0]), int(chunk[outside[0]])
    raise AssertionError("the scan found an id outside the vocabulary")


def _check_offsets(token_file: TokenFile) -> None:
    lengths = token_file.lengths
    offset = _HEADER.size + lengths.nbytes
    pointers = numpy.memmap(token_file.idx_path, dtype="<i8", mode="r", offset=offset, shape=lengths.shape)
    end = 0
    for start in range(0, lengths.size, _CHUNK):
        chunk = lengths[start : start + _CHUNK].astype(numpy.int64) * numpy.dtype(token_file.dtype).itemsize
        ends = end + numpy.cumsum(chunk)
        if chunk.min() < 0 or not numpy.array_equal(pointers[start : start + _CHUNK], ends - chunk):
            raise UserError(
                f"{token_file.idx_path} is damaged: its offsets do not follow from its lengths; build it again"
            )
        end = int(ends[-1])
    last = 0
    if token_file.num_boundaries:
        offset += pointers.nbytes + 8 * (token_file.num_boundaries - 1)
        last = int(numpy.fromfile(token_file.idx_path, dtype="<i8", count=1, offset=offset)[0])
    # megatron-core's reader asserts this.
    if last != token_file.num_documents:
        raise UserError(
            f"{token_file.idx_path} is damaged: its last document ends with sequence {last}, not with the last one, "
            f"{token_file.num_documents}; build it again"
        )


def content_fingerprint(token_file: TokenFile) -> str:
    """SHA-256 of the sizes and of evenly spread blocks of both files; path and age do not count."""
    digest = hashlib.sha256()
    for path in (token_file.idx_path, token_file.bin_path):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        # Small files are read whole: the blocks overlap or abut.
        step = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """Documents (sequences of the index) and tokens of one split."""

    num_documents: int
    num_tokens: int


type SplitSizes = tuple[SplitSize, ...]
"""Of the training, the validation and the test split."""


def split_matrix(splits: str) -> list[tuple[float, float] | None]:
    """Start and end of each split as shares of the documents, by megatron-core's rule; None for an absent split."""
    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(splits))
    return matrix


def split_of_documents(num_documents: int, splits: str) -> numpy.ndarray:
    """Which split each document of a file belongs to: 0 training, 1 validation, 2 test; uint8 [num_documents].

    Every split is a sample of the whole file, evenly spread, so that none is the end of it: documents are ranked by the
    fractional parts of the multiples of the golden ratio, and the splits take their shares of these ranks.
    """
    ends, found = [0], numpy.zeros(num_documents, dtype=numpy.uint8)
    for bounds in split_matrix(splits):
        ends.append(ends[-1] if bounds is None else round(bounds[1] * num_documents))
    # The product wraps at 2^64: these are the fractional parts as integers. The factor is odd, so all differ.
    parts = numpy.arange(num_documents, dtype=numpy.uint64) * numpy.uint64(_GOLDEN)
    for end in ends[1:-1]:
        found += parts >= numpy.partition(parts, end)[end] if end < num_documents else False
    return found


def split_sizes(token_file: TokenFile, splits: str) -> SplitSizes:
    """Documents and tokens of each split of a file."""
    found = split_of_documents(token_file.num_documents, splits)
    lengths = [token_file.lengths[found == split] for split in range(len(_SPLIT_NAMES))]
    return tuple(SplitSize(num_documents=len(each), num_tokens=int(each.sum(dtype=numpy.int64))) for each in lengths)


def check_splits(token_file: TokenFile, splits: str, *, sequence_length: int, with_validation: bool) -> SplitSizes:
    """Refuses a split that the run reads if it cannot fill one sample: a sequence and the label of its last token."""
    sizes = split_sizes(token_file, splits)
    used = 2 if with_validation else 1
    for name, size in zip(_SPLIT_NAMES[:used], sizes[:used], strict=True):
        if size.num_tokens > sequence_length:
            continue
        every = zip(_SPLIT_NAMES, sizes, strict=True)
        counts = ", ".join(f"{n} {s.num_documents:,} documents with {s.num_tokens:,} tokens" for n, s in every)
        without = " or trainer.limit_val_batches=0 (no validation)" if name == "validation" else ""
        raise UserError(
            f"{token_file.prefix}: the {name} split has {size.num_documents:,} documents with {size.num_tokens:,} "
            f"tokens, one sample of model.encoder_seq_length={sequence_length} needs {sequence_length + 1:,} "
            f"(model.data.splits_string={splits!r} gives {counts}); use more text, other splits, a shorter "
            f"sequence{without}. A document is never divided between splits; a .txt file is one document"
        )
    return sizes


def check_whole(token_file: TokenFile, split: int, *, sequence_length: int) -> SplitSize:
    """All documents of a file, to train (0) or to validate (1) on; refused if they fill no sample."""
    size = SplitSize(num_documents=token_file.num_documents, num_tokens=token_file.num_tokens)
    if size.num_tokens <= sequence_length:
        raise UserError(
            f"{token_file.prefix} has {size.num_documents:,} documents with {size.num_tokens:,} tokens, one "
            f"{_SPLIT_NAMES[split]} sample of model.encoder_seq_length={sequence_length} needs "
            f"{sequence_length + 1:,}; use more text or a shorter sequence"
        )
    return size
