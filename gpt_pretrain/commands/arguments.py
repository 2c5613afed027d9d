"""The command line of a command that takes a few `key=value` of its own: a dataclass says which.

Beside the schema of the runs (`config.keys`): names, types, documentation and messages are made in the same way, but
there is nothing to compose. A field without a default has to be given. A string is what stands behind the first `=`, to
the letter, so that a prompt may hold anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

from gpt_pretrain.commands.door import exit_code
from gpt_pretrain.commands.help import Program, print_command_help
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.keys import did_you_mean, nearest_name, section_keys
from gpt_pretrain.config.typed import read_value
from gpt_pretrain.launch.environment import prepare_libraries

_HELP = ("-h", "--help")


def read_arguments[Arguments](kind: type[Arguments], arguments: Sequence[str], program: Program) -> Arguments | None:
    """Reads a command line.

    Args:
        kind: The dataclass of what there is to give.
        arguments: What follows the command's name.
        program: What `--help` says of the command.

    Returns:
        The arguments; None where `--help` was asked for, and printed.

    Raises:
        ConfigError: All that is wrong: unknown, repeated or missing keys, and values of another type.
    """
    keys = section_keys(kind)
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}  # type: ignore[arg-type]
    if any(argument in _HELP for argument in arguments):
        print_command_help(program, keys, defaults)
        return None
    values: dict[str, Any] = {}
    problems: list[str] = []
    meant: set[str | None] = set()
    for argument in arguments:
        name, equals, text = argument.partition("=")
        # As on the command line of a run, plus signs make no difference.
        name = name.lstrip("+")
        if name not in keys:
            nearest = nearest_name(name, keys)
            problems.append(f"{name} is not a key of this command{did_you_mean(nearest)}")
            meant.add(nearest)
        elif not equals:
            problems.append(f"{name} has no value; write {name}=…")
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
    return kind(**values)


def run_command[Arguments](
    command: Callable[[Arguments], None], kind: type[Arguments], arguments: Sequence[str], program: Program
) -> int:
    """Reads a command line, runs the command, and returns the exit code: 2 with `error: …` for what a user can mend.

    Args:
        command: What to do; imports torch itself, once its arguments are known to be right.
        kind: The dataclass of its arguments.
        arguments: What follows the command's name.
        program: What `--help` says of it.
    """

    def read_and_run() -> None:
        given = read_arguments(kind, arguments, program)
        if given is not None:
            prepare_libraries()
            command(given)

    return exit_code(read_and_run)
