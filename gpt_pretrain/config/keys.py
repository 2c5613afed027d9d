"""Every dotted key of the schema with its type, help and facts, and the key that an unknown one probably means.

The documentation is the string literal below a dataclass's field. Python drops it at run time, so it is read from the
source. Commands with a few arguments of their own (`commands.arguments`) declare them in the same way.
"""

import ast
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter

from gpt_pretrain.config import own, schema
from gpt_pretrain.config.choices import OpenChoice
from gpt_pretrain.config.facts import NO_FACTS, Facts
from gpt_pretrain.config.recipes import RECIPES

TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string", typing.Any: "string or number"}

# Settings of other programs without a key here: why, and what to do instead.
UNSUPPORTED = {
    "runs": "finished runs are compared with python -m gpt_pretrain.compare runs=[…]; leave it out",
    "fp8_format": (
        "use model.fp8=true with model.fp8_hybrid=true (E4M3 forward, E5M2 for gradients), or with model.fp8_e4m3=true "
        "(E4M3 in both)"
    ),
    "reduce_amax": (
        "amaxes are always reduced over the ranks of a group, which would quantize with different scales otherwise; "
        "leave it out"
    ),
    # TEDelayedScaling hands it on as fp8_mha; DotProductAttention.forward then sets the recipe's fp8_dpa.
    "fp8_multi_head_attention": (
        "with it, Transformer Engine 2.12 computes attention in FP8, which neither plan nor proof covers; leave it "
        "out, or use model.fp8_dot_product_attention=true"
    ),
    "grad_reduce_in_bf16": "use model.grad_reduce_in_fp32=false",
    "train_samples": (
        "use trainer.max_steps, with the samples divided by model.global_batch_size, or trainer.max_tokens with "
        "trainer.max_steps=null"
    ),
    "swiglu": "use model.activation=swiglu",
    "disable_bias_linear": "use model.bias=false",
    "untie_embeddings_and_output_weights": "use model.share_embeddings_and_output_weights=false",
    "nccl_ub": (
        "megatron-core 0.19 sets NCCL_NVLS_ENABLE=1 for it, which turns NVLink multicast on where the host forbids it, "
        "and continues without registered buffers where NCCL refuses them; leave it out"
    ),
    "precompute_float8_dynamic_scale_for_fsdp": (
        "model.fp8_params=true computes the scales of all weights at once after each update; leave it out"
    ),
}

# Values of other programs that a key does not take: what to do instead.
UNSUPPORTED_VALUES = {
    # Transformer Engine's if both engines have one of the name.
    **{("model.fp8", recipe.name): f"use fp8={recipe.preset}" for recipe in reversed([*RECIPES.values()])},
    ("model.fp8", "hybrid"): "use model.fp8=true model.fp8_hybrid=true",
    ("model.fp8", "e4m3"): "use model.fp8=true model.fp8_e4m3=true",
    # megatron-core's and torch's names.
    ("model.data_parallel_sharding_strategy", "no_shard"): "use null",
    ("model.data_parallel_sharding_strategy", "optim"): "use parallelism=dp, which shards optimizer states alone",
    ("trainer.precision", "fp8"): "use fp8=delayed, tensorwise or blockwise",
}

# The same for the options of a group.
UNSUPPORTED_OPTIONS = {
    ("fp8", "hybrid"): "use fp8=delayed or tensorwise, whose format is hybrid",
    ("fp8", "e4m3"): "use fp8=delayed with model.fp8_e4m3=true, or fp8=blockwise",
    ("fp8", "true"): "use fp8=delayed, tensorwise, blockwise or mxfp8",
    ("fp8", "false"): "use fp8=none",
    ("parallelism", "zero1"): "use parallelism=dp",
    ("parallelism", "zero3"): "use parallelism=fsdp",
    ("parallelism", "hsdp"): "use parallelism=hsdp2 with model.num_distributed_optimizer_instances=…",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One value of the configuration."""

    path: str
    """Dotted, from the root: "model.optim.lr"."""
    kind: typing.Any
    """int, float, bool, str, an Enum subclass, list, or dict with names as keys."""
    item: typing.Any
    """Type of a list's elements or a dict's values; None for other kinds."""
    optional: bool
    """Whether null is a value."""
    facts: Facts
    section: type
    """The dataclass that has it as a field."""

    @property
    def doc(self) -> str:
        """Its help, read from the source when somebody asks: few command lines do."""
        return self.facts.help or _doc(self.section, self.path.rpartition(".")[2])

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of an Enum's members; empty for other types."""
        return tuple(self.kind.__members__) if isinstance(self.kind, type) and issubclass(self.kind, Enum) else ()

    @property
    def is_open(self) -> bool:
        """Whether extensions add choices."""
        return isinstance(self.kind, type) and issubclass(self.kind, OpenChoice)

    @property
    def type_text(self) -> str:
        """The type in words, as `--help` and errors print it."""
        if self.kind is list:
            text = f"list of {TYPE_NAMES[self.item]}s"
        elif self.kind is dict:
            text = f"{TYPE_NAMES[self.item]}s by name"
        else:
            text = " | ".join(self.choices) or TYPE_NAMES[self.kind]
        if self.facts.has_range:
            text += f", {self.facts.range_text()}"
        return f"{text} | null" if self.optional else text


@cache
def _docs(module: str) -> dict[tuple[str, str], str]:
    """By class and field of a module's dataclasses: the string literal below the field."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[node.name, name] = inspect.cleandoc(str(text))
    return docs


def _doc(section: type, field: str) -> str:
    """The documentation of a field, from the class that declares it."""
    classes = [each for each in section.__mro__ if is_dataclass(each)]
    return next((doc for each in classes if (doc := _docs(each.__module__).get((each.__name__, field)))), "")


def _key(path: str, annotation: typing.Any, facts: Facts, section: type) -> Key:
    optional = False
    if isinstance(annotation, types.UnionType):
        optional = type(None) in typing.get_args(annotation)
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    container = typing.get_origin(annotation)
    item = None if container is None else typing.get_args(annotation)[-1]
    return Key(path=path, kind=container or annotation, item=item, optional=optional, facts=facts, section=section)


def _walk(section: type, prefix: str) -> Iterable[tuple[str, Key | type]]:
    hints = typing.get_type_hints(section)
    for field in fields(section):
        path, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield path, hint
            yield from _walk(hint, f"{path}.")
        else:
            yield path, _key(path, hint, field.metadata.get("facts", NO_FACTS), section)


def section_keys(section: type) -> dict[str, Key]:
    """Every value of a dataclass and its sections, by dotted key, in the order of declaration."""
    return {path: entry for path, entry in _walk(section, "") if isinstance(entry, Key)}


@cache
def schema_keys() -> dict[str, Key]:
    """Every value of the configuration by its dotted key, in the schema's order."""
    return section_keys(own.config_class())


@cache
def schema_sections() -> dict[str, type]:
    """Every section ("model", "model.optim", …) and its dataclass."""
    return {path: entry for path, entry in _walk(own.config_class(), "") if isinstance(entry, type)}


@cache
def aliases() -> dict[str, str]:
    """Names of other programs, each with the key that it stands for."""
    return {alias: path for path, key in schema_keys().items() for alias in key.facts.aliases}


def declare_section(group: str, section: type) -> None:
    """Adds an extension's group of keys to the schema; what was read from the schema before is read again."""
    own.SECTIONS[group] = section
    for cached in (own.config_class, schema_keys, schema_sections, aliases):
        cached.cache_clear()


def is_known(path: str) -> bool:
    """Whether `path` is a key, a section, or an element of a list or a dict ("model.optim.betas.0")."""
    if path in schema_keys() or path in schema_sections():
        return True
    parent, _, leaf = path.rpartition(".")
    key = schema_keys().get(parent)
    return key is not None and (key.kind is dict or (key.kind is list and leaf.isdigit()))


def value_of(config: schema.Config, path: str) -> typing.Any:
    """The value of a key."""
    return attrgetter(path)(config)


def flatten(value: typing.Any, path: str = "") -> Iterator[tuple[str, typing.Any]]:
    """Every dotted key below `path` that a mapping sets, with its value as the schema has it."""
    if isinstance(value, dict) and path not in schema_keys():
        for name, child in value.items():
            yield from flatten(child, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def key_named(path: str) -> str | None:
    """The key with the same last part in another section, or with that name in other programs; None if none."""
    if "." in path and path.lower() in aliases():
        return aliases()[path.lower()]
    leaf = path.rpartition(".")[2]
    elsewhere = [known for known in schema_keys() if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return max(elsewhere, key=lambda known: difflib.SequenceMatcher(None, path, known).ratio())
    return aliases().get(leaf.lower())


def nearest_key(path: str, more: Iterable[str] = ()) -> str | None:
    """The key that an unknown one, written without `+`, `++` or `~`, probably means; None if nothing is near.

    In this order: a typo in the same section, the same last part elsewhere (`optim.lr` is `model.optim.lr`), another
    program's name, the closest spelling, also among `more` (names that could stand in its place, such as groups).
    """
    parent, _, leaf = path.rpartition(".")
    beside = {known.rpartition(".")[2]: known for known in schema_keys() if known.rpartition(".")[0] == parent}
    # One letter more or less in a word of four.
    typo = difflib.get_close_matches(leaf, beside, n=1, cutoff=0.88) if parent else []
    if typo:
        return beside[typo[0]]
    if (named := key_named(path)) is not None:
        return named
    leaves = {known.rpartition(".")[2]: known for known in schema_keys()}
    for name, known in ((path, dict.fromkeys([*schema_keys(), *schema_sections(), *more])), (leaf, leaves)):
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            return known[close[0]] or close[0]
    return None


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The closest spelling among `known`, ignoring case; None if nothing is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str | None) -> str:
    """How a message about an unknown name ends."""
    return "" if name is None else f"; did you mean {name}?"


# Each suggestion takes 15 ms, more for long names.
_MOST_SUGGESTIONS, _LONGEST_NAME = 20, 200


def unknown_keys(paths: Iterable[str]) -> list[str]:
    """A message about each of the keys that is unknown; about many of a file, not each."""
    unknown = [path for path in paths if not is_known(path)]
    more = len(unknown) - _MOST_SUGGESTIONS
    told = [*map(unknown_key, unknown[:_MOST_SUGGESTIONS])]
    return told if more <= 0 else [*told, f"{more:,} more are not keys of this version"]


def unknown_key(path: str, more: Iterable[str] = ()) -> str:
    """The message about a key that the schema does not have; see `nearest_key` for the arguments."""
    what = "a key" if "." in path or not more else "a key or a group"
    if len(path) > _LONGEST_NAME:
        return f"{path[:_LONGEST_NAME]}… is not {what}"
    unsupported = UNSUPPORTED.get(path.rpartition(".")[2].lower())
    if unsupported is not None:
        return f"{path} is not {what}: {unsupported}"
    group = path.partition(".")[0]
    parts = {part for key in schema_keys() for part in key.split(".")[:-1]}
    of_nobody = "." in path and group not in {*parts, *more} and nearest_name(group, parts) is None
    if of_nobody and not own.LOADED and key_named(path) is None:
        return f"{path} is not {what}; if an extension of yours declares it, name that with extensions=[MODULE]"
    return f"{path} is not {what}{did_you_mean(nearest_key(path, more))}"
