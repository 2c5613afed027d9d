"""The user's own .txt, .jsonl, .parquet and .arrow files; a new format is a method of `FileSource` and in `READERS`.

They are on a disk of this machine, or in a store that a URL names (`data.remote`).
"""

import codecs
import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, ClassVar

import pyarrow

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import ForeignFileError, expand_user, read_foreign_json
from gpt_pretrain.config.urls import scheme_of
from gpt_pretrain.data.cache import file_identity
from gpt_pretrain.data.columns import read_arrow, read_parquet
from gpt_pretrain.data.remote import RemoteFile, SourceFile, find_remote
from gpt_pretrain.data.sources import Piece, TextSource
from gpt_pretrain.extend.registry import register

_BOM = "\ufeff"
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Formats that may be compressed as a whole; the others have a compression of their own.
_COMPRESSED = (".txt", ".jsonl", ".json")
_MISSING = object()


class FileSource(TextSource):
    """The user's files: .txt (one document a file), .jsonl or .json, .parquet and .arrow (one document a row).

    The first three may be compressed (.jsonl.gz, .zst or .bz2). A folder of Hugging Face's `save_to_disk` is its files.

    Patterns are paths, globs with `**` and `~`, or URLs. Files come in the order of the patterns, those of one pattern
    sorted by name; a file that two patterns match counts once. `text_key` is the field or column that holds the text;
    dots lead into nested ones.

    Raises:
        UserError: A pattern matches nothing, or a file is of an unknown kind or cannot be read.
    """

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self.text_key = text_key
        self.files: list[SourceFile] = list(dict.fromkeys(path for pattern in patterns for path in _match(pattern)))

    def identity(self) -> list[Any]:
        """Path, size and modification time of each file, or its version in a store."""
        files = [path.identity() if isinstance(path, RemoteFile) else file_identity(path) for path in self.files]
        return ["text", self.text_key, files]

    def read_file(self, path: os.PathLike[str]) -> Iterator[Piece]:
        """Pieces of one file, by its suffix."""
        file = path if isinstance(path, RemoteFile) else Path(path)
        try:
            yield from self.READERS[_format(file)](self, file)
            if isinstance(file, RemoteFile):
                file.check_unchanged()
        except (UserError, OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            # What is wrong may come of two versions of the file.
            if isinstance(file, RemoteFile):
                file.check_unchanged()
            if isinstance(error, UserError):
                raise
            raise UserError(f"model.data.text_files: {path} cannot be read: {error}") from error

    def _read_jsonl(self, path: SourceFile) -> Iterator[Piece]:
        offset = num_read = 0
        with _open(path) as (file, position):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    text, num_before, num_read = self._text_of_line(path, number, line, offset), num_read, position()
                    yield from self._document(text, num_read - num_before)
                offset += len(line)

    def _text_of_line(self, path: SourceFile, number: int, line: bytes, offset: int) -> str | None:
        where = f"{path}, line {number}"
        try:
            # Files that were joined have marks inside.
            row = json.loads(line.decode("utf-8").removeprefix(_BOM))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset + error.start, line[error.start]) from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: no JSON object ({error.msg} at column {error.colno})") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: the JSON object cannot be read ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__} instead of a JSON object with the key {self.text_key!r}")
        text = _value(row, self.text_key)
        if text is _MISSING:
            raise UserError(
                f"{where}: no key model.data.text_key={self.text_key!r}; the line has {', '.join(map(repr, row))}"
            )
        if text is None:
            return None
        if not isinstance(text, str):
            raise UserError(f"{where}: {self.text_key!r} is a {type(text).__name__}, not text")
        # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
        if b"\\u" in line and any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"{where}: {self.text_key!r} holds a lone surrogate (\\ud800 to \\udfff), which is not text"
            )
        return text

    def _read_parquet(self, path: SourceFile) -> Iterator[Piece]:
        for text, num_bytes in read_parquet(path, self.text_key):
            yield from self._document(text, num_bytes)

    def _read_arrow(self, path: SourceFile) -> Iterator[Piece]:
        for text, num_bytes in read_arrow(path, self.text_key):
            yield from self._document(text, num_bytes)

    def _document(self, text: str | None, num_source_bytes: int) -> Iterator[Piece]:
        """A row; a null is an empty document, and the byte order mark of the file that it was made of is no text."""
        yield from self.cut((text or "").removeprefix(_BOM), num_source_bytes)

    def _read_txt(self, path: SourceFile) -> Iterator[Piece]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = num_read = 0
        rest = ""
        with _open(path) as (file, position):
            while True:
                block = file.read(self.piece_size)
                pending = len(decoder.getstate()[0])
                try:
                    rest += decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, offset - pending + error.start, error.object[error.start]) from error
                if offset == 0:
                    rest = rest.removeprefix(_BOM)
                if not block:
                    break
                offset += len(block)
                *parts, rest = self._parts(rest)
                for part in parts:
                    num_before, num_read = num_read, position()
                    yield Piece(part, ends_document=False, num_source_bytes=num_read - num_before)
            yield Piece(rest, ends_document=True, num_source_bytes=position() - num_read)

    READERS: ClassVar[Mapping[str, Callable[[Any, SourceFile], Iterator[Piece]]]] = {
        ".txt": _read_txt,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
        # As C4 and Dolma name their lines.
        ".json": _read_jsonl,
    }


@contextmanager
def _open(path: SourceFile) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file without its compression, and what tells the bytes read from the disk so far."""
    with path.open("rb") as stored:
        suffix = PurePath(path).suffix
        if suffix not in _CODECS:
            yield stored, stored.tell
            return
        stream = pyarrow.CompressedInputStream(stored, _CODECS[suffix])
        yield io.BufferedReader(stream), stored.tell


def _format(file: SourceFile) -> str:
    """The suffix that names the format, without that of a compression of the whole file."""
    path = PurePath(file)
    inner = path.with_suffix("").suffix
    return inner if path.suffix in _CODECS and inner in _COMPRESSED else path.suffix


def _value(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a key in the object of one: `meta.text`; all below a null is null."""
    if key in row:
        return row[key]
    for name, inner in row.items():
        if key.startswith(f"{name}.") and inner is None:
            return None
        if key.startswith(f"{name}.") and isinstance(inner, dict):
            found = _value(inner, key.removeprefix(f"{name}."))
            if found is not _MISSING:
                return found
    return _MISSING


def _match(pattern: str) -> Sequence[SourceFile]:
    if scheme_of(pattern):
        files = find_remote(pattern, "model.data.text_files")
        for file in files:
            _check_format(file)
        return files
    expanded = expand_user(pattern, "model.data.text_files")
    if expanded.is_dir():
        return _saved_data_set(expanded, pattern)
    # An existing file comes first: its name may contain the characters of a pattern.
    paths = [expanded] if expanded.exists() else [Path(p) for p in sorted(glob.glob(str(expanded), recursive=True))]
    paths = [path.absolute() for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"model.data.text_files: {pattern} matches no file (relative to {Path.cwd()})")
    for path in paths:
        _check_format(path)
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(f"model.data.text_files: {path} cannot be read: {error.strerror}") from error
    return paths


def _check_format(file: SourceFile) -> None:
    if _format(file) not in FileSource.READERS:
        known = f"{', '.join(FileSource.READERS)}, and {' and '.join(_COMPRESSED)} with {', '.join(_CODECS)}"
        raise UserError(f"model.data.text_files: {file} has the suffix {PurePath(file).suffix!r}; known are {known}")


def _saved_data_set(directory: Path, pattern: str) -> list[Path]:
    """The files of a folder that Hugging Face's `save_to_disk` wrote, in their order."""
    problem = f"model.data.text_files: {pattern} is a directory; "
    if (directory / "dataset_dict.json").is_file():
        parts = sorted(path.parent.name for path in directory.glob("*/state.json"))
        raise UserError(f"{problem}it holds the data sets {', '.join(parts)}: name those to read, as {pattern}/NAME")
    try:
        names = [part["filename"] for part in read_foreign_json(directory / "state.json")["_data_files"]]
        paths = [directory.absolute() / name for name in names if Path(name).name == name]
    except (FileNotFoundError, ForeignFileError, KeyError, TypeError):
        paths = []
    if not paths:
        raise UserError(f"{problem}name its files: {directory / '**' / _names_in(directory)}")
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{problem}its state.json names {missing[0].name}, which is not there")
    return paths


def _names_in(directory: Path) -> str:
    """A pattern of the names of files of text in a directory; of Hugging Face's, not of the caches beside its data."""
    compressed = (f"*{suffix}{codec}" for suffix in _COMPRESSED for codec in _CODECS)
    # Those of .json, the last, may be no data.
    patterns = ["data-*.arrow", *compressed, *(f"*{suffix}" for suffix in FileSource.READERS)]
    return next((pattern for pattern in patterns if any(directory.rglob(pattern))), "*.jsonl")


def _not_utf8(path: SourceFile, offset: int, byte: int) -> UserError:
    encoding = "UTF-16" if offset == 0 and byte in (0xFE, 0xFF) else "LATIN1"
    return UserError(
        f"{path}: not UTF-8: byte 0x{byte:02x} at offset {offset:,}; convert it, e.g. with "
        f"`iconv -f {encoding} -t UTF-8`, or remove it from model.data.text_files"
    )


register("data_source", "text", lambda data, patterns: FileSource(patterns, data.text_key), __name__)
