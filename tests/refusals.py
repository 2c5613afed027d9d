"""What a refusal must say, whatever its words: the settings in conflict, and ways out that the rules let pass."""

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from omegaconf import OmegaConf

from gpt_pretrain.config.convert import WrongValue, convert
from gpt_pretrain.config.derived import model_parallel_size
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.files import find_conf_dir
from gpt_pretrain.config.keys import Key, schema_keys
from gpt_pretrain.config.load import read_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.ranks import rank_zero_of
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.overrides import by_split, parse_override


@dataclass(frozen=True)
class Refused:
    """A command line that a rule refuses."""

    overrides: str
    told: str = ""
    """Settings that the message names; it begins with the first. Where empty: all overrides."""
    legal: str = ""
    """A neighbour that passes, where the message spells out no way to one."""
    world_size: int | None = None
    """Processes; as many as the layout needs where None."""

    def __str__(self) -> str:
        return self.overrides

    @property
    def command(self) -> list[str]:
        """The overrides, one by one."""
        return _words(self.overrides)

    @property
    def settings(self) -> list[str]:
        """What the message names."""
        return _words(self.told or self.overrides)


def _words(text: str) -> list[str]:
    """What stands between spaces outside of quotes and brackets."""
    return re.findall(r"(?:'[^']*'|\[[^]]*\]|[^\s'\[])+", text)


BATCH = "model.global_batch_size=64"


@cache
def _loader() -> Loader:
    return Loader(Source(config_name="config", config_path=find_conf_dir()))


@cache
def _composed(*groups: str) -> bytes:
    """Pickled, which is read in a tenth of the time that a copy takes."""
    composed = _loader().compose(groups)
    return pickle.dumps(OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"]))


def compose_quickly(overrides: Iterable[str]) -> Config:
    """What `load_config` gives, of overrides that are legal for Hydra: each choice of groups is composed once."""
    overrides = list(overrides)
    keys = [text for text in overrides if "." in (name := text.partition("=")[0]) or name in ("name", "run_dir")]
    config = pickle.loads(_composed(*(text for text in overrides if text not in keys)))
    for text in chain.from_iterable(map(by_split, keys)):
        override = parse_override(text)
        OmegaConf.update(config, override.key_or_group, override.value(), merge=False)
    read, problems = read_config(config)
    assert read is not None, problems
    return read


def taking(way: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The overrides after a way out was taken."""
    keys = {text.lstrip("~").partition("=")[0] for text in way}
    kept = [text for text in overrides if text.partition("=")[0] not in keys]
    return kept + [text for text in way if not text.startswith("~")]


def processes(overrides: Sequence[str]) -> int:
    """As many processes as the layout needs."""
    return _needed(compose_quickly(overrides))


def _needed(config: Config) -> int:
    sizes = [config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size]
    return model_parallel_size(config.model) if min(sizes) > 0 else 1


def broken_rules(overrides: Sequence[str], world_size: int | None = None, per_node: int | None = None) -> list[str]:
    """The rules that overrides break, on `world_size` processes or on as many as the layout needs."""
    config = compose_quickly(overrides)
    world_size = _needed(config) if world_size is None else world_size
    launcher = "none" if world_size == 1 else "torchrun"
    return config_problems(config, rank_zero_of(world_size, local_world_size=per_node or world_size, launcher=launcher))


_VALUE = r"""(?<![\w.])(?!(?:or|and|with|to|above|more|less)\b)(?:\[[^]…]*\]|"[^"]*"|'[^']*'|[^\s,;='"\[\]…]+)"""
_VALUES = rf"{_VALUE}(?:, {_VALUE}(?!=))*(?: (?:or|to) {_VALUE}(?![\w.]*=))?"
_KEY = r"(?:[a-z]\w*\.)*[a-z]\w*"
_WAY = re.compile(rf"(?<![\w.*=])({_KEY})=({_VALUES})((?: (?:with|and) {_KEY}={_VALUE})*)")
# Without a key: a value of the setting that the message begins with, as far as it can be one.
_BARE = re.compile(rf"(?:^|\W)use ({_VALUES})(?![=\w])|, or ({_VALUE})(?![=\w.])")
# What belongs to a value is not spelt out.
_PROSE = re.compile(rf"\([^)]*\)|{_VALUE} (?:without|with(?! {_KEY}=))[^,]*")


def offered(message: str) -> Iterator[list[str]]:
    """The overrides of each way out that a message spells out, as a reader would type them."""
    told, _, offer = message.rpartition("; ")
    offer = _PROSE.sub("", offer)
    for found in _WAY.finditer(offer):
        key, values, with_them = found.groups()
        also = with_them.replace(" with ", " ").replace(" and ", " ").split()
        for value in re.findall(_VALUE, values):
            yield [f"{key}={value}", *also]
    settings = told.partition(" have no effect")[0] if " have no effect" in told else told.partition("=")[0] + "="
    keys = [schema_keys().get(key) for key in re.findall(rf"({_KEY})=", settings)]
    for found in _BARE.finditer(offer):
        for value in re.findall(_VALUE, found[1] or found[2]):
            with contextlib.suppress(ConfigError, WrongValue):
                yield [_typed(key, value) for key in keys if key is not None]


def _typed(key: Key, value: str) -> str:
    """Raises where it is no value of the key, but a word."""
    override = f"{key.path}={value}"
    if key.kind is str and value != "null":
        raise WrongValue
    convert(parse_override(override).value(), key)
    return override


def check_told(message: str, settings: Sequence[str]) -> None:
    """The message begins with the first of the settings, `key=value` or other words, and names the others."""
    assert any(map(message.startswith, _spellings(settings[0]))), (settings[0], message)
    for setting in settings:
        assert any(_has(message, spelling) for spelling in _spellings(setting)), (setting, message)


def _spellings(setting: str) -> Iterator[str]:
    """A setting as it was typed, and as messages show strings and numbers."""
    yield setting
    key, equals, value = setting.partition("=")
    if equals:
        yield f"{key}='{value}'"
        with contextlib.suppress(ValueError):
            yield f"{key}={float(value)}"


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", text) is not None


type Rules = Callable[[Sequence[str], int | None], list[str]]
"""Answers with the problems of a command line on a number of processes."""


def check_refused(row: Refused, rules: Rules = broken_rules) -> None:
    """The rule is told; what its message offers breaks no other rule, and one of it, or the neighbour, is legal."""
    problems = rules(row.command, row.world_size)
    first = [*_spellings(row.settings[0])]
    told = [problem for problem in problems if any(map(problem.startswith, first))]
    assert told, problems
    check_told(told[0], row.settings)
    check_ways(told[0], row, rules)


def check_ways(message: str, row: Refused, rules: Rules = broken_rules) -> None:
    """What a message spells out breaks no rule but those that the command line broke before, and some way is legal."""
    before, legal = set(rules(row.command, row.world_size)) - {message}, []
    for way in offered(message):
        left = _broken_by(taking(way, row.command), row, rules)
        assert before.issuperset(left), (message, way, left)
        legal += [] if left else [way]
    assert legal or row.legal, f"no way out: {message}"
    assert not row.legal or _broken_by(_words(row.legal), row, rules) == [], row.legal


def _broken_by(neighbour: list[str], row: Refused, rules: Rules) -> list[str]:
    """With a global batch that every layout divides, where the row is not about the batch."""
    batch = [] if any(text.startswith("model.global_batch_size=") for text in neighbour) else [BATCH]
    needed = processes(neighbour)
    world_size = row.world_size if row.world_size is not None and row.world_size % needed == 0 else needed
    return rules([*neighbour, *batch], world_size)
