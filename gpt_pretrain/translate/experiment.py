"""A translation as an `experiment/*.yaml`: close presets, the keys that differ from them, and our own check.

Of a group the option is taken that leaves the fewest keys to write, so that a later `fp8=none` or `parallelism=…` on
the command line finds as few keys as possible that the file insists on.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from gpt_pretrain.config.errors import ConfigError, visible, written
from gpt_pretrain.config.files import find_conf_dir
from gpt_pretrain.config.keys import flatten, schema_keys
from gpt_pretrain.config.recipes import RECIPES
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.jobs import check_command
from gpt_pretrain.rules.no_effect import why_no_effect
from gpt_pretrain.run.products import resolve
from gpt_pretrain.translate.translation import Setting, Translation

_WIDTH = 120
_FILE = "translated"
# Hydra's directive: keys are dotted from the root.
_PACKAGE = "# @package _global_"
# Sizes by which a preset is recognized.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What is printed of a translation."""

    text: str
    """The YAML, with comments."""
    choices: Mapping[str, str]
    """Options of groups other than the default ones."""
    written: Mapping[str, Setting]
    """Keys that the file sets."""
    equal: Mapping[str, Setting]
    """Keys that already have the value."""
    unread: Mapping[str, tuple[Setting, str]]
    """Keys that were given and that nothing reads in this run, and why."""
    problems: Sequence[str] = field(default=())
    """Why our own check refuses the result; empty if it passes."""


@cache
def _loader() -> Loader:
    return Loader(Source())


@cache
def _base_values(*choices: str) -> Mapping[str, Any]:
    """Every key's value in a composition of these options; `???` where it is open."""
    composed = _loader().compose(choices)
    nodes = {name: node for name, node in composed.items_ex(resolve=False) if name != "hydra"}
    raw = OmegaConf.to_container(OmegaConf.create(nodes), resolve=False)
    values = dict(flatten(raw))
    values["model.max_position_embeddings"] = (
        values["model.encoder_seq_length"]
        if values["model.max_position_embeddings"] == "${.encoder_seq_length}"
        else values["model.max_position_embeddings"]
    )
    return values


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    return bool(ours == theirs)


def _null_means(key: str, value: Mapping[str, Any]) -> Any:
    """What null stands for in a key whose value follows from others (`config.derived`)."""
    sizes = [value.get(f"model.{size}") for size in ("hidden_size", "num_attention_heads")]
    # Anything else is refused when the experiment is read.
    hidden, heads = (size if isinstance(size, int) and size > 0 else None for size in sizes)
    match key:
        case "model.ffn_hidden_size" if hidden:
            return 4 * hidden
        case "model.kv_channels" if hidden and heads:
            return hidden // heads
        case "model.num_query_groups":
            return heads
        case "model.moe_ffn_hidden_size":
            return value.get("model.ffn_hidden_size")
        case "model.expert_tensor_parallel_size":
            return value.get("model.tensor_model_parallel_size")
    return None


def _differing(settings: Mapping[str, Setting], base: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings that a composition does not have yet."""
    values = {key: setting.value for key, setting in settings.items()}

    def is_there(key: str, value: Any) -> bool:
        return _same(base[key], value) or (base[key] is None and _same(_null_means(key, values), value))

    return {key: setting for key, setting in settings.items() if not is_there(key, setting.value)}


def _candidates(settings: Mapping[str, Setting], preset: str | None) -> Iterator[tuple[str, list[str]]]:
    """The groups, each with the options to choose from, the one of least effect first."""
    values = {key: setting.value for key, setting in settings.items()}
    if preset is not None:
        yield "model", [preset]
    elif "model.num_layers" in values:
        yield "model", ["base", *_presets(values)]
    if "model.optim.name" in values:
        yield "optimizer", [str(values["model.optim.name"])]
    yield "parallelism", ["single", "dp", "zero2", "fsdp"]
    if values.get("model.fp8"):
        wanted = values.get("model.fp8_recipe", "delayed"), values.get("model.fp8_backend", "transformer_engine")
        named = [each.preset for each in RECIPES.values() if (each.name, each.backend.name) == wanted]
        yield "fp8", named or [each.preset for each in RECIPES.values()]
    if "model.data.data_impl" in values:
        yield "data", [str(values["model.data.data_impl"])]


@cache
def _sizes(preset: str) -> dict[str, Any]:
    """The sizes of a model's preset, those of the preset that it starts from included."""
    own = yaml.safe_load((find_conf_dir() / "model" / f"{preset}.yaml").read_text())
    parents = [each for each in own.get("defaults", []) if each not in ("_self_", "base")]
    sizes = {size: value for parent in parents for size, value in _sizes(parent).items()}
    return sizes | {size: own[size] for size in _SIZES if own.get(size) not in (None, "???")}


def _presets(values: Mapping[str, Any]) -> Iterator[str]:
    """Models of the same sizes."""
    wanted = {size: values.get(f"model.{size}") for size in _SIZES}
    for path in sorted((find_conf_dir() / "model").glob("*.yaml")):
        if _sizes(path.stem) == wanted:
            yield path.stem


def _choose(settings: Mapping[str, Setting], preset: str | None) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for group, options in _candidates(settings, preset):
        values = {option: _values_of({**chosen, group: option}) for option in options}
        left = {option: len(_differing(settings, values[option])) for option in options}
        if group == "parallelism":
            # An option must not bring what nobody asked for.
            for option, brought in values.items():
                differs = (key for key in brought if not _same(brought[key], values[options[0]][key]))
                left[option] += sum(key not in settings for key in differs)
        chosen[group] = min(options, key=left.__getitem__)
    return chosen


def _values_of(choices: Mapping[str, str]) -> Mapping[str, Any]:
    return _base_values(*(f"{group}={option}" for group, option in choices.items()))


def _world(translation: Translation) -> Launch | None:
    """The processes of the run; None if they are not known, or if the batch that they divide is not."""
    if "model.global_batch_size" not in translation.settings:
        return None
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    if not isinstance(devices, int) or not isinstance(nodes, int) or min(devices, nodes) < 1:
        return None
    return rank_zero_of(devices * nodes, local_world_size=devices, launcher="torchrun")


def _check(text: str, launch: Launch | None, *, rules: bool) -> tuple[Any, list[str]]:
    """The configuration of an experiment, None if it has none, and what is wrong with it."""
    with TemporaryDirectory() as folder:
        place = Path(folder, "experiment", f"{_FILE}.yaml")
        place.parent.mkdir()
        place.write_text(f"{_PACKAGE}\n{text}")
        try:
            checked = (lambda config, submission: config_problems(config, launch)) if rules else None
            (job,) = check_command(
                Loader(Source(config_dir=Path(folder))), [f"experiment={_FILE}"], rules=checked, complete=True
            )
        except ConfigError as error:
            # The user has no such file.
            shown = re.compile(rf"{re.escape(str(place))}: | \(in {re.escape(str(place))}\)")
            return None, [shown.sub("", problem) for problem in error.problems]
        return job.config, []


def config_of(text: str) -> Config:
    """The configuration of an experiment.

    Raises:
        ConfigError: It has none.
    """
    config, problems = _check(text, None, rules=False)
    if problems:
        raise ConfigError(problems)
    assert isinstance(config, Config)
    return config


def _default_choices() -> Mapping[str, str]:
    return {str(group): str(option) for group, option in _loader().compose(()).hydra.runtime.choices.items()}


def _without_unread(
    translation: Translation, settings: dict[str, Setting]
) -> tuple[dict[str, Setting], dict[str, tuple[Setting, str]]]:
    """The settings that the run reads, and those that were given in vain, with why."""
    why = _why_unread(translation, settings, settings)
    if not any(why.values()):
        return settings, {}
    read = {key: setting for key, setting in settings.items() if not why.get(key)}
    # Two that are unread because of each other (a history of one pass, and its newest amax) must not both go.
    still = _why_unread(translation, read, settings)
    read = {key: setting for key, setting in settings.items() if not (why.get(key) and still.get(key))}
    return read, {key: (settings[key], why[key]) for key in settings if key not in read and settings[key].given}


def _why_unread(translation: Translation, settings: Mapping[str, Setting], keys: Iterable[str]) -> dict[str, str]:
    """Why nothing reads a key in an experiment of these settings; empty texts for keys that are read."""
    choices = _choose(settings, translation.preset)
    base = _values_of(choices)
    # What is open must not hide what nothing reads.
    filled = {key: Setting(1, "", given=False) for key, value in base.items() if value == "???"}
    config, _ = _check(_yaml(translation, choices, filled | _differing(settings, base)), None, rules=False)
    if config is None:
        return {}
    run = resolve(config)
    return {key: why_no_effect(run, key) for key in keys}


def build_experiment(translation: Translation) -> Experiment:
    """The experiment of a translation, checked as the command line would be."""
    known = {key: setting for key, setting in translation.settings.items() if key in schema_keys()}
    assert known.keys() == translation.settings.keys(), translation.settings.keys() - known.keys()
    effective, unread = _without_unread(translation, known)
    choices = _choose(effective, translation.preset)
    changed = {group: option for group, option in choices.items() if _default_choices().get(group) != option}
    written = _differing(effective, _values_of(choices))
    equal = {key: setting for key, setting in effective.items() if key not in written}
    text = _yaml(translation, changed, written)
    _, problems = _check(text, _world(translation), rules=True)
    if others := [lost.setting for lost in translation.lost if lost.changes_model]:
        problems = [f"the model is another one without {', '.join(others)}", *problems]
    header = _header(translation, problems)
    return Experiment(
        text=header + text, choices=changed, written=written, equal=equal, unread=unread, problems=problems
    )


def _header(translation: Translation, problems: Sequence[str]) -> str:
    """The comment at the top of the file: what a reader of the file alone has to know."""
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    start = f"torchrun --nproc-per-node {devices}" if devices else "python"
    more = f" --nnodes {nodes} …" if nodes != 1 else ""
    lines = [
        _PACKAGE,
        f"# Translated from {translation.program} by gpt_pretrain.translate. As conf/experiment/NAME.yaml:",
        f"#     {start}{more} -m gpt_pretrain experiment=NAME",
    ]
    sections = (
        ("Our own check refuses it:", problems),
        ("Not known from there, and up to you:", [f"{key}: {why}" for key, why in translation.up_to_you]),
        ("Without counterpart:", [lost.text for lost in translation.lost]),
        ("Read with care:", translation.notes),
    )
    for title, items in sections:
        if items:
            lines += ["#", f"# {title}"]
            lines += [line for item in items for line in comment_lines(item)]
    return "\n".join(lines) + "\n"


def comment_lines(text: str) -> list[str]:
    """An item of a list as lines of comment."""
    return textwrap.wrap(
        visible(text), _WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
    )


def _plain(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, float):
        # PyYAML writes 1e-05, which its own reader takes for a string.
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, list):
        return f"[{', '.join(_in_list(item) if isinstance(item, str) else _plain(item) for item in value)}]"
    if isinstance(value, str):
        # OmegaConf would look `${…}` up.
        value = value.replace("${", "\\${")
    return yaml.safe_dump(value, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def _in_list(text: str) -> str:
    """A text as an element of a list in one line."""
    return yaml.safe_dump([text], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def _yaml(translation: Translation, choices: Mapping[str, str], written: Mapping[str, Setting]) -> str:
    """The file's defaults list and keys, each with a comment that says where it comes from."""
    lines = []
    if choices:
        lines += ["defaults:", *(f"  - override /{group}: {option}" for group, option in choices.items()), ""]
    lines.append(f"name: {_plain(translation.name)}")
    tree: dict[str, Any] = {}
    order = {key: number for number, key in enumerate(schema_keys())}
    for key in sorted((key for key in written if key != "name"), key=order.__getitem__):
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = written[key]
    # A section's own keys stand before its sections.
    lines += _lines(tree, "")
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, node in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(node, dict):
            yield f"{indent}{name}:"
            yield from _lines(node, f"{indent}  ")
            continue
        line = f"{indent}{name}: {_plain(node.value)}"
        told = (
            "" if node.origin.lstrip("+").endswith(f"{name}={written(node.value)}") else f"  # {visible(node.origin)}"
        )
        if len(line) + len(told) <= _WIDTH:
            yield line + told
        else:
            wrapped = textwrap.wrap(
                visible(node.origin), _WIDTH - len(indent) - 2, break_on_hyphens=False, break_long_words=False
            )
            yield from (f"{indent}# {part}" for part in wrapped)
            yield line
