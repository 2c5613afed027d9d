"""What a command takes and what its `--help` prints.

A command with a few `key=value` arguments of its own declares them in a dataclass, from which names, types,
documentation and messages come; nothing is composed. A field without a default is required. A string is everything
after the first `=`, taken literally; a list is `[a,b]`, with quotes around elements that have commas. A field that is a
dataclass is a section: `section.key=value`. `--key value`, `--key=value` and, for booleans, `--key` mean the same.

`--help` shows the values that its command line gives: `model=llama3_8b --help` shows that model's.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from gpt_pretrain.config.convert import read_value
from gpt_pretrain.config.errors import ConfigError, written
from gpt_pretrain.config.keys import Key, did_you_mean, is_known, nearest_name, schema_sections, section_keys

_BOLD, _DIM, _CYAN = 1, 2, 36
# A narrower terminal breaks the lines by itself: the names of groups leave no width to wrap.
_NARROWEST = 40
_OPTIONS = """\
--help, -h               this text, with the values the other arguments give
--cfg, -c job|hydra|all  show the configuration instead of running it;
                         -p PACKAGE: a part; --resolve: no interpolations
--multirun, -m           run every combination of values given as KEY=A,B
--config-name, -cn NAME  start from NAME.yaml instead of config.yaml
--config-dir, -cd DIR    search DIR too, after conf/
--config-path, -cp DIR   search DIR instead of conf/
--info, -i               what Hydra knows: search path, defaults, plugins
--version                Hydra's version"""


def _styled(text: str, style: int) -> str:
    """Text in a terminal's style (ECMA-48), plain in a pipe or a file."""
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def _heading(text: str, below: str = "") -> str:
    return f"\n{_styled(text, _BOLD)}\n" + (textwrap.indent(below, "  ") + "\n" if below else "")


def _groups(groups: Mapping[str, Sequence[str]], choices: Mapping[str, str], width: int) -> str:
    text = _heading("Groups: choose an option with GROUP=OPTION (* is chosen)")
    column = max(map(len, groups))
    for group, options in groups.items():
        shown = [f"{option}*" if option == choices.get(group) else option for option in options]
        lines = textwrap.wrap(", ".join(shown) or "none yet", width - column - 4)
        text += f"  {_styled(group.ljust(column), _CYAN)}  " + f"\n{' ' * (column + 4)}".join(lines) + "\n"
    return text


def _key_text(key: Key, values: Mapping[str, Any], width: int) -> str:
    value = f" = {written(values[key.path])}" if key.path in values else ""
    doc = textwrap.fill(key.doc, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {_styled(key.path, _CYAN)}{value}{_styled(f'   ({key.type_text})', _DIM)}\n{doc}\n"


def print_help(
    doc: str,
    keys: Mapping[str, Key],
    values: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] | None = None,
    choices: Mapping[str, str] | None = None,
) -> None:
    """Prints the help of a command.

    `doc` is the docstring of its module. `groups` and `choices` are None for a command that composes no configuration.
    """
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    about, _, examples = doc.strip().partition("\n\nExamples:\n")
    text = f"{about}\n{_heading('Examples', textwrap.dedent(examples))}"
    if groups is None:
        text += _heading("Keys: give each as KEY=VALUE or --KEY VALUE; those without a value here are needed")
    else:
        text += _heading("Options", _OPTIONS) + _groups(groups, choices or {}, width)
        text += _heading("Keys: set one with KEY=VALUE; ++KEY=VALUE is the same")
    section = ""
    for path, key in keys.items():
        parent = path.rpartition(".")[0]
        if parent not in ("", section):
            title = textwrap.fill((schema_sections()[parent].__doc__ or "").replace("`", ""), width)
            text += f"\n{_styled(title, _BOLD)}\n"
        section = parent
        text += _key_text(key, values, width)
    sys.stdout.write(text)


def defaults_of(kind: type) -> dict[str, Any]:
    """The values of optional keys."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.default_factory is list:
            values[field.name] = []
        elif field.default_factory is not MISSING:
            # A section; its values may be left out one by one.
            section = field.default_factory()
            values |= {f"{field.name}.{each.name}": getattr(section, each.name) for each in fields(section)}
        elif field.default is not MISSING:
            values[field.name] = field.default
    return values


def _pairs(
    arguments: Sequence[str], keys: dict[str, Key], plain: Sequence[str]
) -> Iterator[tuple[str, str | None, str]]:
    """Each argument's key, its value or None, and the argument itself."""
    rest, places = list(arguments), list(plain)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        # As on the command line of a run, plus signs make no difference.
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name.lstrip("+")
        if key not in keys and places and not name.startswith("-"):
            yield places.pop(0), argument, argument
        elif equals or key not in keys:
            yield key, text if equals else None, argument
        elif name.startswith("--") and keys[key].kind is bool:
            yield key, "true", argument
        else:
            yield key, rest.pop(0) if name.startswith("--") and rest else None, argument


def read_arguments[Arguments](kind: type[Arguments], arguments: Sequence[str], plain: Sequence[str] = ()) -> Arguments:
    """Reads what follows a command's name into the dataclass `kind`.

    The values of the keys in `plain` may be given without their keys, in this order.

    Raises:
        ConfigError: All unknown, repeated or missing keys, and values of the wrong type.
    """
    keys, defaults = section_keys(kind), defaults_of(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    meant: set[str | None] = set()
    for name, text, argument in _pairs(arguments, keys, plain):
        if name not in keys:
            nearest = nearest_name(name, keys)
            if text is None and (nearest is None or "/" in argument):
                problems.append(f"{argument} has no key; write KEY={argument} with one of {', '.join(keys)}")
            elif nearest is None:
                reason = "is training's, and this command does not train" if is_known(name) else "is not a key here"
                problems.append(f"{name} {reason}; leave it out, or use one of {', '.join(keys)}")
            else:
                problems.append(f"{name} is not a key of this command{did_you_mean(nearest)}")
            meant.add(nearest)
        elif text is None:
            problems.append(f"{name} has no value; write {name}=…")
            meant.add(name)
        elif name in values:
            problems.append(f"{argument}: {name} is given twice")
        else:
            try:
                values[name] = read_value(text, keys[name])
            except ConfigError as error:
                problems += error.problems
                values[name] = None
    problems += [
        f"{name} is missing; give {name}=… ({key.type_text}: {key.doc})"
        for name, key in keys.items()
        if name not in values and name not in defaults and name not in meant
    ]
    if problems:
        raise ConfigError(problems)
    return _build(kind, defaults | values)


def _build[Arguments](kind: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """The dataclass from its keys; those of a section begin with its name and a dot."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            inside = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
            arguments[name] = _build(hint, inside)
        else:
            arguments[name] = values[name]
    return kind(**arguments)
