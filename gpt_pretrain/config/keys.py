"""Every dotted key of the schema with its type and documentation, and the key that an unknown one probably means.

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

from gpt_pretrain.config import choices, own, schema

TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "string", typing.Any: "string or number"}

# Other programs' names of a setting, looked up by the last part of an unknown key, or by its last two parts where one
# alone could mean anything.
_ALIASES_OF = {
    "model.tensor_model_parallel_size": "tp tp_size tensor_parallel",
    "model.pipeline_model_parallel_size": "pp pp_size",
    "model.virtual_pipeline_model_parallel_size": "vp vpp",
    "model.context_parallel_size": "cp cp_size",
    "model.expert_model_parallel_size": "ep ep_size",
    "model.num_moe_experts": "num_experts num_local_experts",
    "model.moe_router_topk": "num_experts_per_tok",
    "model.moe_aux_loss_coeff": "router_aux_loss_coef",
    "model.moe_router_padding_for_quantization": "moe_router_padding_for_fp8",
    "model.sequence_parallel": "sp",
    "model.use_distributed_optimizer": "distributed_optimizer",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.num_attention_heads": "n_head n_heads",
    "model.num_query_groups": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.hidden_size": "n_embd d_model dim",
    "model.ffn_hidden_size": "d_ff intermediate_size",
    "model.kv_channels": "head_dim",
    "model.encoder_seq_length": "block_size context_length max_seq_len seq_len seq_length",
    "model.rotary_base": "rope_theta",
    "model.rope_scaling_factor": "rope_scaling use_rope_scaling scale_positional_embedding",
    "model.layernorm_epsilon": "rms_norm_eps",
    "model.share_embeddings_and_output_weights": "tie_word_embeddings",
    "model.bias": "add_bias_linear",
    "model.qkv_bias": "add_qkv_bias",
    "model.qk_layernorm": "qk_norm use_qk_norm",
    "model.activation": "activation_func hidden_act",
    "model.micro_batch_size": "batch_size per_device_train_batch_size mbs",
    "model.global_batch_size": "gbs",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers",
    "model.optim.lr": "learning_rate max_lr",
    "model.optim.betas": "beta1 adam_beta1 adam_beta2",
    "model.optim.weight_decay": "wd",
    "model.grad_reduce_in_fp32": "main_grads_dtype accumulate_allreduce_grads_in_fp32",
    "model.optim.sched.name": "lr_decay_style",
    "model.optim.sched.warmup_steps": "lr_warmup_iters",
    "model.optim.sched.decay_steps": "lr_decay_iters",
    "model.data.data_prefix": "data_path",
    "model.data.splits_string": "split",
    "trainer.devices": "gpus",
    "trainer.num_nodes": "nnodes",
    "trainer.precision": "dtype bf16",
    "trainer.max_steps": "train_iters max_iters num_steps",
    "trainer.log_every_n_steps": "log_interval",
    "trainer.val_check_interval": "eval_interval",
    "trainer.limit_val_batches": "eval_iters",
    "trainer.gradient_clip_val": "clip_grad grad_clip max_grad_norm",
    "run_dir": "output_dir",
    "model.fp8": "fp8_enabled fp8_autocast fp8.enabled",
    "model.fp8_backend": "fp8_engine",
    "model.fp8_recipe": "recipe_name fp8_recipe_name",
    "model.fp8_params": "fp8_param fp8_param_gather fp8_model_init fp8_primary_weights "
    "enable_fsdp_float8_all_gather enable_fsdp_fp8_all_gather",
    "model.fp8_amax_history_len": "fp8_amax_history amax_history_len",
    "model.fp8_amax_compute_algo": "fp8_amax_algo amax_compute_algo",
    "model.fp8_margin": "margin",
    "model.fp8_dot_product_attention": "fp8_dpa",
    "model.fp8_multi_head_attention": "fp8_mha",
    "model.fp8_wgrad": "override_linear_precision",
    "model.fp8_exclude": "fp8_exclude_modules filter_fqns",
    "model.fp8_emulate": "emulate",
    "checkpoint.save_interval": "save_every save_steps",
    "checkpoint.keep_last": "save_total_limit save_top_k",
    "checkpoint.async_save": "async_save_checkpoint",
}
ALIASES = {alias: key for key, aliases in _ALIASES_OF.items() for alias in aliases.split()}

_FINISHED_RUNS = "finished runs are compared with python -m gpt_pretrain.compare runs=[…]; leave it out"
_NO_E5M2 = "no library multiplies E5M2 in the forward pass"
# Settings of other programs without a key here: why, and what to do instead.
UNSUPPORTED = {
    "runs": _FINISHED_RUNS,
    "compare.run": _FINISHED_RUNS,
    "fp8_format": (
        f"{_NO_E5M2}; use model.fp8=true with model.fp8_hybrid=true (E4M3 forward, E5M2 for gradients), or "
        "model.fp8=true with model.fp8_e4m3=true (E4M3 in both)"
    ),
    "reduce_amax": (
        "amaxes are always reduced over the ranks of a group, which would quantize with different scales otherwise; "
        "leave it out"
    ),
    "use_emha": "NeMo 1.x never supported it itself; Transformer Engine chooses the attention kernel; leave it out",
    "fp8_output_proj": "the LM head stays in high precision; leave it out",
    "tp_only_amax_red": "amaxes are reduced over all ranks that share a tensor or its data; leave it out",
    "use_autocast_during_eval": "validation computes in FP8 as training does; leave it out",
    "force_recompute_fp8_weight_in_bwd": (
        "it has had no effect in TorchAO since 2025 (pytorch/ao, issue 2251); leave it out"
    ),
    **dict.fromkeys(
        ("precompute_float8_dynamic_scale_for_fsdp", "precompute_fp8_dynamic_scale_for_fsdp"),
        "model.fp8_params=true computes the scales of all weights at once after each update; leave it out",
    ),
    **dict.fromkeys(
        ("compile.enabled", "compile.mode", "compile.fullgraph", "compile.dynamic"),
        "TorchAO's casts and products are always compiled, Transformer Engine has its own kernels, and "
        "model.compile=true compiles layers without either; leave it out",
    ),
}

# Values of other programs that a key does not take: what to do instead.
UNSUPPORTED_VALUES = {
    **{("model.fp8", recipe.name): f"use fp8={recipe.preset}" for recipe in choices.Fp8RecipeName},
    ("model.fp8", "hybrid"): "use model.fp8=true model.fp8_hybrid=true",
    ("model.fp8", "e4m3"): "use model.fp8=true model.fp8_e4m3=true",
    ("model.fp8", "e5m2"): f"{_NO_E5M2}; use model.fp8=true model.fp8_hybrid=true",
    ("model.fp8_recipe", "e5m2"): f"{_NO_E5M2}; model.fp8_hybrid=true has it for gradients",
    ("model.fp8_recipe", "e4m3"): "formats are model.fp8_e4m3=true and model.fp8_hybrid=true",
    ("model.fp8_recipe", "hybrid"): "formats are model.fp8_e4m3=true and model.fp8_hybrid=true",
    ("model.fp8_recipe", "current"): "did you mean tensorwise?",
    ("model.fp8_recipe", "custom"): "recipes of one's own could not be checked before the run",
    ("trainer.precision", "fp8"): "use fp8=delayed, tensorwise or blockwise",
}

# The same for the options of a group.
UNSUPPORTED_OPTIONS = {
    ("fp8", "hybrid"): "use fp8=delayed or tensorwise, whose format is hybrid",
    ("fp8", "e4m3"): "use fp8=delayed with model.fp8_e4m3=true, or fp8=blockwise",
    ("fp8", "true"): "use fp8=delayed, tensorwise, blockwise or mxfp8",
    ("fp8", "false"): "use fp8=none",
    ("parallelism", "fsdp"): "weights are not sharded; use dp, whose distributed optimizer shards its states",
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
    doc: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of an Enum's members; empty for other types."""
        return tuple(self.kind.__members__) if isinstance(self.kind, type) and issubclass(self.kind, Enum) else ()

    @property
    def type_text(self) -> str:
        """The type in words, as `--help` and errors print it."""
        if self.kind is list:
            text = f"list of {TYPE_NAMES[self.item]}s"
        elif self.kind is dict:
            text = f"{TYPE_NAMES[self.item]}s by name"
        else:
            text = " | ".join(self.choices) or TYPE_NAMES[self.kind]
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


def _key(path: str, annotation: typing.Any, doc: str) -> Key:
    optional = False
    if isinstance(annotation, types.UnionType):
        optional = type(None) in typing.get_args(annotation)
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    container = typing.get_origin(annotation)
    item = None if container is None else typing.get_args(annotation)[-1]
    return Key(path=path, kind=container or annotation, item=item, optional=optional, doc=doc)


def _walk(section: type, prefix: str) -> Iterable[tuple[str, Key | type]]:
    hints = typing.get_type_hints(section)
    for field in fields(section):
        path, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield path, hint
            yield from _walk(hint, f"{path}.")
        else:
            yield path, _key(path, hint, _doc(section, field.name))


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


def declare_section(group: str, section: type) -> None:
    """Adds an extension's group of keys to the schema; what was read from the schema before is read again."""
    own.SECTIONS[group] = section
    for cached in (own.config_class, schema_keys, schema_sections):
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


def _similarity(wrong: str, known: str) -> float:
    """How likely `known` was meant, by the spelling of the last part or of the whole path.

    Names are close if one has all words of the other: seq_length and encoder_seq_length.
    """
    (wrong_parent, _, wrong_leaf), (known_parent, _, known_leaf) = wrong.rpartition("."), known.rpartition(".")
    score = difflib.SequenceMatcher(None, wrong_leaf, known_leaf).ratio()
    wrong_words, known_words = set(wrong_leaf.split("_")), set(known_leaf.split("_"))
    if wrong_words <= known_words or known_words <= wrong_words:
        score = max(score, 0.6) + 0.2
    if wrong_parent == known_parent:
        score += 0.1
    return max(score, difflib.SequenceMatcher(None, wrong, known).ratio() if "." in wrong else 0.0)


def _last_parts(path: str) -> list[str]:
    """The last two parts of a path, and the last."""
    parts = path.lower().split(".")
    return [".".join(parts[-2:]), parts[-1]]


# One letter more or less in a word of four.
_SURE = 0.88


def key_named(path: str) -> str | None:
    """The key with the same last part in another section, or with that name in other programs; None if none."""
    leaf = path.rpartition(".")[2]
    elsewhere = [known for known in schema_keys() if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return max(elsewhere, key=lambda known: difflib.SequenceMatcher(None, path, known).ratio())
    return next((ALIASES[name] for name in _last_parts(path) if name in ALIASES), None)


def nearest_key(path: str, more: Iterable[str] = ()) -> str | None:
    """The key that an unknown one, written without `+`, `++` or `~`, probably means; None if nothing is near.

    In this order: a typo in the same section, the same last part elsewhere (`optim.lr` is `model.optim.lr`), another
    program's name, the closest spelling, also among `more` (names that could stand in its place, such as groups).
    """
    parent, _, leaf = path.rpartition(".")
    beside = [known for known in schema_keys() if known.rpartition(".")[0] == parent] if parent else []
    typo = difflib.get_close_matches(path, beside, n=1, cutoff=0.0)
    if typo and difflib.SequenceMatcher(None, leaf, typo[0].rpartition(".")[2]).ratio() >= _SURE:
        return typo[0]
    named = key_named(path)
    if named is not None:
        return named
    known_names = [*schema_keys(), *schema_sections(), *more]
    best = max(known_names, key=lambda known: _similarity(path, known))
    return best if _similarity(path, best) >= 0.7 else None


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


def many_unknown(paths: Iterable[str]) -> list[str]:
    """Messages about the keys of a file if too many are unknown to suggest something for each; otherwise none."""
    unknown = [path for path in paths if not is_known(path)]
    if len(unknown) <= _MOST_SUGGESTIONS:
        return []
    told = map(unknown_key, unknown[:_MOST_SUGGESTIONS])
    return [*told, f"{len(unknown) - _MOST_SUGGESTIONS:,} more are not keys of this version"]


def unknown_key(path: str, more: Iterable[str] = ()) -> str:
    """The message about a key that the schema does not have; see `nearest_key` for the arguments."""
    what = "a key" if "." in path or not more else "a key or a group"
    if len(path) > _LONGEST_NAME:
        return f"{path[:_LONGEST_NAME]}… is not {what}"
    unsupported = next((UNSUPPORTED[name] for name in _last_parts(path) if name in UNSUPPORTED), None)
    if unsupported is not None:
        return f"{path} is not {what}: {unsupported}"
    group = path.partition(".")[0]
    parts = {part for key in schema_keys() for part in key.split(".")[:-1]}
    of_nobody = "." in path and group not in {*parts, *more} and nearest_name(group, parts) is None
    if of_nobody and not own.LOADED and key_named(path) is None:
        return f"{path} is not {what}; if an extension of yours declares it, name that with extensions=[MODULE]"
    return f"{path} is not {what}{did_you_mean(nearest_key(path, more))}"
