"""`extend.keys`: a dataclass of an extension as a group of keys."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, cast

from gpt_pretrain.config import own
from gpt_pretrain.config.convert import WrongValue, convert
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.config.files import group_names
from gpt_pretrain.config.keys import TYPE_NAMES, declare_section, schema_keys, schema_sections, section_keys
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import register


def keys[D: type[Any]](group: str) -> Callable[[D], D]:
    """Registers a dataclass as a group of keys, as a decorator: its field `beta` becomes the key `GROUP.beta`.

    Every field has a default and the string below it as its help; the class's docstring is the title of the group.
    Types are int, float, bool, str, an Enum, a list of the first four, `dict[str, …]` of them, and any of these with
    `| None`.
    """

    def add(cls: D) -> D:
        if not group.isidentifier():
            raise UserError(f"keys {group!r}: the name of a group consists of letters, digits and _")
        if group not in own.SECTIONS and group in {*schema_keys(), *schema_sections(), *group_names(), "hydra"}:
            raise UserError(f"keys {group!r}: this program has a key or a group of that name; choose another")
        _check_keys(group, cls)
        register("keys", group, cls, cls.__module__)
        declare_section(group, cls)
        return cls

    return add


def _check_keys(group: str, cls: type) -> None:
    if not is_dataclass(cls):
        raise UserError(f"keys {group!r}: {cls.__name__} is no dataclass; put @dataclass below @keys")
    if (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        raise UserError(f"keys {group!r}: {cls.__name__} has no docstring, which --help prints above its keys")
    found = section_keys(cls)
    for field in fields(cls):
        path = f"{group}.{field.name}"
        key = found.get(field.name)
        kinds = () if key is None else (key.kind, key.item) if key.kind in (list, dict) else (key.kind,)
        if not kinds or not all(kind in {*TYPE_NAMES, list, dict} or _is_enum(kind) for kind in kinds):
            raise UserError(
                f"{path} has the type {field.type}, which no key can have; use one of docs/bring_your_own.md"
            )
        assert key is not None
        if not key.doc:
            raise UserError(f"{path} has no help: put a string literal on the line below it")
        if field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{path} has no default, so every run would need it; give it one")
        default = field.default if field.default_factory is MISSING else field.default_factory()
        try:
            convert(default.name if isinstance(default, Enum) else default, key)
        except WrongValue as wrong:
            raise UserError(f"{path}: its default {show(default)} {wrong}") from None


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def own_keys[D](config: Config, kind: type[D]) -> D:
    """The values of a registered group of keys, as an object of the dataclass that declares it."""
    for group, section in own.SECTIONS.items():
        if section is kind:
            return cast(D, getattr(config, group))
    raise UserError(f"{kind.__name__} is not registered with gpt_pretrain.extend.keys")
