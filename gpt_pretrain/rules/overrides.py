"""The overrides of a command line, each checked on its own before Hydra sees it.

Hydra silently composes a typo after `+` or `++`, and its errors name its mechanics rather than the mistake.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.keys import (
    UNSUPPORTED_OPTIONS,
    did_you_mean,
    flatten,
    is_known,
    nearest_key,
    nearest_name,
    schema_keys,
    schema_sections,
    unknown_key,
)
from gpt_pretrain.config.load import section_problem
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader

# Sections that training does not read, and the commands that do; the longest name counts. A file may set them, but
# another command's command line may not.
READERS = {
    "plan": ("plan", "benchmark"),
    "benchmark": ("benchmark",),
    "benchmark.overrides": ("benchmark", "compare"),
    "compare": ("compare",),
    "coordinate_check": ("coordinate_check",),
}

# Groups without which the configuration is still complete.
OPTIONAL_GROUPS = ("experiment",)


def single_value(override: Override) -> Any:
    """An override's value; None for a sweep, which has several."""
    return None if override.is_sweep_override() else override.value()


def lines_of(overrides: Iterable[Override]) -> list[str]:
    """The overrides as they were typed."""
    return [str(override.input_line) for override in overrides]


def _readers_of(path: str) -> tuple[str, ...]:
    """The only commands that read a key; empty for a key that every run reads."""
    return READERS.get(".".join(path.split(".")[:2])) or READERS.get(path.partition(".")[0], ())


def _unread_key(path: str, command: str) -> str | None:
    """The message about a key that `command` does not read; None if it does."""
    readers = _readers_of(path)
    if not readers or command in readers:
        return None
    own = f"{command}.{path.partition('.')[2]}"
    way = f", or use {own}" if own in schema_keys() else ""
    modules = " and ".join(f"python -m gpt_pretrain.{reader}" for reader in readers)
    return f"{path} has no effect: only {modules} {'reads' if len(readers) == 1 else 'read'} it; leave it out{way}"


def override_problems(override: Override, loader: Loader, groups: Sequence[str], command: str | None) -> Iterator[str]:
    """Why Hydra may not see an override; `command` refuses keys that only other commands read, None accepts all."""
    name = override.key_or_group
    if not name:
        yield f"{override.input_line}: there is no key before =; write key=value"
    elif override.is_hydra_override() or name == "hydra":
        return
    elif name in groups or name in OPTIONAL_GROUPS:
        # `model={num_layers: 2}` sets keys of the section of that name, as in every Hydra application.
        sets_keys = isinstance(override.value(), dict)
        yield from _key_problems(override, groups, command) if sets_keys else _group_problems(override, loader)
    elif "/" in name or override.package is not None:
        yield f"{override.input_line}: there is no group {name!r}{did_you_mean(nearest_name(name, groups))}"
    else:
        yield from _key_problems(override, groups, command)


# Names that extensions register, where a group of files has the program's own.
_OF_EXTENSIONS = {"data": "model.data.data_impl", "optimizer": "model.optim.name", "fp8": "model.fp8_recipe"}


def _group_problems(override: Override, loader: Loader) -> Iterator[str]:
    group, line, value = override.key_or_group, override.input_line, override.value()
    if override.is_delete():
        if group not in OPTIONAL_GROUPS:
            yield f"{line} removes keys that a run needs; choose another option instead: {group}=…"
    elif value is None:
        way = f"leave it out with ~{group}" if group in OPTIONAL_GROUPS else "choose one of its options"
        yield f"{line}: Hydra takes no null for a group; {way}"
    elif override.is_force_add() or (override.is_add() and _is_chosen(group, loader)):
        yield f"{line}: a group's option is chosen without plus signs: {line and line.lstrip('+')}"
    else:
        chosen = override.sweep_iterator(Transformer.str) if override.is_discrete_sweep() else [value]
        options = loader.options(group)
        for option in chosen:
            if isinstance(option, list):
                yield f"{line}: a run has one option of {group}; write {group}=OPTION"
            elif str(option) not in options:
                instead = UNSUPPORTED_OPTIONS.get((group, str(option).lower()))
                nearest = did_you_mean(nearest_name(str(option), options)) if instead is None else f"; {instead}"
                known = f"; known: {', '.join(options)}" if options else ""
                own = _OF_EXTENSIONS.get(group) if instead is None else None
                way = "" if own is None else f"; an extension's is chosen with {own}={option}"
                yield f"{line}: {group} has no option {show(option)}{nearest}{known}{way}"


def _is_chosen(group: str, loader: Loader) -> bool:
    """Whether the defaults list has the group; `+` adds a user's own."""
    return group in loader.compose([]).hydra.runtime.choices


def _key_problems(override: Override, groups: Sequence[str], command: str | None) -> Iterator[str]:
    path = override.key_or_group
    if override.is_delete():
        if is_known(path):
            yield f"{override.input_line}: {path} cannot be removed, every run needs it; set it with {path}=…"
        else:
            yield unknown_key(path, groups)
        return
    for path, leaf in flatten(single_value(override), override.key_or_group):
        if path in schema_sections() and not override.is_sweep_override():
            yield section_problem(path, leaf)
        elif not is_known(path):
            yield unknown_key(path, groups)
        elif command is not None and (unread := _unread_key(path, command)) is not None:
            yield unread


def _text_as_typed(override: Override) -> Override:
    """The override, with quotes around a number for a text key: the path 1e3 is not 1000.0."""
    key, value = schema_keys().get(override.key_or_group), single_value(override)
    if key is None or key.kind is not str or isinstance(value, bool) or not isinstance(value, int | float):
        return override
    name, _, typed = str(override.input_line).partition("=")
    return parse_override(f"{name}='{typed}'")


def by_split(text: str) -> list[str]:
    """An override; NeMo's `data_prefix={train: […], validation: […]}` as overrides of the two keys that it means.

    Raises:
        ConfigError: It names other splits, or something else than lists.
    """
    plus, key = text.partition("model")[0], "model.data.data_prefix"
    if plus not in ("", "+", "++") or not text.startswith(f"{plus}{key}={{"):
        return [text]
    value = single_value(parse_override(text))
    keys = {"train": key, "validation": "model.data.validation_prefix"}
    are_lists = all(isinstance(files, list) for files in value.values())
    if "train" not in value or not set(value) <= set(keys) or not are_lists:
        form = f"{key}={{train: […], validation: […]}}"
        raise ConfigError([f"{text}: a run reads files to train and to validate on; write {form}"])
    return [f"{plus}{keys[name]}=[{','.join(map(_quoted, files))}]" for name, files in value.items()]


def _quoted(value: Any) -> str:
    """A path or a number in Hydra's grammar."""
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)


def _is_command(word: str) -> bool:
    """Whether `python -m gpt_pretrain.WORD` starts something."""
    package = Path(__file__).parent.parent
    return word.isidentifier() and any((package / file).is_file() for file in (f"{word}.py", f"{word}/__main__.py"))


def _word_problem(word: str, groups: Sequence[str]) -> str:
    """The message about an argument without `=`."""
    if _is_command(word):
        return f"{word!r} is a command of its own; write python -m gpt_pretrain.{word}"
    nearest = word if word in groups else nearest_key(word, groups)
    return f"{word!r} has no =; write {nearest or 'key'}=value, or leave it out"


def parse_override(text: str) -> Override:
    """One override of the command line.

    Raises:
        ConfigError: It does not follow Hydra's grammar.
    """
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        way = "write key=value, and quote a value with special characters: \"key='…'\""
        raise ConfigError([f"{text!r} does not follow Hydra's grammar of overrides; {way}"]) from error
    return override


def parse_overrides(overrides: Sequence[str], groups: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that follow Hydra's grammar, and a problem for each that does not."""
    parsed: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            problems.append(_word_problem(text, groups))
            continue
        try:
            parsed += [_text_as_typed(parse_override(each)) for each in by_split(text)]
        except ConfigError as error:
            problems += error.problems
    return parsed, problems


def without_sweeps(overrides: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """Separates overrides with several values, which only a sweep may have; Hydra would stop at the first."""
    problems = [
        f"{o.input_line} has several values; sweep over them with -m, or write a list in brackets, a string in quotes"
        for o in overrides
        if o.is_sweep_override()
    ]
    return [override for override in overrides if not override.is_sweep_override()], problems


def submitted_overrides(composed: DictConfig, config: Config, *, names_fp8: bool) -> tuple[list[str], list[str]]:
    """The overrides of one run of a sweep as a Slurm job of its own, and why such a job cannot take them.

    They name the run's directory and FP8 preset, because the job does not know the sweep. Without `names_fp8` the
    FP8 settings are those of a run's directory, which the job reads, too.
    """
    lines = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    assert isinstance(lines, list)
    keys = [str(line).lstrip("+").partition("=")[0] for line in lines]
    # A submitted run would refuse the keys of the comparison that submits it.
    task = [str(line) for line, key in zip(lines, keys, strict=True) if key != "run_dir" and not _readers_of(key)]
    fp8 = [f"fp8={composed.hydra.runtime.choices.fp8}"] if names_fp8 else []
    overrides = [*task, *fp8, f"run_dir={config.run_dir}"]
    problems = []
    assert config.run_dir is not None, "a sweep's jobs have directories of their own"
    # The batch script takes the path literally and gives it to Hydra in single quotes.
    if re.search(r"['\\\x00-\x1f\x7f]|\$\{", config.run_dir):
        problems.append(
            f"run_dir={show(config.run_dir)} has characters that a job of Slurm cannot be given (single quotes, "
            "backslashes, ${…}); give another one with run_dir=… or hydra.sweep.dir=…"
        )
    problems += [
        f"{line}: ${{hydra:…}} is of this sweep, and Slurm's job of one run does not know it; write the value"
        for line in overrides
        # As it was typed, or as Hydra's sweeper quotes it.
        if re.search(r"\$\\?\{hydra\b", line)
    ]
    return overrides, problems
