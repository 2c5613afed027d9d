"""What `--help` prints of every command: how to start, options, groups, and every key.

Values are those of the command line it is asked with, so that `model=llama3_8b --help` shows that model's. It is
written to be read at 80 columns and to be searched: a key and its documentation are whole lines.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_pretrain.config.errors import written
from gpt_pretrain.config.keys import Key, schema_sections

_BOLD, _DIM, _CYAN = 1, 2, 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a command says of itself."""

    about: str
    """What it does, what it leaves, how it ends; printed first."""
    examples: str


OPTIONS = """\
--help, -h               this text, with the values the other arguments give
--cfg, -c job|hydra|all  show the configuration instead of running it;
                         -p PACKAGE: a part; --resolve: no interpolations
--multirun, -m           run every combination of values given as KEY=A,B
--config-name, -cn NAME  start from NAME.yaml instead of config.yaml
--config-dir, -cd DIR    search DIR too, after conf/
--config-path, -cp DIR   search DIR instead of conf/
--info, -i               what Hydra knows: search path, defaults, plugins
--hydra-help, --version  Hydra's own help; Hydra's version"""


def _styled(text: str, style: int) -> str:
    """Text in a style of terminals (ECMA-48), or as it is where a pipe or a file reads it."""
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


def _key(key: Key, values: Mapping[str, Any], width: int) -> str:
    value = f" = {written(values[key.path])}" if key.path in values else ""
    doc = textwrap.fill(key.doc, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {_styled(key.path, _CYAN)}{value}{_styled(f'   ({key.type_text})', _DIM)}\n{doc}\n"


def print_help(
    program: Program,
    keys: Mapping[str, Key],
    values: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] | None = None,
    choices: Mapping[str, str] | None = None,
) -> None:
    """Prints the help of a command.

    Args:
        program: The command.
        keys: The keys that it takes, by their dotted names.
        values: Key to the value that it has; open values are left out.
        groups: Each group's options; None for a command that composes no configuration.
        choices: Each group's chosen option.
    """
    width = shutil.get_terminal_size().columns
    text = f"{program.about}\n{_heading('Examples', program.examples)}"
    if groups is None:
        text += _heading("Keys: give each as KEY=VALUE or --KEY VALUE; those without a value here are needed")
    else:
        text += _heading("Options", OPTIONS) + _groups(groups, choices or {}, width)
        text += _heading("Keys: set one with KEY=VALUE; ++KEY=VALUE is the same")
    section = ""
    for path, key in keys.items():
        parent = path.rpartition(".")[0]
        if parent not in ("", section):
            doc = textwrap.fill((schema_sections()[parent].__doc__ or "").replace("`", ""), width)
            text += f"\n{_styled(doc, _BOLD)}\n"
        section = parent
        text += _key(key, values, width)
    sys.stdout.write(text)
