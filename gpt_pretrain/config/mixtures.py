"""How the keys of `model.data` name sources, their weights, and the stages of a run.

`data_prefix`, `validation_prefix` and `text_files` are lists of paths, or of weights and paths in turn. With weights,
a temperature or stages each path is a source of its own, with a name, epochs and a validation loss; otherwise all
paths together are one source. A stage is a string of its tokens and the weights of sources by name:

    model.data.stages=["10e9 seq_length=2048 web=0.7 code=0.3", "web=0.2 code=0.3 math=0.5"]

The last stage has no tokens and lasts to the end of the run, so that the order of samples does not depend on that end.
A stage may have a sequence length of its own: its samples are cut into that many tokens when they are trained on
(`data.batches.Batch.cut`), so that order, batches in tokens and shapes of products stay what they are without it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gpt_pretrain.config.derived import is_weight, weight_of
from gpt_pretrain.config.errors import ConfigError, format_short, refusal
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.config.schema_data import DataConfig
from gpt_pretrain.config.urls import url_problems

_SUFFIX = re.compile(r"\.(((txt|jsonl)(\.(gz|zst|bz2))?)|parquet|arrow)$")
_KEYS = ("data_prefix", "validation_prefix", "text_files")
# As model.encoder_seq_length is called.
_LENGTHS = ("seq_length", "seq_len", "encoder_seq_length")
_MOST_DIGITS = 15
_FORM = 'model.data.stages=["10e9 web=0.7 code=0.3","web=0.4 math=0.6"]'


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a run that draws its samples with the same weights."""

    num_tokens: float | None
    """Training tokens of the stage; None: all that follow."""
    weights: Mapping[str, float]
    """By source; they sum to 1."""
    sequence_length: int | None = None
    """Tokens that its samples are cut into; None: model.encoder_seq_length, uncut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumedSource(JsonObject):
    """What a run has read of a source, if it has read its present data from the start."""

    tokens: int
    """Training tokens."""
    epochs: float
    """Tokens over those of the source's training split."""
    documents: int
    """Documents of which the last token was read, each as often as it was."""


def read_entries(entries: Sequence[Any], key: str) -> tuple[list[str], list[float] | None]:
    """The paths of a list without `entries_problems`, and their weights, which sum to 1; None without weights.

    Raises:
        ConfigError: The weights sum to neither 1 nor 100 (to one part in a thousand): normalizing would hide a
            forgotten or mistyped one.
    """
    if not any(map(is_weight, entries)):
        return [str(entry) for entry in entries], None
    weights, paths = [float(weight) for weight in entries[::2]], [str(path) for path in entries[1::2]]
    mended = ",".join(f"{weight / sum(weights):.4g},{path}" for weight, path in zip(weights, paths, strict=True))
    return paths, _shares(weights, key, f"{key}=[{mended}]")


def _shares(weights: list[float], what: str, mended: str) -> list[float]:
    total = sum(weights)
    if not (math.isclose(total, 1, rel_tol=1e-3) or math.isclose(total, 100, rel_tol=1e-3)):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise ConfigError(
            [f"{what}: the weights {shown} have the sum {total:g}; they must sum to 1 or 100. In proportion: {mended}"]
        )
    return [weight / total for weight in weights]


def has_own_sources(data: DataConfig, entries: Sequence[Any]) -> bool:
    """Whether each path of a list is a source of its own."""
    return any(map(is_weight, entries)) or data.temperature is not None or bool(data.stages)


def source_names(paths: Sequence[str]) -> list[str]:
    """The names of paths and patterns: the last part without wildcards and suffix, with as many parents as needed."""
    parts = [_plain_parts(path) for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _plain_parts(path: str) -> list[str]:
    parts = [part for part in PurePath(path).parts if part != "/"]
    while len(parts) > 1 and any(character in parts[-1] for character in "*?["):
        parts.pop()
    return [*parts[:-1], _SUFFIX.sub("", parts[-1])]


def read_stages(data: DataConfig) -> list[Stage]:
    """The stages of a run; none without `model.data.stages`.

    Raises:
        ConfigError: A stage is not of the form, or its weights do not sum to 1 or 100.
    """
    stages = []
    for number, text in enumerate(data.stages, start=1):
        words = text.split()
        num_tokens = weight_of(words.pop(0)) if words and is_weight(words[0]) else None
        split = [word.rpartition("=") for word in words]
        lengths = [_own_length(name, number) for name, _, number in split if name in _LENGTHS]
        pairs = [(name, weight_of(weight)) for name, _, weight in split if name not in _LENGTHS]
        weights = {name: weight for name, weight in pairs if name and weight is not None and 0 < weight < math.inf}
        is_last = number == len(data.stages)
        if not pairs or len(weights) < len(pairs) or len(lengths) > 1 or (num_tokens is None) is not is_last:
            form = "begin with its tokens, and weights by source follow"
            if is_last:
                form = "have weights by source alone, since the last stage lasts to the end"
            raise ConfigError([f"model.data.stages: {text!r} must {form}; write {_FORM}"])
        if num_tokens is not None and not 1 <= num_tokens < 2**53:
            raise ConfigError([f"model.data.stages: {text!r} has {num_tokens:g} tokens; use 1 to {2**53:g}"])
        mended = " ".join(f"{name}={weight / sum(weights.values()):.4g}" for name, weight in weights.items())
        shares = _shares([*weights.values()], f"model.data.stages: {text!r}", mended)
        stages.append(Stage(num_tokens, dict(zip(weights, shares, strict=True)), *lengths))
    return stages


def _own_length(name: str, number: str) -> int:
    # Python reads no more than 4,300 digits.
    if not number.isdecimal() or len(number) > _MOST_DIGITS or int(number) < 1:
        raise ConfigError([f"model.data.stages: '{name}={number}' is no number of tokens; use {name}=2048 or another"])
    return int(number)


def own_lengths(data: DataConfig) -> list[int]:
    """The sequence lengths that stages have of their own, in order; none where `mixture_problems` refuses stages."""
    try:
        stages = read_stages(data)
    except ConfigError:
        return []
    return [stage.sequence_length for stage in stages if stage.sequence_length is not None]


def describe_lengths(data: DataConfig, sequence_length: int) -> str:
    """The sequence lengths of a run in a line; empty unless a stage has its own."""
    parts, begin = [], 0.0
    for stage in read_stages(data) if own_lengths(data) else ():
        since = f" from {format_short(begin)} tokens on" if begin else ""
        parts.append(f"{stage.sequence_length or sequence_length:,}{since}")
        begin += stage.num_tokens or 0.0
    return ", ".join(parts)


def mixture_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with lists of sources, temperature and stages."""
    own = getattr(data, data.data_impl.files_key or "", [])
    for name in _KEYS:
        entries = getattr(data, name)
        yield from entries_problems(f"model.data.{name}", entries)
        paths = [str(entry) for entry in entries if not is_weight(entry)]
        for path in paths:
            yield from url_problems(f"model.data.{name}", path)
        if has_own_sources(data, entries) and (twice := [path for path in paths if paths.count(path) > 1]):
            yield f"model.data.{name} names {twice[0]} twice; give it once, with one weight"
    ways = [f"model.data.temperature={data.temperature}"] if data.temperature is not None else []
    ways += ["model.data.stages"] if data.stages else []
    ways += [f"the weights in model.data.{data.data_impl.files_key}"] if any(map(is_weight, own)) else []
    if len(ways) > 1:
        yield refusal(ways[0], ways[1], "both weight the sources", "one of them")
    try:
        stages = read_stages(data)
    except ConfigError as error:
        yield from error.problems
        return
    if not stages or not own or len(ways) > 1:
        return
    names = source_names([str(path) for path in own])
    for text, stage in zip(data.stages, stages, strict=True):
        if unknown := [name for name in stage.weights if name not in names]:
            yield f"model.data.stages: {text!r} weights {unknown[0]!r}; the sources are {', '.join(names)}"
            return
    if unread := [name for name in names if not any(name in stage.weights for stage in stages)]:
        yield f"model.data.stages: no stage reads the source {unread[0]!r}; give it a weight, or leave its files out"


def entries_problems(key: str, entries: Sequence[Any]) -> Iterator[str]:
    """Paths alone, or weights and paths alternating (megatron-core's get_blend_from_list)."""
    if not any(map(is_weight, entries)):
        return
    weights, paths = entries[::2], entries[1::2]
    shown = "[" + ",".join(map(str, entries)) + "]"
    if len(weights) != len(paths) or not all(map(is_weight, weights)) or any(map(is_weight, paths)):
        yield (
            f"{key}={shown} mixes weights and paths; "
            "give paths alone, or alternate weights and paths: [0.7,web,0.3,code]"
        )
    elif not all(0 < (weight_of(weight) or 0) < math.inf for weight in weights):
        yield f"{key}={shown} has a weight that is not positive, or endless; leave that path out"
