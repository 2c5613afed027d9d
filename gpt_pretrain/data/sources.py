"""Where text comes from: Python's standard library, or the user's own .txt, .jsonl, .parquet and .arrow files.

A new source is a subclass of `TextSource` and a line in `corpus.SOURCES`. A new format of the user's files is a method
of `FileSource` and a line in its `READERS`.

A source streams pieces of documents in a fixed order and never holds more than a few MiB: the disk bounds the size of a
corpus, not the memory. A long document comes in several pieces, cut where every common pre-tokenizer also cuts: before
a space between words, or between a line end and a word. A longer word is cut somewhere.
"""

import codecs
import glob
import hashlib
import json
import platform
import re
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import expand_user
from gpt_pretrain.data.cache import file_identity

_PARQUET_BATCH_ROWS = 256
_ARROW_FILE = b"ARROW1"
_CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document; its text is empty for an empty document."""

    text: str
    ends_document: bool
    num_source_bytes: int
    """Bytes read for it, for the progress bar."""


class TextSource(ABC):
    """Documents in a fixed order."""

    files: Sequence[Path]
    piece_size = 1024 * 1024
    """Bytes read at once, and characters after which a document is cut at the next possible place, or after as many
    more."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """A JSON value that changes whenever the text may have changed."""

    @abstractmethod
    def read_file(self, path: Path) -> Iterator[Piece]:
        """Pieces of the documents of one file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def sample(self, max_bytes: int) -> Iterator[str]:
        """The beginning of each file, an equal share of `max_bytes` from each; the same text at every call."""
        share = max(1, max_bytes // len(self.files))
        for path in self.files:
            remaining = share
            for piece in self.read_file(path):
                yield piece.text[:remaining]
                remaining -= len(piece.text)
                if remaining <= 0:
                    break

    def cut(self, text: str, num_source_bytes: int) -> Iterator[Piece]:
        """The pieces of a document in memory."""
        *parts, last = self._parts(text)
        for part in parts:
            yield Piece(part, ends_document=False, num_source_bytes=0)
        yield Piece(last, ends_document=True, num_source_bytes=num_source_bytes)

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > self.piece_size:
            limit = start + 2 * self.piece_size
            # One character more, to see what follows a space.
            match = _CUT.search(text, start + self.piece_size, limit + 1)
            if match is None and len(text) <= limit:
                break
            end = limit if match is None else match.end()
            yield text[start:end]
            start = end
        yield text[start:]


class StdlibSource(TextSource):
    """The source files of Python's standard library: about 10 MB of real text that every machine with Python has.

    Test suites, whose inputs are odd on purpose, and tables of data are left out. The hash of their names orders the
    files: splits are contiguous ranges of documents, and in alphabetical order the validation split would be the last
    few packages.
    """

    _EXCLUDED = frozenset(
        {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    )

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        names = [
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*.py")
            if not self._EXCLUDED.intersection(path.relative_to(self.root).parts)
        ]
        if not names:
            raise UserError(
                f"model.data.data_impl=stdlib: {self.root} holds no .py files (this Python has its library in an "
                "archive?); use data=text model.data.text_files=[…]"
            )
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        self.files = [self.root / name for name in names]

    def identity(self) -> list[Any]:
        """Python's version, and the files with their sizes."""
        files = [[path.relative_to(self.root).as_posix(), path.stat().st_size] for path in self.files]
        return ["stdlib", platform.python_implementation(), platform.python_version(), files]

    def read_file(self, path: Path) -> Iterator[Piece]:
        """The file as one document, in the encoding it declares."""
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            # Distributions add files that break their declared encoding; they count as empty documents.
            text = ""
        yield from self.cut(text, path.stat().st_size)


class FileSource(TextSource):
    """The user's files: .txt (one document a file), .jsonl, .parquet and .arrow (one document a row).

    Patterns are paths or globs with `**` and `~`. Files come in the order of the patterns, those of one pattern sorted
    by name; a file that two patterns match counts once. `text_key` is the field or column that holds the text.

    Raises:
        UserError: A pattern matches nothing, or a file is of an unknown kind or cannot be read.
    """

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self.text_key = text_key
        self.files = list(dict.fromkeys(path for pattern in patterns for path in _match(pattern)))

    def identity(self) -> list[Any]:
        """Path, size and modification time of each file."""
        return ["text", self.text_key, [file_identity(path) for path in self.files]]

    def read_file(self, path: Path) -> Iterator[Piece]:
        """Pieces of one file, by its suffix."""
        try:
            yield from self.READERS[path.suffix](self, path)
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise UserError(f"model.data.text_files: {path} cannot be read: {error}") from error

    def _read_jsonl(self, path: Path) -> Iterator[Piece]:
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield from self.cut(self._text_of_line(path, number, line, offset), len(line))
                offset += len(line)

    def _text_of_line(self, path: Path, number: int, line: bytes, offset: int) -> str:
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset + error.start, line[error.start]) from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: no JSON object ({error.msg} at column {error.colno})") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: the JSON object cannot be read ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__} instead of a JSON object with the key {self.text_key!r}")
        if self.text_key not in row:
            raise UserError(
                f"{where}: no key model.data.text_key={self.text_key!r}; the line has {', '.join(map(repr, row))}"
            )
        text = row[self.text_key]
        if not isinstance(text, str):
            raise UserError(f"{where}: {self.text_key!r} is a {type(text).__name__}, not text")
        # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
        if b"\\u" in line and any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"{where}: {self.text_key!r} holds a lone surrogate (\\ud800 to \\udfff), which is not text"
            )
        return text

    def _read_parquet(self, path: Path) -> Iterator[Piece]:
        with pyarrow.parquet.ParquetFile(path) as file:
            self._check_column(path, file.schema_arrow)
            num_row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
            batches = file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[self.text_key])
            yield from self._rows(path, ((batch.column(0), num_row_bytes) for batch in batches))

    def _read_arrow(self, path: Path) -> Iterator[Piece]:
        """A stream, as Hugging Face's `save_to_disk` writes it, or a file of Arrow's other format, Feather."""
        with pyarrow.memory_map(str(path)) as file:
            is_stream = file.read(len(_ARROW_FILE)) != _ARROW_FILE
            file.seek(0)
            reader = pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file)
            self._check_column(path, reader.schema)
            batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            yield from self._rows(path, map(self._checked_column, batches))

    def _checked_column(self, batch: pyarrow.RecordBatch) -> tuple[pyarrow.Array, int]:
        # Arrow reads a wrong offset of a mapped file without a check of its own.
        column = batch.column(self.text_key)
        column.validate(full=True)
        return column, batch.nbytes // max(1, len(batch))

    def _check_column(self, path: Path, schema: pyarrow.Schema) -> None:
        if self.text_key not in schema.names:
            columns = ", ".join(map(repr, schema.names))
            raise UserError(f"{path}: no column model.data.text_key={self.text_key!r}; it has {columns}")
        kind = schema.field(self.text_key).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"{path}: column {self.text_key!r} is of type {kind}, not string")

    def _rows(self, path: Path, columns: Iterable[tuple[pyarrow.Array, int]]) -> Iterator[Piece]:
        """Pieces of the rows of columns, each with the bytes that a row of it takes."""
        row = 0
        for column, num_row_bytes in columns:
            for value in column:
                row += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise UserError(f"{path}, row {row}: {self.text_key!r} is not UTF-8 ({error})") from error
                yield from self.cut("" if text is None else text, num_row_bytes)

    def _read_txt(self, path: Path) -> Iterator[Piece]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = 0
        num_unreported_bytes = 0
        rest = ""
        with path.open("rb") as file:
            while True:
                block = file.read(self.piece_size)
                pending = len(decoder.getstate()[0])
                try:
                    rest += decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, offset - pending + error.start, error.object[error.start]) from error
                if offset == 0:
                    rest = rest.removeprefix("\ufeff")
                if not block:
                    break
                offset += len(block)
                num_unreported_bytes += len(block)
                *parts, rest = self._parts(rest)
                for part in parts:
                    yield Piece(part, ends_document=False, num_source_bytes=num_unreported_bytes)
                    num_unreported_bytes = 0
        yield Piece(rest, ends_document=True, num_source_bytes=num_unreported_bytes)

    READERS: ClassVar[Mapping[str, Callable[[Any, Path], Iterator[Piece]]]] = {
        ".txt": _read_txt,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
    }


def _match(pattern: str) -> list[Path]:
    expanded = expand_user(pattern, "model.data.text_files")
    if expanded.is_dir():
        raise UserError(
            f"model.data.text_files: {pattern} is a directory; name its files: {expanded / '**' / _names_in(expanded)}"
        )
    # An existing file comes first: its name may contain the characters of a pattern.
    paths = [expanded] if expanded.exists() else [Path(p) for p in sorted(glob.glob(str(expanded), recursive=True))]
    paths = [path.absolute() for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"model.data.text_files: {pattern} matches no file (relative to {Path.cwd()})")
    for path in paths:
        if path.suffix not in FileSource.READERS:
            known = ", ".join(FileSource.READERS)
            raise UserError(f"model.data.text_files: {path} has the suffix {path.suffix!r}; known are {known}")
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(f"model.data.text_files: {path} cannot be read: {error.strerror}") from error
    return paths


def _names_in(directory: Path) -> str:
    """A pattern of the names of files of text in a directory; of Hugging Face's, not of the caches beside its data."""
    patterns = ["data-*.arrow", *(f"*{suffix}" for suffix in FileSource.READERS)]
    return next((pattern for pattern in patterns if any(directory.rglob(pattern))), "*.jsonl")


def _not_utf8(path: Path, offset: int, byte: int) -> UserError:
    return UserError(
        f"{path}: not UTF-8: byte 0x{byte:02x} at offset {offset:,}; convert it, e.g. with "
        "`iconv -f LATIN1 -t UTF-8`, or remove it from model.data.text_files"
    )
