"""A data source that an extension has registered, as a `TextSource`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.cache import file_identity
from gpt_pretrain.data.sources import Piece, TextSource
from gpt_pretrain.extend.data import DataSource
from gpt_pretrain.extend.registry import Registered


class OwnSource(TextSource):
    """The documents of an `extend.DataSource`; whatever its code raises names the extension.

    Raises:
        UserError: It names no files, or others than there are, or its identity is no JSON.
    """

    def __init__(self, registered: Registered, config: Config) -> None:
        self._registered = registered
        with registered.named("__init__"):
            self._source: DataSource = registered.value(config)
            self.files = [Path(file).absolute() for file in self._source.files]
        missing = [str(file) for file in self.files if not file.is_file()]
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
        return ["extension", self._registered.digest, own, [file_identity(path) for path in self.files]]

    def read_file(self, path: Path) -> Iterator[Piece]:
        """Pieces of the documents of one file."""
        with self._registered.named(f"documents of {path}"):
            texts = self._source.documents(path)
            if isinstance(texts, str):
                raise UserError(
                    f"documents() of {path} returned a str, whose letters would be the documents; yield texts, or "
                    "return a list of them"
                )
            for text in texts:
                if not isinstance(text, str):
                    raise UserError(f"documents() of {path} gave a {type(text).__name__}, and a document is a str")
                yield from self.cut(text, len(text))
