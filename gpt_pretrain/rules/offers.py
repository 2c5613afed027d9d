"""Ways out as they are typed: a rule names a key shortly, and the command line takes the whole."""

import re
from collections.abc import Iterable
from functools import cache

from gpt_pretrain.config.keys import is_known, schema_keys
from gpt_pretrain.config.source import find_conf_dir

_NAME = re.compile(r"(?<![\w.*/'\"-])[a-z]\w*(?:\.[a-z]\w*)*(?==)")


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in find_conf_dir().iterdir() if path.is_dir())


def spell_out(problems: Iterable[str]) -> list[str]:
    """The problems of rules, with whole keys behind their last semicolon, where they say what to type instead."""
    return [_spell_out(problem) for problem in problems]


def _spell_out(problem: str) -> str:
    told, semicolon, offer = problem.rpartition("; ")
    section = told.partition("=")[0].rpartition(".")[0]

    def whole(found: re.Match[str]) -> str:
        name = found[0]
        if is_known(name) or name in _groups():
            return name
        keys = [key for key in schema_keys() if key.endswith(f".{name}")]
        near = [key for key in keys if key == f"{section}.{name}"] or keys
        return near[0] if len(near) == 1 else name

    return told + semicolon + _NAME.sub(whole, offer)
