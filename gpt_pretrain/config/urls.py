"""Paths of object stores and web servers: `s3://bucket/web/*.jsonl`. Their files are `data.remote`'s."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Store:
    """What a scheme needs."""

    module: str
    """Registers the scheme with fsspec."""
    access: str
    """Where its library looks for credentials."""
    asks_again: bool = False
    """Whether its library repeats a question itself, for half a minute or so."""


_WEB = Store("aiohttp", "put the user and the password into ~/.netrc")
STORES = {
    "s3": Store(
        "s3fs",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=true; "
        "AWS_ENDPOINT_URL for another store than Amazon's",
        asks_again=True,
    ),
    "gs": Store(
        "gcsfs",
        "set GOOGLE_APPLICATION_CREDENTIALS to a key file; for a public bucket FSSPEC_GS_TOKEN=anon",
        asks_again=True,
    ),
    "hf": Store("huggingface_hub", "set HF_TOKEN, and accept the data set's terms on its page"),
    "http": _WEB,
    "https": _WEB,
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
WILDCARDS = frozenset("*?[")


def scheme_of(path: str) -> str | None:
    """What stands before `://`; None for a path of this machine."""
    match = _URL.match(path)
    return match[1] if match else None


def url_problems(key: str, path: str) -> Iterator[str]:
    """Why a path is none that can be read; no secret that may be in it is repeated."""
    scheme = scheme_of(path)
    if scheme is None:
        return
    if scheme not in STORES:
        yield f"{key}: {scheme}:// is no known store; use {', '.join(f'{each}://' for each in STORES)} or a local path"
        return
    host, is_web = urlsplit(path).netloc, scheme in ("http", "https")
    if "@" in host:
        yield (
            f"{key}: {scheme}://…@{host.rpartition('@')[2]} names a user or a password, and logs and config.yaml keep "
            f"paths; {STORES[scheme].access}"
        )
    elif is_web and ("?" in path or "#" in path):
        # Signed addresses have their signature there.
        plain = re.split("[?#]", path)[0]
        yield (
            f"{key}: {plain}?… has a query, which may be a signature, and logs and config.yaml keep paths; use an "
            "address without one, or download the file"
        )
    elif is_web and WILDCARDS.intersection(path):
        yield f"{key}: {path} has wildcards, and web servers do not list their files; name each file"
