"""What may be compared: the settings that must be equal for losses to mean the same, and those in which runs differ.

The readers of other codes' logs translate settings into our keys, so one table serves all. A setting that a log does
not state counts as equal, and the comparison says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePath

from gpt_pretrain.compare.comparison import ConfigDifference, Obstacle, RunRecord
from gpt_pretrain.config.facts import IDENTITIES, Identity
from gpt_pretrain.config.keys import schema_keys

_PATHS = frozenset(
    {"model.data.data_prefix", "model.data.validation_prefix", "model.data.text_files", "model.tokenizer.model"}
)
SEED = "model.seed"
# These change neither losses nor times.
_COMMANDS = ("benchmark.", "plan.", "compare.", "coordinate_check.")
_PLACES = ("run_dir", "name", *_COMMANDS, "sample.", "logging.", "model.data.cache_dir")


@cache
def identity() -> Mapping[Identity, Sequence[str]]:
    """The keys that must agree for losses to be comparable: data, batch, the unit of the loss, and model."""
    keys = schema_keys().items()
    return {what: [path for path, key in keys if key.facts.identity == what] for what in IDENTITIES}


def _comparable(key: str, value: str) -> str:
    """The value without the directories of paths: the same file may lie elsewhere on another machine."""
    if key not in _PATHS:
        return value
    return ",".join(PurePath(part.strip(" '\"")).name for part in value.strip("[]").split(","))


def _settings_of(run: RunRecord) -> dict[str, str]:
    return {key: value for key, value in run.configuration.items() if not key.startswith(_PLACES)}


def variant_settings(run: RunRecord) -> dict[str, str]:
    """What makes one of our runs a variant: all settings except the seed."""
    return {key: value for key, value in _settings_of(run).items() if key != SEED}


def find_obstacles(runs: Sequence[RunRecord]) -> list[Obstacle]:
    """What forbids comparing runs with the first of them, the baseline."""
    all_settings = _settings_of(runs[0])
    known = {key: all_settings[key] for keys in identity().values() for key in keys if key in all_settings}
    return [
        Obstacle(run=run.name, key=key, baseline_value=known[key], value=value)
        for run in runs
        for key, value in _settings_of(run).items()
        if key in known and _comparable(key, value) != _comparable(key, known[key])
    ]


def find_differences(runs: Sequence[RunRecord]) -> list[ConfigDifference]:
    """The settings, except seeds, that have several values among the runs that state them."""
    settings = [_settings_of(run) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if key != SEED]
    return [
        ConfigDifference(key=key, values=tuple(each.get(key, "") for each in settings))
        for key in keys
        if len({_comparable(key, each[key]) for each in settings if key in each}) > 1
    ]


def find_unchecked(runs: Sequence[RunRecord]) -> Iterator[str]:
    """What must be equal and some runs do not state."""
    silent: dict[str, list[str]] = {}
    for run in runs:
        missing = [what for what, keys in identity().items() if not run.configuration.keys() & set(keys)]
        if missing:
            silent.setdefault(", ".join(missing), []).append(run.name)
    for what, names in silent.items():
        yield f"not stated by {', '.join(names)}: {what}; assumed equal, check it yourself"
