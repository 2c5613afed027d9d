"""Python's standard library as a corpus."""

import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.sources import Piece, TextSource
from gpt_pretrain.extend.registry import register


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
        self._names = names
        self.files = [self.root / name for name in names]

    def identity(self) -> list[Any]:
        """Python's version, and the files with their sizes."""
        files = [[name, (self.root / name).stat().st_size] for name in self._names]
        return ["stdlib", platform.python_implementation(), platform.python_version(), files]

    def read_file(self, path: os.PathLike[str]) -> Iterator[Piece]:
        """The file as one document, in the encoding it declares."""
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            # Distributions add files that break their declared encoding; they count as empty documents.
            text = ""
        yield from self.cut(text, os.stat(path).st_size)


register("data_source", "stdlib", lambda data, patterns: StdlibSource(), __name__)
