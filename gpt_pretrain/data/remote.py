"""Files of object stores and web servers: `s3://`, `gs://`, `hf://`, `http://` and `https://`, through fsspec.

Text is read by ranges while it is tokenized, and nothing of it is stored. Token files are downloaded once into the
cache: a run reads their samples in random order for days, which needs a local disk. A file's identity is its size and
its version (ETag, generation, hash or time, whichever the store tells); one that changes while it is read is refused.

Credentials are the libraries' own: variables and files of the user, never a key of the configuration.
"""

import hashlib
import importlib.util
import io
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gpt_pretrain.config.errors import InterruptedReadError, UserError, counted, format_bytes, how_to_install, reason
from gpt_pretrain.config.urls import STORES, WILDCARDS, scheme_of
from gpt_pretrain.data.cache import Progress, fingerprint, make_once

# Lists and versions are asked for while a user waits; a range may outlast a store's restart.
_ASK_DELAYS_S = (0.5, 1.0, 2.0)
_READ_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Ranges grow from the first size to the last, so that the beginning of a file, or its footer, costs little.
_FIRST_RANGE = 256 * 1024
_LAST_RANGE = 16 * 1024 * 1024
_NUM_AHEAD = 3
_CHECKSUM = ".sha256"
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "last_modified", "updated")
# Of the 4xx, these pass: timeout, too early, too many requests.
_PASSING = (408, 425, 429)
_NO_ACCESS = re.compile("Credential|Gated|RefreshError")
_SECRETS = re.compile(r"(?<=://)[^\s/@]+@|(?<=[\w/])\?[^\s'\"]+=[^\s'\"]+")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store, as the store described it."""

    url: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def identity(self) -> list[Any]:
        """Address, size and version: changes whenever the file does."""
        return [self.url, self.size, self.version]

    def open(self, mode: Literal["rb"]) -> io.BufferedReader:
        """Its bytes, for reading alone. Reading raises a UserError if the store does not give them."""
        return io.BufferedReader(_Ranges(self), _FIRST_RANGE)

    def check_unchanged(self) -> None:
        """Refuses what was read so far if the file is another one now."""
        now = _described(self.url, _ask(self.url, lambda: _info(self.url)))
        if now != self:
            raise UserError(f"{self.url} changed while it was read; start again when it is complete")


type SourceFile = Path | RemoteFile
"""A file of this machine or of a store."""


def size_of(file: SourceFile) -> int:
    """Bytes of a file."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def find_remote(pattern: str, key: str) -> list[RemoteFile]:
    """The files of an address, or of one with wildcards, sorted by name.

    Raises:
        UserError: There are none, or the store's library, its credentials or the store is missing.
    """
    asked = f"{key}: {pattern}"
    if not WILDCARDS.intersection(pattern):
        found = [_ask(pattern, lambda: _info(pattern), key=key)]
        if found[0]["type"] == "directory":
            raise UserError(f"{asked} is a directory; name its files: {pattern.rstrip('/')}/**/*.jsonl")
    else:
        listed = _ask(pattern, lambda: _file_system(pattern).glob(pattern, detail=True), key=key)
        found = [info for _, info in sorted(listed.items()) if info["type"] == "file"]
    if not found:
        raise UserError(f"{asked} matches no file; the bucket or repository may not be there either")
    scheme = scheme_of(pattern)
    is_web = scheme in ("http", "https")
    return [_described(info["name"] if is_web else f"{scheme}://{info['name']}", info) for info in found]


def local_prefixes(
    prefixes: Mapping[str, Sequence[str]], key: str, directory: Path, progress: Progress
) -> dict[str, list[str]]:
    """Paths of `.bin/.idx` pairs without suffix, by source; those of stores are downloaded into the cache first.

    Raises:
        UserError: One is not there, or cannot be read or stored.
    """
    # All are looked for before the first is downloaded.
    pairs = {prefix: _find_pair(prefix, key) for each in prefixes.values() for prefix in each if scheme_of(prefix)}
    return {
        name: [_stored(prefix, pairs[prefix], directory, progress) if prefix in pairs else prefix for prefix in each]
        for name, each in prefixes.items()
    }


def _find_pair(prefix: str, key: str) -> dict[str, RemoteFile]:
    if WILDCARDS.intersection(prefix):
        raise UserError(f"{key}: {prefix} has wildcards, and a path names one pair of files; name each pair")
    return {suffix: find_remote(prefix + suffix, key)[0] for suffix in (".idx", ".bin")}


def _stored(prefix: str, files: Mapping[str, RemoteFile], directory: Path, progress: Progress) -> str:
    name = PurePosixPath(prefix).name
    identity = [file.identity() for file in files.values()]
    entry = directory / "downloads" / f"{name}-{fingerprint(identity)[:16]}"

    def fill(folder: Path) -> None:
        _download({folder / (name + suffix): file for suffix, file in files.items()}, progress)
        index = folder / f"{name}.idx"
        index.with_name(index.name + _CHECKSUM).write_bytes(_checksum(index))

    make_once(entry, progress, fill, goes_on=True)
    _check_index(entry / f"{name}.idx")
    return str(entry / name)


def _checksum(path: Path) -> bytes:
    """A line as of the program sha256sum."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n".encode()


def _check_index(path: Path) -> None:
    """Refuses a cached index that is not what was downloaded: one number in it moves all documents that follow.

    Its size tells nothing of that.
    """
    stored = path.with_name(path.name + _CHECKSUM)
    # Earlier versions stored none.
    if stored.exists() and stored.read_bytes() != _checksum(path):
        raise UserError(
            f"{path} is not what was downloaded, by {stored.name}; remove {path.parent} to download it again"
        )


def _download(files: dict[Path, RemoteFile], progress: Progress) -> None:
    """Fetches what the targets lack of the files."""
    folder = next(iter(files)).parent
    needed = sum(file.size - (path.stat().st_size if path.exists() else 0) for path, file in files.items())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder.parent} has {format_bytes(free)} free, and the download takes {format_bytes(needed)}; set "
            "model.data.cache_dir to a larger disk"
        )
    for path, file in files.items():
        with path.open("ab") as target, file.open("rb") as source:
            source.seek(target.tell())
            progress.start(f"downloading {file}", file.size, done=target.tell(), is_bytes=True)
            while block := source.read(_LAST_RANGE):
                target.write(block)
                progress.advance(len(block))
            progress.finish()
        file.check_unchanged()


@cache
def _of_scheme(scheme: str) -> Any:
    store = STORES[scheme]
    if importlib.util.find_spec(store.module) is None:
        raise UserError(f"{scheme}:// needs {store.module}, which is not installed; {how_to_install('remote')}")
    import fsspec

    options: dict[str, Any] = {}
    if store.module == "aiohttp":
        # The bytes as they are stored, also of .gz; proxies and ~/.netrc count.
        options = {
            "headers": {"Accept-Encoding": "identity"},
            "client_kwargs": {"auto_decompress": False, "trust_env": True},
        }
    return fsspec.filesystem(scheme, use_listings_cache=False, **options)


def _file_system(url: str) -> Any:
    return _of_scheme(scheme_of(url) or "")


def _info(url: str) -> dict[str, Any]:
    system = _file_system(url)
    # Some libraries keep what they were told.
    system.invalidate_cache()
    try:
        found: dict[str, Any] = system.info(url)
    except FileNotFoundError as error:
        # Of web servers fsspec says so whatever has failed.
        if STORES[scheme_of(url) or ""].module == "aiohttp" and isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
    return found


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), None)
    size = info.get("size")
    if version is None or size is None or info.get("partial") is False:
        lacks = "ETag and Last-Modified" if version is None else "its size" if size is None else "ranges of a file"
        raise UserError(f"{url}: the server does not give {lacks}, without which it cannot be read safely; download it")
    return RemoteFile(url, int(size), version)


def _ask[Answer](
    url: str, question: Callable[[], Answer], delays_s: Sequence[float] | None = None, key: str = ""
) -> Answer:
    """The answer of a store, which is asked again after each delay if it gave none; `key` is what names the URL.

    Without delays it is asked a few times, here or in the store's library.

    Raises:
        UserError: It gave none; errors that asking again cannot help are raised at once.
    """
    if delays_s is None:
        delays_s = () if STORES[scheme_of(url) or ""].asks_again else _ASK_DELAYS_S
    for delay_s in (*delays_s, None):
        try:
            return question()
        except UserError:
            raise
        except Exception as error:  # each library raises errors of its own
            # The cause is not kept: its message may hold the address that a store redirects to, with its signature.
            if delay_s is None or _is_final(error):
                raise _told(url, key, error, len(delays_s) + 1) from None
        time.sleep(delay_s)
    raise AssertionError("the last attempt returns or raises")


def _status(error: Exception) -> int:
    for holder, name in ((error, "status"), (error, "code"), (getattr(error, "response", None), "status_code")):
        if isinstance(status := getattr(holder, name, None), int):
            return status
    return 0


def _lacks_access(error: Exception) -> bool:
    name = type(error).__name__
    return isinstance(error, PermissionError) or _status(error) in (401, 403) or bool(_NO_ACCESS.search(name))


def _is_final(error: Exception) -> bool:
    status = _status(error)
    return (
        isinstance(error, FileNotFoundError | ImportError)
        or _lacks_access(error)
        or (400 <= status < 500 and status not in _PASSING)
    )


def _told(url: str, key: str, error: Exception, num_attempts: int) -> UserError:
    what = f"{key}: {url}" if key else url
    why = _SECRETS.sub("…", reason(error))
    if _lacks_access(error):
        return UserError(f"{what}: no access ({why}); {STORES[scheme_of(url) or ''].access}")
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return UserError(f"{what}: there is no such file, folder or bucket ({why})")
    if _is_final(error):
        return UserError(f"{what} cannot be read: {why}")
    attempts = counted(num_attempts, "attempt")
    return InterruptedReadError(
        f"{what} cannot be read: {why}, after {attempts}; the same command goes on when the store answers"
    )


class _Ranges(io.RawIOBase):
    """The bytes of a file, with ranges read ahead by threads.

    The threads are daemons: a signal ends the program while a store keeps one waiting.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0
        self._block, self._block_start = b"", 0
        # Ranges on their way, by their starts, and where the next begins.
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._next, self._length = 0, _FIRST_RANGE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size:
            return 0
        if not self._block_start <= self._position < self._block_start + len(self._block):
            self._advance()
        part = memoryview(self._block)[self._position - self._block_start :][: len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _advance(self) -> None:
        """Makes the block that begins at the position the present one."""
        if self._position != (self._ahead[0][0] if self._ahead else self._next):
            self._ahead.clear()
            self._next, self._length = self._position, _FIRST_RANGE
        num_wanted = 1 if self._length == _FIRST_RANGE else 1 + _NUM_AHEAD
        while len(self._ahead) < num_wanted and self._next < self._file.size:
            end = min(self._next + self._length, self._file.size)
            self._ahead.append((self._next, _in_thread(self._file, self._next, end)))
            self._next, self._length = end, min(2 * self._length, _LAST_RANGE)
        self._block_start, block = self._ahead.popleft()
        self._block = block.result()


def _in_thread(file: RemoteFile, start: int, end: int) -> "Future[bytes]":
    found: Future[bytes] = Future()

    def read() -> None:
        try:
            found.set_result(_ask(file.url, lambda: _read_range(file, start, end), _READ_DELAYS_S))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=read, daemon=True, name=f"reads {file}").start()
    return found


def _read_range(file: RemoteFile, start: int, end: int) -> bytes:
    block: bytes = _file_system(file.url).cat_file(file.url, start=start, end=end)
    if len(block) > end - start:
        raise UserError(f"{file}: the server answers a range with more of the file; download it")
    if len(block) < end - start:
        raise OSError(f"{len(block):,} bytes came instead of {end - start:,}")
    return block
