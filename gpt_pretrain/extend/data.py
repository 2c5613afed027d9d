"""What brings text and tokens: data sources and tokenizers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpt_pretrain.config.choices import DataImpl, TokenizerLibrary
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import registering

if TYPE_CHECKING:
    import tokenizers


class DataSource(Protocol):
    """Text in files, made as `cls(config)`; the run tokenizes it once, caches the tokens and splits the documents."""

    files: Sequence[Path]
    """What `documents` reads, in the order of the corpus; a change of path, size or time makes new tokens."""

    def __init__(self, config: Config) -> None: ...

    def documents(self, path: Path) -> Iterator[str]:
        """The documents of one file, the same ones in the same order each time."""

    def identity(self) -> Any:
        """A JSON value of all else that the text depends on, such as keys of your own; a change makes new tokens."""


def data_source[S: type[Any]](name: str) -> Callable[[S], S]:
    """Registers a class with the members of `DataSource`, as a decorator; `model.data.data_impl=NAME` chooses it."""
    methods = {"__init__": "config", "documents": "path", "identity": ""}
    return registering("data_source", name, methods, builtin=DataImpl)


type BuildTokenizer = Callable[[Config], "tokenizers.Tokenizer"]


def tokenizer(name: str) -> Callable[[BuildTokenizer], BuildTokenizer]:
    """Registers a function that makes a `tokenizers.Tokenizer`; `model.tokenizer.library=NAME` chooses it.

    The function gets the whole configuration and makes the same tokenizer each time, however it comes by it. The
    vocabulary has an end-of-document token such as <|endoftext|>. The run saves it as `tokenizer.json`, from which
    export and generation read it without the extension's help; a component in Python cannot be saved and is refused.
    """
    return registering("tokenizer", name, "config", builtin=TokenizerLibrary)
