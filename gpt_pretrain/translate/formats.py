"""The formats that are translated, how a file tells which it is, and those that are refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.files import read_foreign_text
from gpt_pretrain.translate import megatron_lm
from gpt_pretrain.translate.megatron_arguments import read_arguments_of
from gpt_pretrain.translate.megatron_options import rows_of
from gpt_pretrain.translate.translation import Source, Translation, translate_source


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
    text = read_foreign_text(given.files[0]) if given.files else None
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
    translate_source(rows_of(read.values), megatron_lm.derive, source, translation)
    return translation


def _as_option(option: str, value: Any) -> str:
    """A default as an option; a flag that is not given is told so."""
    if value is None or isinstance(value, bool):
        return f"no {option}"
    return f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"


FORMATS: Mapping[str, Callable[[Given], Translation]] = {"megatron-lm": translate_megatron_lm}


def format_of(given: Given) -> str:
    """The format that files and arguments are in.

    Raises:
        ConfigError: It is not known, or not translated.
    """
    if not given.files or given.files[0].suffix in (".sh", ".sbatch", ".slurm", ".bash", ".sub", ""):
        return "megatron-lm"
    raise ConfigError([f"{given.files[0]}: its format is not known; name it with --from {'|'.join(FORMATS)}"])
