"""The way back: one of our configurations as a command line of Megatron-LM, by the same table read backwards.

What comes of it is translated again: each key that would not come back as it was is told, and a model that would
not is refused.
"""

import math
import shlex
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_pretrain.config import derived
from gpt_pretrain.config.errors import ConfigError, show, written
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schedule import batch_grows, has_length, rate_phases
from gpt_pretrain.config.schema import Config
from gpt_pretrain.rules.no_effect import why_no_effect
from gpt_pretrain.run.products import Resolved, resolve
from gpt_pretrain.translate.experiment import build_experiment, config_of
from gpt_pretrain.translate.formats import Given, translate_megatron_lm
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.translation import Becomes, names

# Keys whose value is a function of the argument's, with its inverse.
_INVERSES: Mapping[str, Any] = {
    "exit_duration_in_mins": lambda value: None if value is None else _minutes(value),
    "distributed_timeout_minutes": lambda seconds: math.ceil(seconds / 60),
}
_FP8 = names("""
fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad first_last_layers_bf16
num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
""")
_SCHED = "model.optim.sched."
_WARMUP = (f"{_SCHED}warmup_steps", f"{_SCHED}warmup_tokens")
_DIVISOR = "model.make_vocab_size_divisible_by"
_OF_RUN = ("name", "run_dir", "trainer.devices", "trainer.num_nodes", "trainer.precision")
_SHARDED = ("optim_grads", "optim_grads_params")


# Without these the weights, or what is computed with them, are others.
_OF_MODEL = names("""
model.layer .features .use_mup .num_layers .hidden_size .ffn_hidden_size .num_attention_heads .num_query_groups
.kv_channels .vocab_size .max_position_embeddings .position_embedding_type .rotary_percentage .rotary_base
.rope_scaling_factor .yarn_original_max_position_embeddings .no_rope_freq
.normalization .layernorm_epsilon .activation .bias .qkv_bias .qk_layernorm
.window_size .window_attn_skip_freq .final_logit_softcapping .value_embedding_freq .value_embedding_mult
.share_embeddings_and_output_weights .num_moe_experts .moe_ffn_hidden_size .moe_router_topk
""")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """A command of Megatron-LM, and the keys that it does not say."""

    words: Sequence[str]
    launcher: Sequence[str]
    different: Sequence[str]

    @property
    def text(self) -> str:
        """The command with an option a line."""
        lines = [shlex.join(self.launcher)]
        for word in self.words:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n    ".join(lines) + "\n"


def _minutes(text: str) -> int:
    days, hours, minutes, seconds = map(int, text.split(":"))
    return (days * 24 + hours) * 60 + minutes + (seconds > 0)


def values_of(config: Config) -> dict[str, Any]:
    """Every key's value, with what null stands for."""
    values = dict(flatten(config_to_dict(config)))
    model = config.model
    for name in ("ffn_hidden_size", "kv_channels", "num_query_groups", "moe_ffn_hidden_size"):
        values[f"model.{name}"] = getattr(derived, name)(model)
    values["model.use_distributed_optimizer"] = derived.uses_distributed_optimizer(model)
    values[f"{_SCHED}min_lr"] = derived.min_lr(model.optim)
    if has_length(config):
        phases = rate_phases(config)
        unit = "tokens" if phases.in_tokens else "steps"
        for name in ("warmup", "decay", "wsd_decay"):
            values[f"{_SCHED}{name}_{unit}"] = getattr(phases, name)
    return values


def _by_rows(values: Mapping[str, Any], run: Resolved) -> Iterator[tuple[str, Any]]:
    """Arguments whose rows read backwards; of several for one key the first."""
    seen: set[str] = set()
    for name, row in ROWS.items():
        if not isinstance(row, Becomes) or row.key in seen or why_no_effect(run, row.key):
            continue
        value = values[row.key]
        if isinstance(row.values, Mapping):
            value = next((theirs for theirs, ours in row.values.items() if ours == value), None)
        elif name in _INVERSES:
            value = _INVERSES[name](value)
        if value is not None:
            seen.add(row.key)
            yield name, value


def _together(values: Mapping[str, Any], run: Resolved) -> Iterator[tuple[str, Any]]:
    """Arguments that several keys make."""

    def get(name: str) -> Any:
        return values[f"model.{name}"]

    heads, groups, experts = get("num_attention_heads"), get("num_query_groups"), get("num_moe_experts")
    yield from {name: get(name) for name in ("ffn_hidden_size", "kv_channels", "global_batch_size")}.items()
    if groups != heads:
        yield from {"group_query_attention": True, "num_query_groups": groups}.items()
    original = get("yarn_original_max_position_embeddings")
    yield "position_embedding_type", get("position_embedding_type") if original is None else "yarn"
    if original is not None:
        yield "rotary_scaling_factor", get("rope_scaling_factor")
        yield "yarn_original_max_position_embeddings", original
    elif get("rope_scaling_factor") is not None:
        yield from {"use_rope_scaling": True, "rope_scaling_factor": get("rope_scaling_factor")}.items()
    for name in ("window_size", "window_attn_skip_freq"):
        if (numbers := get(name)) is not None:
            # One word: a tuple, and a list that is a pattern.
            yield name, written(numbers) if name == "window_attn_skip_freq" else ",".join(map(str, numbers))
    activation = get("activation")
    yield from {name: activation == name for name in ("swiglu", "squared_relu")}.items()
    yield "bias_gelu_fusion", activation != "gelu"
    yield "add_qkv_bias", get("qkv_bias")
    if experts:
        yield from {"moe_ffn_hidden_size": get("moe_ffn_hidden_size"), "moe_router_dtype": "fp32"}.items()
    yield from {"vocab_size": get("vocab_size"), "tokenizer_type": "NullTokenizer"}.items()
    yield "make_vocab_size_divisible_by", _divisor(values)
    yield from _numbers(values)
    yield from _layout(values)
    yield from _schedule(values, run)
    yield from _data_and_saves(values)


def _rows(values: Mapping[str, Any]) -> int:
    return derived.padded_rows(values["model.vocab_size"], values[_DIVISOR])


def _divisor(values: Mapping[str, Any]) -> int:
    """The divisor with which Megatron-LM, times its tensor-parallel ranks, pads to the same rows."""
    tokens, divisor, rows = values["model.vocab_size"], values[_DIVISOR], _rows(values)
    tp = values["model.tensor_model_parallel_size"]
    divisors = (divisor // tp or 1, *range(divisor, 0, -1))
    return int(next((each for each in divisors if derived.padded_rows(tokens, each * tp) == rows), divisor))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    low = values["trainer.precision"] != "fp32"
    yield "bf16", low
    yield "grad_reduce_in_bf16", low and values["model.grad_reduce_in_fp32"] is False
    if values["model.fp8"]:
        yield "fp8", "e4m3" if values["model.fp8_e4m3"] else "hybrid"
        yield "fp8_param_gather", values["model.fp8_params"]
        yield from ((name, values[f"model.{name}"]) for name in _FP8)


def _layout(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "sequence_parallel", values["model.sequence_parallel"]
    yield "num_virtual_stages_per_pipeline_rank", values["model.virtual_pipeline_model_parallel_size"]
    yield "recompute_granularity", values["model.activations_checkpoint_granularity"]
    strategy = values["model.data_parallel_sharding_strategy"]
    if strategy in _SHARDED:
        yield from {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}.items()
        yield "num_distributed_optimizer_instances", values["model.num_distributed_optimizer_instances"]
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        yield name, bool(values[f"model.{name}"])


def _schedule(values: Mapping[str, Any], run: Resolved) -> Iterator[tuple[str, Any]]:
    length, tokens = values["model.encoder_seq_length"], values["trainer.max_tokens"]
    yield "lr", values["model.optim.lr"]
    if values["model.optim.decoupled_lr"] is not None:
        yield "decoupled_min_lr", values["model.optim.decoupled_lr"] / 10
    yield from zip(("adam_beta1", "adam_beta2"), values["model.optim.betas"], strict=True)
    # Megatron-LM counts all of it in iterations, or all of it in samples.
    batch, steps = values["model.global_batch_size"], values["trainer.max_steps"]
    if tokens is None and values[f"{_SCHED}decay_tokens"] is not None and not batch_grows(run.model):
        # The phases may end within a step.
        tokens = steps * batch * length
    unit, size = ("iters", length * batch) if tokens is None else ("samples", length)
    yield "train_iters", steps if tokens is None else None
    yield "train_samples", None if tokens is None else tokens // length
    step, first, rate = (1 if tokens is None else batch), values[f"{_SCHED}init_lr"], values["model.optim.lr"]
    lengths = {}
    for name in ("decay", "warmup", "wsd_decay"):
        in_steps, in_tokens = (values[f"{_SCHED}{name}_{each}"] for each in ("steps", "tokens"))
        lengths[name] = in_steps if in_tokens is None else in_tokens // size
    if _has_rates(values, run):
        # Its step n trains with the rate of n - 1: both phases begin a step earlier.
        yield "lr_warmup_init", first + (rate - first) * step / lengths["warmup"]
        lengths |= {name: lengths[name] - step for name in ("warmup", "decay")}
    for name, length in lengths.items():
        yield f"lr_{name}_{unit}", length


def _has_rates(values: Mapping[str, Any], run: Resolved) -> bool:
    """Whether arguments give Megatron-LM the rates that ours have in a warmup and after it.

    Its phases can begin a step earlier if steps are of one size, and all rates begin at one.
    """
    step_tokens = values["model.global_batch_size"] * values["model.encoder_seq_length"]
    steps, tokens = (values[each] or 0 for each in _WARMUP)
    has_end = any(values[f"{_SCHED}decay_{each}"] for each in ("steps", "tokens"))
    is_longer = steps > 1 or tokens > step_tokens
    return has_end and is_longer and not batch_grows(run.model) and values["model.optim.decoupled_lr"] is None


def _data_and_saves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind, prefix = values["model.data.data_impl"], values["model.data.data_prefix"]
    if kind == "mock":
        yield "mock_data", True
    elif kind == "mmap":
        validation = values["model.data.validation_prefix"]
        yield "train_data_path" if validation else "data_path", [str(each) for each in prefix]
        if validation:
            yield "valid_data_path", [str(each) for each in validation]
        yield "split", None if validation else values["model.data.splits_string"]
    # Megatron-LM divides by it even where nothing is validated.
    yield "eval_interval", values["trainer.val_check_interval"]
    if values["model.data.inter_document_masking"]:
        yield from {"reset_attention_mask": True, "reset_position_ids": True}.items()
    if values["checkpoint.save_interval"] or values["checkpoint.save_at_end"]:
        yield from {
            "save": values["run_dir"] or "checkpoints",
            "save_interval": values["checkpoint.save_interval"],
        }.items()
    if values["logging.wandb"]:
        yield "wandb_project", values["logging.wandb_project"]


def _words(actions: Sequence[Action], value: Any) -> list[str]:
    """An argument on the command line; empty for its default, or for a value that no option has."""
    for action in actions:
        if value is None or value == action.default:
            return []
        if action.nargs != 0:
            return [action.option_strings[0], *map(str, value if isinstance(value, list) else [value])]
        if action.const == value:
            return [action.option_strings[0]]
    return []


def command_line(config: Config) -> CommandLine:
    """The command line of Megatron-LM for a configuration.

    Raises:
        ConfigError: Megatron-LM has no such model, or no such data.
    """
    values = values_of(config)
    if values["model.data.data_impl"] not in ("mmap", "mock"):
        told = "Megatron-LM reads indexed files alone; write them once and train with data=mmap"
        raise ConfigError([f"model.data.data_impl={values['model.data.data_impl']}: {told}"])
    run = resolve(config)
    actions: dict[str, list[Action]] = {}
    for action in megatron_parser()._actions:
        actions.setdefault(action.dest, []).append(action)
    arguments = {name: value for name, value in (*_by_rows(values, run), *_together(values, run)) if name in actions}
    words = [word for name, value in arguments.items() for word in _words(actions[name], value)]
    different = dict(_different(run, words))
    if others := [f"{key}={show(values[key])}" for key in _OF_MODEL if key in different]:
        raise ConfigError([f"Megatron-LM has no arguments for a model with {', '.join(others)}"])
    devices, nodes = config.trainer.devices, config.trainer.num_nodes or 1
    launcher = ["torchrun", *(["--nproc-per-node", str(devices)] if devices else [])]
    launcher += ["--nnodes", str(nodes)] if nodes > 1 else []
    return CommandLine(words=words, launcher=[*launcher, "pretrain_gpt.py"], different=[*different.values()])


def _different(run: Resolved, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys that do not come back from the command line as they are, and what Megatron-LM does."""
    translation = translate_megatron_lm(Given(files=(), words=words, environment={}))
    ours = values_of(run.config)
    back = values_of(config_of(build_experiment(translation).text))
    for key, value in ours.items():
        # Null: chosen here.
        if key in _OF_RUN or value is None or value == back[key] or why_no_effect(run, key):
            continue
        if key == _DIVISOR and _rows(ours) == _rows(back):
            continue
        yield key, f"{key}={show(value)}: Megatron-LM does what {key}={show(back[key])} does"
    key = next((each for each in _WARMUP if ours[each] is not None), _WARMUP[0])
    is_constant = ours[f"{_SCHED}name"] == "constant" and not ours[key]
    if not _has_rates(ours, run) and not is_constant:
        yield key, f"{key}={show(ours[key])}: step n of Megatron-LM trains with the rate that step n - 1 has here"
