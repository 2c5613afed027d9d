"""Where text comes from: a module for each kind, of the kind's name, which registers it as an extension does.

A source streams pieces of documents in a fixed order and never holds more than a few MiB: the disk bounds the size of a
corpus, not the memory. A long document comes in several pieces, cut where common pre-tokenizers also cut: before
a space between words, or between a line end and a word. A longer word is cut somewhere; `tokenizing.joined` asks the
tokenizer about each cut.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.cache import file_identity
from gpt_pretrain.data.remote import SourceFile, size_of
from gpt_pretrain.extend.data import DataSource
from gpt_pretrain.extend.registry import Registered, import_modules, registered_choice

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

    files: Sequence[SourceFile]
    piece_size = 1024 * 1024
    """Bytes read at once, and characters after which a document is cut at the next possible place, or after as many
    more."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """A JSON value that changes whenever the text may have changed."""

    @abstractmethod
    def read_file(self, path: os.PathLike[str]) -> Iterator[Piece]:
        """Pieces of the documents of one file, of `files`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(size_of, self.files))

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


class OwnSource(TextSource):
    """The documents of an `extend.DataSource`; whatever its code raises names its module.

    Raises:
        UserError: It names no files, or others than there are, or its identity is no JSON.
    """

    def __init__(self, registered: Registered, config: Config) -> None:
        self._registered = registered
        with registered.named("__init__"):
            self._source: DataSource = registered.value(config)
            self._paths = [Path(file).absolute() for file in self._source.files]
        self.files = self._paths
        missing = [str(file) for file in self._paths if not file.is_file()]
        if missing or not self.files:
            told = f"there is no file {missing[0]}" if missing else "it names no files"
            raise UserError(f"{registered}: {told}; its `files` are the files to read")
        self.identity()

    def identity(self) -> list[Any]:
        """Its files and its own identity, and the code that reads them."""
        with self._registered.named("identity"):
            own = self._source.identity()
        try:
            json.dumps(own)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self._registered}: identity() is no JSON value ({error}); return plain values") from None
        return ["extension", self._registered.digest, own, [file_identity(path) for path in self._paths]]

    def read_file(self, path: os.PathLike[str]) -> Iterator[Piece]:
        """Pieces of the documents of one file."""
        with self._registered.named(f"documents of {path}"):
            texts = self._source.documents(Path(path))
            if isinstance(texts, str):
                raise UserError(
                    f"documents() of {path} returned a str, whose letters would be the documents; yield texts, or "
                    "return a list of them"
                )
            for text in texts:
                if not isinstance(text, str):
                    raise UserError(f"documents() of {path} gave a {type(text).__name__}, and a document is a str")
                yield from self.cut(text, len(text))


def open_source(config: Config, patterns: Sequence[str]) -> TextSource:
    """The text of `model.data.data_impl`, in the files that match the patterns where the kind has some."""
    registered = registered_choice("data_source", config.model.data.data_impl)
    assert registered is not None, "each kind of text is a module's here or an extension's"
    if isinstance(registered.value, type):
        return OwnSource(registered, config)
    source: TextSource = registered.value(config.model.data, patterns)
    return source


import_modules(__name__)
