"""What a refusal must say, whatever its words: the settings in conflict, and ways out that the rules let pass."""

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

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
    offers: str = ""
    """Ways out that the message names, separated by |: settings, each with one or several values (KEY=A,B). Any of them
    makes the command line legal. ~KEY leaves the key out."""
    legal: str = ""
    """A neighbour that passes, where no offer is the neighbour that matters."""
    world_size: int | None = None
    """Processes; as many as the layout needs where None."""

    @property
    def command(self) -> list[str]:
        """The overrides, one by one."""
        return _words(self.overrides)

    @property
    def settings(self) -> list[str]:
        """What the message names."""
        return _words(self.told or self.overrides)

    @property
    def ways(self) -> list[list[str]]:
        """The overrides of each way out."""
        alternatives = [map(_values, _words(way)) for way in self.offers.split(" | ") if way]
        return [list(way) for choices in alternatives for way in product(*choices)]


def _words(text: str) -> list[str]:
    """What stands between spaces outside of quotes and brackets."""
    return re.findall(r"(?:'[^']*'|\[[^]]*\]|[^\s'\[])+", text)


def _values(override: str) -> list[str]:
    """An override for each value of `key=A,B`, as a sweep writes them."""
    key, equals, values = override.partition("=")
    return [f"{key}{equals}{value}" for value in re.findall(r"(?:'[^']*'|\[[^]]*\]|[^,'\[])+", values)] or [override]


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
    keys = [text for text in overrides if "." in text.partition("=")[0]]
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


def check_told(message: str, settings: Sequence[str], ways: Iterable[Sequence[str]] = ()) -> None:
    """The message begins with the first setting, names the others, and offers each way out behind its last semicolon.

    Args:
        message: What was told.
        settings: Settings as `key=value`; a key alone stands for itself.
        ways: Overrides of each way out. The message names their values, and the keys that are not the first's.
    """
    named, _, offered = message.rpartition("; ")
    first = settings[0].partition("=")[0]
    assert message.startswith(settings[0]), (settings[0], message)
    for setting in settings:
        assert _has(message, setting), (setting, message)
    for way in ways:
        for override in way:
            key, _, value = override.lstrip("~").partition("=")
            assert named, message
            assert _has(offered, value if value else "leave"), (override, message)
            assert key == first or _has(message, key.rpartition(".")[2]), (override, message)


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", text) is not None


type Rules = Callable[[Sequence[str], int | None], list[str]]
"""Answers with the problems of a command line on a number of processes."""


def check_refused(row: Refused, rules: Rules = broken_rules) -> None:
    """The rule is told, and what its message offers is legal."""
    problems = rules(row.command, row.world_size)
    told = [problem for problem in problems if problem.startswith(row.settings[0])]
    assert told, problems
    check_told(told[0], row.settings, row.ways)
    check_offered(told[0], row, rules)
    check_legal(row, rules)


def check_offered(message: str, row: Refused, rules: Rules = broken_rules) -> None:
    """Each way out that a message spells out leaves no problem, except others that the command line had before."""
    before = rules(row.command, row.world_size)
    for way in offered(message):
        left = _broken_by(taking(way, row.command), row, rules)
        assert not set(left) - (set(before) - {message}), (message, way, left)


def _broken_by(neighbour: list[str], row: Refused, rules: Rules) -> list[str]:
    """With a global batch that every layout divides, where the row is not about the batch."""
    batch = [] if any(text.startswith("model.global_batch_size=") for text in neighbour) else [BATCH]
    needed = processes(neighbour)
    world_size = row.world_size if row.world_size is not None and row.world_size % needed == 0 else needed
    return rules([*neighbour, *batch], world_size)


def check_legal(row: Refused, rules: Rules = broken_rules) -> None:
    """Each way out that the message offers makes the command line legal, and the neighbour is."""
    legal = [taking(way, row.command) for way in row.ways] + ([_words(row.legal)] if row.legal else [])
    assert legal, "a row has a neighbour that passes"
    for neighbour in legal:
        assert _broken_by(neighbour, row, rules) == [], neighbour
