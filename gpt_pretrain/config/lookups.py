"""A bound on how often the values of a configuration look each other up (`${name}`).

A value may look up two others, each of which looks up two others: a file of forty lines would take for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError

# Made while another value is looked up. Each takes half a millisecond.
_MOST_LOOKUPS = 1000


class _Lookups:
    """Those made so far, and how many are being made, one for another."""

    def __init__(self) -> None:
        self.made = self.depth = 0


_counted: ContextVar[_Lookups | None] = ContextVar("lookups", default=None)
_resolve = Container.resolve_parse_tree


def _resolve_counted(container: Container, *arguments: Any, **keywords: Any) -> Any:
    """OmegaConf's evaluation of one value with `${…}`, refused beyond the bound."""
    lookups = _counted.get()
    if lookups is None:
        return _resolve(container, *arguments, **keywords)
    # A list of many values that look one other up each is as long as its file.
    lookups.made += lookups.depth > 0
    if lookups.made > _MOST_LOOKUPS:
        raise InterpolationResolutionError(f"values look each other up more than {_MOST_LOOKUPS:,} times")
    lookups.depth += 1
    try:
        return _resolve(container, *arguments, **keywords)
    finally:
        lookups.depth -= 1


# OmegaConf has no bound of its own, and this is the one function that all its look-ups go through.
Container.resolve_parse_tree = _resolve_counted  # type: ignore[method-assign, assignment]


@contextmanager
def bounded_lookups() -> Iterator[None]:
    """Bounds the look-ups made inside; OmegaConf raises `InterpolationResolutionError` beyond."""
    token = _counted.set(_Lookups())
    try:
        yield
    finally:
        _counted.reset(token)
