"""Megatron-LM's arguments, from a command line or a shell script, read by the parser that the wheel brings.

`megatron.training.arguments.add_megatron_arguments` is the authority on names, types and defaults. What is read of a
script is the words after `….py` in the command that knows most of these options; the launcher's own stand before it.
"""

import argparse
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Never

from gpt_pretrain.config.errors import ConfigError, counted
from gpt_pretrain.translate.shell import Command, Script, read_script
from gpt_pretrain.translate.shell_words import UNKNOWN

# Names of earlier versions, which scripts still use.
_RENAMED = {
    "--fp8-hybrid": ["--fp8-format", "hybrid"],
    "--fp8-e4m3": ["--fp8-format", "e4m3"],
    "--use-custom-fsdp": ["--use-megatron-fsdp"],
    "--layernorm-epsilon": ["--norm-epsilon"],
    "--use-flash-attn-v2": ["--use-flash-attn"],
    "--tensorboard-logdir": ["--tensorboard-dir"],
}
# torchrun's, torch.distributed.launch's and srun's.
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--gpus-per-node")
_NODES = ("--nnodes", "--nodes", "-N")
_SBATCH = re.compile(r"^#SBATCH\s+(\S.*)$", re.MULTILINE)


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> Never:
        raise ConfigError([f"Megatron-LM's own parser refuses it: {message}"])


@dataclass(kw_only=True, slots=True)
class Arguments:
    """Arguments as they have been read."""

    values: dict[str, Any]
    """Every option's value by the parser's name for it."""
    given: dict[str, str]
    """Names that were given, as they were written."""
    helps: dict[str, str]
    """What the parser says that each option does."""
    options: dict[str, str]
    """How each option is written."""
    devices: tuple[int, str] | None = None
    """Processes per node that the launcher was told to start, and the words that said so."""
    num_nodes: tuple[int, str] | None = None
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """Options that the parser does not know, and what is the matter."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Options whose values only the environment knows, and the way out."""
    notes: list[str] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)


@cache
def megatron_parser() -> argparse.ArgumentParser:
    """The wheel's own parser; megatron-core takes five seconds to import."""
    with warnings.catch_warnings():
        # megatron-core warns of every library that it does not find.
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        parser: argparse.ArgumentParser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    return parser


def _training_command(script: Script, known: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """(the launcher's words, Megatron-LM's words, notes) of the command that has most of the options."""

    def score(command: Command) -> int:
        return len({word.partition("=")[0] for word in command.words} & known.keys())

    commands = [each for command in script.commands for each in _unwrapped(command)]
    best, notes = max(commands, key=score, default=None), []
    if best is None or score(best) == 0:
        # Another script reads its variables, or a job that it submits.
        held = {each: name for name, values in script.variables.items() for each in _held(values)}
        best = max(held, key=score, default=None)
        notes = [] if best is None else [f"no command starts training; these are the options that {held[best]} holds"]
    if best is None or score(best) == 0:
        raise ConfigError(["no command with options of Megatron-LM is in it; give the script that starts training"])
    others = [each for each in commands if each is not best and score(each) > 1 and each.words != best.words]
    told = "another command with options of Megatron-LM, which is not translated"
    notes += [f"line {each.line}: {told}" for each in others]
    programs = [number for number, word in enumerate(best.words) if word.endswith(".py")]
    if programs and "gpt" not in best.words[programs[0]].rpartition("/")[2]:
        notes.append(f"the program is {best.words[programs[0]]}; what it does beside the options is not known")
    start = programs[0] + 1 if programs else next(n for n, word in enumerate(best.words) if word.startswith("--"))
    return [*best.words[:start]], [*best.words[start:]], notes


def _held(values: Sequence[str]) -> list[Command]:
    """What a variable holds, if it is words of a command: an array, or a text of them."""
    if len(values) > 1:
        return [Command(0, tuple(values))]
    return [each for text in values if " --" in f" {text}" for each in read_script(_whole(text), {}).commands]


def _whole(text: str) -> str:
    """A text to be read again, in which what is unknown stays as it is."""
    return UNKNOWN.sub(lambda mark: re.sub(r"(\W)", r"\\\1", mark[0]), text)


def _unwrapped(command: Command) -> list[Command]:
    """The command, or what it has a shell run: `srun … sh -c "python … --options"`."""
    for number, word in enumerate(command.words[:-1]):
        if word == "-c" and command.words[number - 1].rpartition("/")[2] in ("sh", "bash"):
            inner = read_script(_whole(command.words[number + 1]), {})
            outer = command.words[: number - 1]
            return [Command(command.line, (*outer, *each.words)) for each in inner.commands]
    return [command]


def _launched(words: Sequence[str], names: Sequence[str]) -> tuple[int, str] | None:
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        text = value if equals else next(iter(words[number + 1 : number + 2]), "")
        if name in names and re.fullmatch(r"\d{1,6}", text):
            return int(text), f"{name} {text}"
    return None


def _grouped(words: Sequence[str]) -> list[list[str]]:
    """Options with their values."""
    groups: list[list[str]] = []
    for word in words:
        if re.match(r"--?[a-zA-Z]", word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def read_arguments_of(text: str | None, words: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """Reads a script, an argument list, or both, of which the list counts last.

    Raises:
        ConfigError: The parser refuses a value, or the script has no such command.
    """
    parser = megatron_parser()
    options: dict[str, argparse.Action] = dict(parser._option_string_actions)
    found = Arguments(
        values={},
        given={},
        helps={action.dest: action.help or "" for action in parser._actions},
        options={action.dest: action.option_strings[0] for action in reversed(parser._actions)},
    )
    all_words = [*words]
    if text is not None:
        script = read_script(text, environment)
        launcher, own, notes = _training_command(script, options | dict.fromkeys(_RENAMED))
        all_words = [*own, *words]
        found.notes += [*script.notes, *notes]
        found.exported = script.exported
        sbatch = [word for line in _SBATCH.findall(text) for word in line.split("#")[0].split()]
        found.devices = _launched(launcher, _PER_NODE) or _launched(sbatch, _PER_NODE)
        found.num_nodes = _launched(launcher, _NODES) or _launched(sbatch, _NODES)
    kept = _known_words(all_words, options, found)
    values, rest = parser.parse_known_args(kept)
    found.values = vars(values)
    for group in _grouped(rest):
        found.unknown.append((" ".join(group), "the parser of this version takes no such word"))
    return found


def _known_words(words: Sequence[str], options: Mapping[str, argparse.Action], found: Arguments) -> list[str]:
    """The words that the parser can read; what is written of each option goes to `found.given`."""
    kept: list[str] = []
    for written in _grouped(words):
        name, equals, value = written[0].partition("=")
        group = [*_RENAMED.get(name, [name]), *([value] if equals else []), *written[1:]]
        name = group[0]
        shown = UNKNOWN.sub(_as_written, " ".join(written))
        missing = [each for word in group for each in UNKNOWN.findall(word)]
        if missing:
            found.missing.append((shown, _way_out(missing)))
        if name not in options:
            if not missing or name.startswith("-"):
                found.unknown.append((shown, "Megatron-LM of megatron-core 0.19 has no such option"))
        elif missing and options[name].type not in (None, str):
            # The parser would refuse the mark in place of a number; a path may stay unknown.
            continue
        else:
            found.given[options[name].dest] = shown
            kept += group
    return kept


def _as_written(mark: re.Match[str]) -> str:
    return f"${mark[1]}" if re.fullmatch(r"\w+", mark[1]) else mark[1]


def _way_out(missing: Sequence[str]) -> str:
    names = [name for name in dict.fromkeys(missing) if re.fullmatch(r"\w+", name)]
    commands = [name for name in dict.fromkeys(missing) if name not in names]
    ways = [f"--env {name}=…" for name in names]
    told = f"only the environment knows {', '.join(names)}; give {' '.join(ways)}" if names else ""
    if commands:
        what = f"{counted(len(commands), 'expression')} of the shell ({', '.join(commands)})"
        told += f"{'; ' if told else ''}nothing of the script runs, so {what} has no value"
    return told
