"""The formats that are translated, how a file tells which it is, and those that are refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.files import read_foreign_text
from gpt_pretrain.translate import (
    accelerate,
    automodel,
    gpt_neox,
    litgpt,
    megatron_bridge,
    megatron_lm,
    nanotron,
    nemo,
    torchtitan,
)
from gpt_pretrain.translate.megatron_arguments import read_arguments_of
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.structured_files import as_written, flat, has, look_up, read_values, with_options
from gpt_pretrain.translate.translation import (
    Program,
    Source,
    Translation,
    names,
    other_kinds_refused,
    translate_source,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the command was given."""

    files: Sequence[Path]
    words: Sequence[str]
    """Arguments of the other program."""
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """A name for the run."""
        return self.files[0].stem if self.files else "translated"


def _first_sentence(text: str) -> str:
    plain = " ".join(text.split())
    return plain.split(". ")[0].rstrip(".")[:160] or "its help says nothing"


def translate_megatron_lm(given: Given) -> Translation:
    """Translates Megatron-LM's arguments."""
    text = _found(read_foreign_text, given.files[0]) if given.files else None
    read = read_arguments_of(text, given.words, given.environment)
    translation = Translation(program="Megatron-LM", name=given.name, notes=read.notes)
    source = Source(
        program="Megatron-LM",
        values=read.values,
        given=read.given,
        described=lambda name: f"“{_first_sentence(read.helps[name])}”",
        default=lambda name, value: _as_option(read.options[name], value),
    )
    for key, launched in (("trainer.devices", read.devices), ("trainer.num_nodes", read.num_nodes)):
        if launched is not None:
            translation.set(key, *launched)
    if read.devices is None:
        translation.up_to_you.append(("trainer.devices", "the launcher's processes per node are not in it"))
    for words, why in read.unknown:
        translation.lose(words, why, "it is left out")
    translation.up_to_you += read.missing
    translation.not_needed += [
        (f"export {name}={value}", "the environment is yours to set; Megatron-LM's own needs do not hold here")
        for name, value in read.exported.items()
    ]
    translate_source(ROWS, megatron_lm.derive, source, translation)
    return translation


def _as_option(option: str, value: Any) -> str:
    """A default as an option; a flag that is not given is told so."""
    if value is None or isinstance(value, bool):
        return f"no {option}"
    return f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _values(path: Path) -> dict[str, Any]:
    """A file's settings by dotted names.

    Raises:
        ConfigError: There is no such file.
    """
    return look_up(flat(_found(read_values, path)))


def _found[Content](read: Callable[[Path], Content], path: Path) -> Content:
    try:
        return read(path)
    except FileNotFoundError as error:
        raise ConfigError([f"{path}: there is no such file"]) from error


def translate_files(program: Program, given: Given) -> Translation:
    """Translates a program's files, of which the last counts, with its command line over them, or that alone."""
    if given.words and program.words is None:
        raise ConfigError([f"{given.words[0]!r}: {program.name}'s files are translated as they are; leave it out"])
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for path in given.files:
        section, own = program.json_section if path.suffix == ".json" else "", _values(path)
        values |= {f"{section}{name}": value for name, value in own.items()}
        shown |= {f"{section}{name}": text for name, text in as_written(own, {}).items()}
    values, over = (program.words or with_options)(values, given.words)
    written = {program.renamed.get(name, name): text for name, text in as_written(values, shown | over).items()}
    values = {program.renamed.get(name, name): value for name, value in values.items()}
    translation = Translation(program=program.name, name=given.name)
    _set_processes(given, translation)
    source = Source(
        program=program.name, values=look_up({**program.defaults, **values}), given=written, numbers=program.numbers
    )
    with other_kinds_refused(program.name):
        source = program.prepare(source, translation)
    translate_source(program.rows, program.derive, source, translation)
    is_whole = given.files and (not program.complete or program.complete in values)
    return translation if is_whole else _of_given(translation)


def _of_given(translation: Translation) -> Translation:
    """What some settings alone become, without what follows from the ones that are not there."""
    translation.settings = {key: setting for key, setting in translation.settings.items() if setting.given}
    translation.lost = [lost for lost in translation.lost if "default)" not in lost.setting]
    translation.up_to_you = []
    return translation


def _set_processes(given: Given, translation: Translation) -> None:
    """The number of processes, which no file says, from --env WORLD_SIZE=… and LOCAL_WORLD_SIZE=…, torchrun's names.

    Raises:
        ConfigError: They are no such numbers.
    """
    if "WORLD_SIZE" not in given.environment:
        return
    texts = {name: given.environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    world = int(texts["WORLD_SIZE"]) if texts["WORLD_SIZE"].isdecimal() else 0
    local = int(texts["LOCAL_WORLD_SIZE"]) if texts["LOCAL_WORLD_SIZE"].isdecimal() else min(world, 8)
    if world < 1 or local < 1 or world % local:
        told = " ".join(f"{name}={text}" for name, text in texts.items() if text)
        raise ConfigError([f"--env {told}: no number of processes; give --env WORLD_SIZE=16 --env LOCAL_WORLD_SIZE=8"])
    origin = f"--env WORLD_SIZE={world}"
    translation.set("trainer.devices", local, origin)
    translation.set("trainer.num_nodes", world // local, origin)


# Accelerate's files have the fewest marks.
PROGRAMS: Mapping[str, Program] = {
    "nemo": nemo.PROGRAM,
    "torchtitan": torchtitan.PROGRAM,
    "automodel": automodel.PROGRAM,
    "megatron-bridge": megatron_bridge.PROGRAM,
    "nanotron": nanotron.PROGRAM,
    "litgpt": litgpt.PROGRAM,
    "gpt-neox": gpt_neox.PROGRAM,
    "accelerate": accelerate.PROGRAM,
}
FORMATS: Mapping[str, Callable[[Given], Translation]] = {
    "megatron-lm": translate_megatron_lm,
    **{name: partial(translate_files, program) for name, program in PROGRAMS.items()},
}


def format_of(given: Given) -> str:
    """The format that files and arguments are in.

    Raises:
        ConfigError: It is not known, or not translated.
    """
    if not given.files or given.files[0].suffix in (".sh", ".sbatch", ".slurm", ".bash", ".sub", ""):
        return "megatron-lm"
    path = given.files[0]
    values = _values(path)
    if path.suffix == ".toml":
        return "torchtitan"
    for name, program in PROGRAMS.items():
        if program.marks and all(has(values, *names(mark)) for mark in program.marks):
            return name
    if has(values, "language_model") and has(values, "model_parallel"):
        raise ConfigError([f"{path} is of Megatron-LM (--yaml-cfg), which is not translated; give its arguments"])
    raise ConfigError([f"{path}: its format is not known; name it with --from {'|'.join(FORMATS)}"])
