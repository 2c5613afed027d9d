"""Writes megatron-core's `.bin/.idx`, and goes on where a killed process was.

Until the index is written, the lengths of the documents and a journal are beside the tokens. The journal counts the
documents whose tokens and lengths are on the disk; whatever follows them in the files is cut off.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy

from gpt_pretrain.config.errors import InterruptedReadError, UserError
from gpt_pretrain.config.files import (
    ForeignFileError,
    check_own_file,
    fsync,
    read_foreign_json,
    remove,
    write_file,
)
from gpt_pretrain.data.encoders import Batch, Encoded
from gpt_pretrain.data.token_files import write_index

_SAVE_INTERVAL_S = 15.0
_MAX_DOCUMENT_TOKENS = numpy.iinfo(numpy.int32).max
_LENGTH = numpy.dtype("<i4")


@dataclass(kw_only=True, slots=True)
class Written:
    """What was written up to the end of a document."""

    file: int = 0
    """Number of the text file that holds it."""
    documents_of_file: int = 0
    """Documents read from this file, the empty ones included."""
    num_source_bytes: int = 0
    num_documents: int = 0
    num_empty: int = 0
    """Documents without a token, which are left out."""
    num_tokens: int = 0
    """Ends of documents included."""


class TokenWriter:
    """`corpus.bin` and `corpus.idx` in the making, in a folder that no other process writes."""

    def __init__(self, folder: Path, dtype: type[numpy.number]) -> None:
        self._dtype = numpy.dtype(dtype)
        self._index, self._journal = folder / "corpus.idx", folder / "journal.json"
        paths = folder / "corpus.bin", folder / "lengths"
        self.written = Written()
        try:
            found = Written(**read_foreign_json(self._journal))
            for path, size in zip(paths, self._sizes(found), strict=True):
                check_own_file(path)
                if path.stat().st_size < size:
                    raise ForeignFileError(f"{path} lacks what the journal counts")
            self.written = found
        except (OSError, ForeignFileError, TypeError):
            for path in folder.iterdir():
                remove(path)
        self._tokens, self._lengths = (path.open("a+b") for path in paths)
        for file, size in zip((self._tokens, self._lengths), self._sizes(self.written), strict=True):
            file.truncate(size)
        self._new_lengths: list[int] = []
        self._length = self._num_source_bytes = 0
        self._saved_at = time.monotonic()

    def _sizes(self, written: Written) -> tuple[int, int]:
        """Bytes of tokens and of lengths."""
        return written.num_tokens * self._dtype.itemsize, written.num_documents * _LENGTH.itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind in (KeyboardInterrupt, SystemExit, InterruptedReadError):
            self._save()
        self._tokens.close()
        self._lengths.close()

    def write(self, batch: Batch, encoded: Encoded) -> None:
        """Appends a batch.

        Raises:
            UserError: A document has more tokens than the index can count.
        """
        tokens, counts = encoded
        self._tokens.write(tokens)
        written = self.written
        for part, count in zip(batch, counts, strict=True):
            self._length += count
            self._num_source_bytes += part.num_source_bytes
            if not part.ends_document:
                continue
            if self._length > _MAX_DOCUMENT_TOKENS:
                raise UserError(
                    f"document {written.num_documents + written.num_empty + 1} of the corpus has {self._length:,} "
                    f"tokens, and the index format holds {_MAX_DOCUMENT_TOKENS:,}; split the file"
                )
            if self._length:
                self._new_lengths.append(self._length)
                written.num_documents += 1
            else:
                written.num_empty += 1
            written.num_tokens += self._length
            written.num_source_bytes += self._num_source_bytes
            written.file, written.documents_of_file = part.place
            self._length = self._num_source_bytes = 0
        if time.monotonic() - self._saved_at >= _SAVE_INTERVAL_S:
            self._save()

    def _save(self) -> None:
        """Puts what was written on the disk, and then the journal that says so."""
        self._append_lengths()
        for file in (self._tokens, self._lengths):
            file.flush()
            fsync(Path(file.name))
        write_file(self._journal, json.dumps(asdict(self.written)))
        self._saved_at = time.monotonic()

    def _append_lengths(self) -> None:
        self._lengths.write(numpy.array(self._new_lengths, dtype=_LENGTH).tobytes())
        self._new_lengths = []

    def finish(self) -> None:
        """Writes the index, and removes what served to go on."""
        self._append_lengths()
        self._lengths.seek(0)
        write_index(self._index, self._dtype.type, numpy.frombuffer(self._lengths.read(), dtype=_LENGTH))
        for path in (self._journal, Path(self._lengths.name)):
            remove(path)
