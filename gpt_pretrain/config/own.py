"""What is added to the schema: keys of the program's own kernels, and the names and groups of keys of extensions.

`gpt_pretrain.extend` adds the latter while extensions are imported, before anything is composed or checked. Nothing
here imports them: `rules.extensions` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass, replace
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, cast

from gpt_pretrain.config import schema

DROPS = "-"
"""Before the name of a module in `extensions`: the run goes on without it, though the checkpoint had it."""
LOADED: list[str] = []
"""`extensions` of this process, in their order: modules that it has imported, and dropped ones after `DROPS`."""
GIVEN: list[str] = []
"""The command line's `extensions=[…]`, which may drop those of a checkpoint; empty if it gives none."""
SECTIONS: dict[str, type] = {}
"""Dataclasses of registered keys, by the name of their group."""


@cache
def config_class() -> type[schema.Config]:
    """The schema's `Config`, with the keys of kernels and a field for each registered group."""
    added = [("model", _model_class()), *SECTIONS.items()]
    made = make_dataclass("Config", added, bases=(schema.Config,), kw_only=True, slots=True, module=schema.__name__)
    return cast(type[schema.Config], made)


def _model_class() -> type:
    """`ModelConfig` with the keys that stand in the files of fused kernels, each after the key that it names."""
    section = schema.ModelConfig
    members: list[Any] = [(each.name, each.type, field(metadata=each.metadata)) for each in fields(section)]
    # By its name: features stand above this package, which they import.
    for kernel in import_module("gpt_pretrain.features.registry").own_kernels():
        facts = replace(kernel.facts, help=kernel.__doc__)
        place = [name for name, *_ in members].index(kernel.after) + 1
        members.insert(place, (kernel.key, bool | None, field(metadata={"facts": facts})))
    made = make_dataclass(section.__name__, members, kw_only=True, slots=True, module=section.__module__)
    made.__doc__ = section.__doc__
    return made


def default_values() -> dict[str, dict[str, Any]]:
    """What registered keys are unless somebody sets them, by group."""
    return {
        group: {
            each.name: _plain(each.default if each.default_factory is MISSING else each.default_factory())
            for each in fields(section)
        }
        for group, section in SECTIONS.items()
    }


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def dropped_modules(saved: Any) -> list[str]:
    """Modules that `extensions` of a saved configuration names and this process has not imported."""
    names = [str(name) for name in saved] if isinstance(saved, Sequence) and not isinstance(saved, str) else []
    return [name for name in names if not name.startswith(DROPS) and name not in LOADED]


def missing_modules(saved: Any) -> list[str]:
    """Those among them that the command line does not drop: by `-NAME`, or all by `extensions=[]`."""
    drops_all = bool(GIVEN) and not LOADED
    return [] if drops_all else [name for name in dropped_modules(saved) if f"{DROPS}{name}" not in LOADED]


def missing_problem(saved: Any) -> str | None:
    """The message if a saved configuration has extensions that this process has neither imported nor dropped.

    A file is not asked to import anything: the user names what is to run.
    """
    missing = missing_modules(saved)
    if not missing:
        return None
    without = [*LOADED, *(f"{DROPS}{name}" for name in missing)] if LOADED else []
    return (
        f"extensions=[{','.join(map(str, saved))}]: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed "
        "and not loaded, because a saved configuration imports nothing by itself; if you trust the code, give "
        f"extensions=[{','.join([*LOADED, *missing])}], or extensions=[{','.join(without)}] to go on without it"
    )


def without_extensions(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """A saved configuration without the groups of keys that nobody has registered here."""
    known = {each.name for each in fields(config_class())}
    return {name: value for name, value in saved.items() if name in known or not isinstance(value, Mapping)}
