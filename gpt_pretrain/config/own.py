"""What extensions add to the configuration: their names, and groups of keys beside the schema's.

`gpt_pretrain.extend` fills it while extensions are imported, before anything is composed or checked. Nothing here
imports them: `rules.extensions` does.
"""

from collections.abc import Sequence
from dataclasses import MISSING, fields, make_dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

from gpt_pretrain.config import schema

LOADED: list[str] = []
"""The modules that this process has imported as extensions, in their order."""
GIVEN: list[str] = []
"""The command line's `extensions=[…]`, which may drop those of a checkpoint; empty if it gives none."""
SECTIONS: dict[str, type] = {}
"""Dataclasses of registered keys, by the name of their group."""


@cache
def config_class() -> type[schema.Config]:
    """The schema's `Config`, with a field for each registered group."""
    if not SECTIONS:
        return schema.Config
    made = make_dataclass(
        "Config", [*SECTIONS.items()], bases=(schema.Config,), kw_only=True, slots=True, module=schema.__name__
    )
    return cast(type[schema.Config], made)


def default_values() -> dict[str, dict[str, Any]]:
    """What registered keys are unless somebody sets them, by group."""
    return {
        group: {
            field.name: _plain(field.default if field.default_factory is MISSING else field.default_factory())
            for field in fields(section)
        }
        for group, section in SECTIONS.items()
    }


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def missing_problem(saved: Any) -> str | None:
    """The message if `extensions` of a saved configuration names modules that this process has not imported.

    A file is not asked to import anything: the user names what is to run.
    """
    names = [str(name) for name in saved] if isinstance(saved, Sequence) and not isinstance(saved, str) else []
    missing = [name for name in names if name not in LOADED]
    if not missing:
        return None
    return (
        f"extensions=[{','.join(names)}]: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed and not "
        "loaded, because a saved configuration imports nothing by itself; if you trust the code, give "
        f"extensions=[{','.join([*LOADED, *missing])}]"
    )
