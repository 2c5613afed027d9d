"""The code of this process's extensions, which all ranks must share and which a resume compares with the checkpoint's.

It is every .py file of a package whose modules have registered something or are named in `extensions`, whether it has
been imported or not: modules that need torch are imported later, inside functions. What such a package imports from
elsewhere does not count.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpt_pretrain.config import own
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import REGISTERED

# Reading more would delay the start; a package of that size holds more than extensions.
_MOST_FILES, _MOST_BYTES = 10_000, 256 * 2**20
# A name after a dot, or a quoted one, as for getattr.
_READ = re.compile(r"""[.'"]([^\W\d]\w*)""")
_READS_ALL = re.compile(r"\b(?:asdict|astuple|fields|vars|__dict__)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFile:
    """A .py file of an extension's package, as it was when the process first asked."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} (SHA-256 {self.sha256[:12]}…)"


def code_files() -> dict[str, CodeFile]:
    """The files by their names in the packages, such as "my_lab/lion.py".

    Raises:
        UserError: A package has more than 10,000 .py files, or more than 256 MiB of them, or one cannot be read.
    """
    modules = [each.module for each in REGISTERED] + own.LOADED
    packages = sorted({module.partition(".")[0] for module in modules} & set(sys.modules))
    return {name: file for package in packages for name, file in _read(package, tuple(_places(package))).items()}


def code_digests() -> dict[str, str]:
    """SHA-256 of the names and contents of each package's files, by the package, for a checkpoint's manifest."""
    digests = {}
    files = code_files()
    for package in sorted({_package_of(name) for name in files}):
        lines = [f"{name} {file.sha256}\n" for name, file in files.items() if _package_of(name) == package]
        digests[package] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return digests


def unread_keys(config: Config) -> Iterator[str]:
    """Keys of extensions that somebody has set though no line of the extensions' code names them, each as a warning.

    Code that asks a dataclass for all of its fields reads every key.
    """
    defaults = own.default_values()
    given = {
        f"{group}.{name}": value
        for group, values in defaults.items()
        for name, default in values.items()
        if (value := getattr(getattr(config, group), name)) != default and getattr(value, "name", value) != default
    }
    if not given:
        return
    texts = [file.path.read_text(encoding="utf-8", errors="replace") for file in code_files().values()]
    if any(map(_READS_ALL.search, texts)):
        return
    read = {name for text in texts for name in _READ.findall(text)}
    for key, value in given.items():
        if key.rpartition(".")[2] not in read:
            yield f"{key}={show(value)} changes nothing: no line of the extensions' code reads it; leave it out"


def _package_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def _places(package: str) -> list[str]:
    """The folders of a package, or the file of a module that stands by itself."""
    module = sys.modules[package]
    file = getattr(module, "__file__", None)
    return list(getattr(module, "__path__", [])) or ([] if file is None else [file])


@cache
def _read(package: str, places: tuple[str, ...]) -> dict[str, CodeFile]:
    found: dict[str, CodeFile] = {}
    num_bytes = 0
    for name, path in (each for place in places for each in _python_files(package, Path(place))):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} of an extension cannot be read: {error}") from error
        num_bytes += len(content)
        if len(found) == _MOST_FILES or num_bytes > _MOST_BYTES:
            raise UserError(
                f"{package} ({places[0]}) has more than {_MOST_FILES:,} .py files or {_MOST_BYTES // 2**20} MiB of "
                "them, too many to compare between ranks; put the extension into a package of its own"
            )
        found[name] = CodeFile(path=path, sha256=hashlib.sha256(content).hexdigest())
    return dict(sorted(found.items()))


def _python_files(package: str, place: Path) -> Iterator[tuple[str, Path]]:
    """The files that Python could import."""
    if place.is_file():
        yield place.name, place
    for parent, folders, names in os.walk(place, followlinks=True):
        folders[:] = [name for name in folders if name.isidentifier() and name != "__pycache__"]
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            if path.is_file():
                yield f"{package}/{path.relative_to(place).as_posix()}", path
