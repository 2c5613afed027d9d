"""Keys without effect in a run, and why: one table for the rules, which refuse such keys, and for the plan.

A key is refused only if somebody asked for it. Most keys have a value that asks for nothing (null, false, empty). If
YAML must name a real value, as for Adam's betas, only the command line shows that somebody asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpt_pretrain.config.choices import (
    AUTO,
    AmaxComputeAlgo,
    CudaGraphImpl,
    DataImpl,
    Fp8Backend,
    Fp8ProofMode,
    MainParamsDtype,
    MoeLoadBalancing,
    MoeTokenDispatcher,
    MomentDtype,
    OnSaveError,
    PositionEmbedding,
    RecomputeGranularity,
    ScheduleName,
    TokenizerLibrary,
)
from gpt_pretrain.config.derived import warmup_steps
from gpt_pretrain.config.errors import one_of, show
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.config.schema import Config
from gpt_pretrain.run.optimizers import OPTIMIZERS
from gpt_pretrain.run.products import Resolved, resolve
from gpt_pretrain.run.recipes import DELAYED_KEYS, RECIPES

type Why = Callable[[Resolved], str]
"""Why a key has no effect in a run; empty if it has one."""

# FP8 keys whose names do not say so.
_KEPT_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
# Keys of experts with the values that ask for nothing; messages offer the first.
_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_ffn_hidden_size": (None,),
    "moe_router_topk": (2,),
    "moe_router_load_balancing_type": (MoeLoadBalancing.aux_loss,),
    "moe_aux_loss_coeff": (0.01, 0.0),
    "moe_token_dispatcher_type": (MoeTokenDispatcher.alltoall,),
    "overlap_moe_expert_parallel_comm": (False,),
    "moe_z_loss_coeff": (None,),
    "moe_grouped_gemm": (None, False),
    "moe_grouped_kernel": (None,),
    "moe_permute_fusion": (None, False),
    "moe_router_padding_for_quantization": (False,),
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (None,),
}
# The same for the optimizer's states.
_STATES = {
    "main_params_dtype": MainParamsDtype.fp32,
    "exp_avg_dtype": MomentDtype.fp32,
    "exp_avg_sq_dtype": MomentDtype.fp32,
}
# Keys of `checkpoint.` that only a run with saves reads, with the values that ask for nothing.
READ_BY_SAVES = {"async_save": True, "keep_last": None, "keep_every": None, "on_save_error": OnSaveError.stop}


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A reason why a key may have no effect."""

    key: str
    why: Why
    instead: str = ""
    """The way out, after "use". Empty if only the command line shows that the key is wanted: leave it out."""
    silent: tuple[Any, ...] | None = None
    """Values that ask for nothing; None: null, false and empty, or no value if there is no `instead`."""
    joint: str = " with "
    """What stands before `why` in the refusal."""

    def is_asked(self, config: Config) -> bool:
        """Whether the value asks for something."""
        value = value_of(config, self.key)
        if self.silent is not None:
            return value not in self.silent
        return value is not None and (schema_keys()[self.key].optional or bool(value))


def _if(holds: Callable[[Resolved], bool], why: str) -> Why:
    return lambda run: why if holds(run) else ""


def _with(key: str, value: object, because: str = "") -> Why:
    """A setting that takes away another key's effect."""
    return _if(lambda run: value_of(run.config, key) == value, f"{key}={show(value)}{because}")


def _unless(key: str, *needed: object, because: str = "") -> Why:
    """Any setting except those that read another key."""

    def why(run: Resolved) -> str:
        value = value_of(run.config, key)
        return "" if value in needed else f"{key}={show(value)}{because}"

    return why


def _unless_data(impl: DataImpl) -> Why:
    return _unless("model.data.data_impl", impl, because=", which does not read it")


def _unless_schedule(*names: ScheduleName) -> Why:
    only = one_of([name.name for name in names])
    return _unless("model.optim.sched.name", *names, because=f": only {only} reads it")


def _unread_by_optimizer(name: str) -> Why:
    return lambda run: OPTIMIZERS[run.model.optim.name].unread.get(name, "")


_without_fp8 = _with("model.fp8", False)
_with_plain_states = _with("model.optim.use_precision_aware_optimizer", False)
_with_whole_masters = _with("model.optim.main_params_dtype", MainParamsDtype.fp16, ", which is stored whole")
_without_tokenizer = _with("model.tokenizer.library", TokenizerLibrary.none, ": no text can be sampled")


def _keeps_history(run: Resolved) -> bool:
    return run.fp8 is not None and run.fp8.recipe.keeps_history


def _without_history(run: Resolved) -> str:
    if run.fp8 is None or run.fp8.recipe.keeps_history:
        return ""
    return f"model.fp8_recipe={run.fp8.recipe.name}: {run.fp8.recipe.scales_from}"


def _no_high_precision_wgrad(run: Resolved) -> str:
    if run.fp8 is None or not run.fp8.recipe.has_wgrad or (run.fp8.recipe.leaves_wgrad_out and run.fp8.emulate):
        return ""
    if run.fp8.backend is Fp8Backend.torchao:
        return f"model.fp8_recipe={run.fp8.recipe.name}, which computes weight gradients in FP8"
    if run.fp8.recipe.leaves_wgrad_out:
        return "model.fp8_emulate=false: Transformer Engine 2.12 dropped it (override_linear_precision is gone)"
    return f"model.fp8_recipe={run.fp8.recipe.name}: only delayed has it, and only emulated"


def _without_remainders(run: Resolved) -> str:
    return _with_plain_states(run) or _with_whole_masters(run)


def _has_own_warmup(run: Resolved) -> bool:
    sched = run.model.optim.sched
    return sched.name is ScheduleName.constant and sched.warmup_steps is not None


def _saves_nothing(run: Resolved) -> bool:
    saves = run.config.checkpoint
    return not saves.save_at_end and saves.save_interval is None and saves.save_interval_minutes is None


def _without_sample(run: Resolved) -> str:
    return _without_tokenizer(run) if run.config.sample.max_new_tokens else "sample.max_new_tokens=0"


@cache
def _table() -> tuple[NoEffect, ...]:
    return (*_fp8_rows(), *_model_rows(), *_optimizer_rows(), *_data_rows(), *_loop_rows())


def _fp8_rows() -> Iterator[NoEffect]:
    # The default recipe has no measured size: turning FP8 on would not be enough.
    yield NoEffect(
        "model.fp8_exclude",
        lambda run: _without_fp8(run) if AUTO in run.model.fp8_exclude else "",
        "[], or leave all keys of FP8 out (fp8=none)",
    )
    kept_layers = [f"model.{name}" for name in _KEPT_LAYERS]
    for key in schema_keys():
        if key.startswith("model.fp8_") or key in kept_layers:
            # An engine may need more than FP8 to be on.
            turn_on = "null" if key == "model.fp8_backend" else "model.fp8=true"
            yield NoEffect(key, _without_fp8, f"{turn_on}, or leave all keys of FP8 out (fp8=none)")
    yield NoEffect("logging.fp8_proof", _without_fp8)
    yield NoEffect("logging.fp8_proof_interval", _without_fp8)
    unproven = _with("logging.fp8_proof", Fp8ProofMode.never, ": nothing is proven")
    yield NoEffect("logging.fp8_proof_interval", unproven)
    replayed = _with("model.cuda_graph_impl", CudaGraphImpl.local, ": a replay reports none of its products")
    yield NoEffect("logging.fp8_proof_interval", replayed)
    yield NoEffect("logging.fp8_statistics_interval", _without_fp8, "model.fp8=true, or null")
    yield NoEffect("logging.fp8_saturation_threshold", _without_fp8)
    for name in DELAYED_KEYS:
        yield NoEffect(f"model.{name}", _without_history, "null, or fp8=delayed")
    # 1024 is the recipe's own length, which conf/ names; 1 says the same as most_recent (NeMo's old pair).
    newest = _if(
        lambda run: _keeps_history(run) and run.model.fp8_amax_compute_algo is AmaxComputeAlgo.most_recent,
        "model.fp8_amax_compute_algo=most_recent",
    )
    yield NoEffect("model.fp8_amax_history_len", newest, "null, or model.fp8_amax_compute_algo=max", (None, 1, 1024))
    only_one = _if(
        lambda run: _keeps_history(run) and run.model.fp8_amax_history_len == 1, "model.fp8_amax_history_len=1"
    )
    yield NoEffect("model.fp8_amax_compute_algo", only_one, silent=(None, AmaxComputeAlgo.most_recent))
    ignored = _if(
        lambda run: run.fp8 is not None,
        "Transformer Engine ignores it and computes new scales at every step (since 1.8)",
    )
    yield NoEffect("model.fp8_interval", ignored, "1, or null", silent=(None, 1), joint=": ")
    # Nobody expects an effect: the plan shows the key, and no rule refuses it.
    overruled = _if(
        lambda run: bool(run.model.fp8_e4m3 and run.model.fp8_hybrid), "model.fp8_e4m3=true, which overrules it"
    )
    yield NoEffect("model.fp8_hybrid", overruled, silent=(None, False, True))
    without_wgrad = [name for name, recipe in RECIPES.items() if recipe.leaves_wgrad_out or not recipe.has_wgrad]
    ways = ["null", *(f"fp8={name} with model.fp8_emulate=true" for name in without_wgrad)]
    yield NoEffect("model.fp8_wgrad", _no_high_precision_wgrad, ", or ".join(ways), silent=(None, True))
    all_layers = _if(
        lambda run: run.fp8 is not None and not run.model.first_last_layers_bf16, "model.first_last_layers_bf16=false"
    )
    for key in kept_layers[1:]:
        yield NoEffect(key, all_layers, "model.first_last_layers_bf16=true, or null")


def _model_rows() -> Iterator[NoEffect]:
    without_experts = _with("model.num_moe_experts", None)
    for name, silent in _EXPERTS.items():
        yield NoEffect(f"model.{name}", without_experts, f"{show(silent[0])}, or a number of experts", silent)
    without_full = _unless("model.activations_checkpoint_granularity", RecomputeGranularity.full)
    for name, other in (("method", "num_layers=1"), ("num_layers", "method=uniform")):
        instead = f"null, or model.activations_checkpoint_granularity=full with model.activations_checkpoint_{other}"
        yield NoEffect(f"model.activations_checkpoint_{name}", without_full, instead)
    without_rope = _unless("model.position_embedding_type", PositionEmbedding.rope)
    yield NoEffect("model.rope_scaling_factor", without_rope, "null, or model.position_embedding_type=rope")
    yield NoEffect("model.rotary_percentage", without_rope)
    yield NoEffect("model.rotary_base", without_rope)
    yield NoEffect(
        "model.ddp_bucket_size",
        _with("model.overlap_grad_reduce", False),
        "null, or model.overlap_grad_reduce=true (parallelism=dp has it so)",
    )
    yield NoEffect(
        "model.cross_entropy_fusion_impl",
        _with("model.cross_entropy_loss_fusion", False),
        "model.cross_entropy_loss_fusion=true, or model.cross_entropy_fusion_impl=null",
    )


def _optimizer_rows() -> Iterator[NoEffect]:
    turn_on = "model.optim.use_precision_aware_optimizer=true with model.use_distributed_optimizer=true"
    for name, silent in _STATES.items():
        yield NoEffect(f"model.optim.{name}", _with_plain_states, f"model.optim.{name}=fp32, or {turn_on}", (silent,))
    yield NoEffect("model.optim.store_param_remainders", _without_remainders)
    for name in sorted({name for optimizer in OPTIMIZERS.values() for name in optimizer.unread}):
        yield NoEffect(f"model.optim.{name}", _unread_by_optimizer(name))
    sched, only_wsd = "model.optim.sched", _unless_schedule(ScheduleName.wsd)
    yield NoEffect(f"{sched}.wsd_decay_style", only_wsd)
    yield NoEffect(f"{sched}.wsd_decay_steps", only_wsd, f"{sched}.name=wsd, or {sched}.wsd_decay_steps=null")
    falling = _unless_schedule(*(name for name in ScheduleName if name is not ScheduleName.constant))
    yield NoEffect(f"{sched}.min_lr", falling, f"null, or {sched}.name=cosine or linear")
    own_warmup = _if(_has_own_warmup, "model.optim.sched.name=constant, and the warmup has steps of its own")
    yield NoEffect(f"{sched}.decay_steps", own_warmup)
    no_warmup = _if(lambda run: not warmup_steps(run.config), "no warmup (model.optim.sched.warmup_steps)")
    yield NoEffect(f"{sched}.init_lr", no_warmup)


def _data_rows() -> Iterator[NoEffect]:
    for impl in DataImpl:
        if (name := impl.files_key) is not None:
            instead = f"data={impl.name}, or leave {name} empty"
            yield NoEffect(f"model.data.{name}", _unless_data(impl), instead)
    yield NoEffect("model.data.validation_prefix", _unless_data(DataImpl.mmap), "model.data.validation_prefix=[]")
    whole_files = _if(lambda run: bool(run.config.model.data.validation_prefix), "model.data.validation_prefix")
    yield NoEffect("model.data.splits_string", whole_files)
    random_tokens = _with("model.data.data_impl", DataImpl.mock, ", whose random tokens come from no file")
    for name in ("splits_string", "cache_dir", "num_dataset_builder_threads"):
        yield NoEffect(f"model.data.{name}", random_tokens)
    yield NoEffect("model.data.text_key", _unless_data(DataImpl.text))
    not_a_file = _unless("model.tokenizer.library", TokenizerLibrary.file)
    yield NoEffect("model.tokenizer.model", not_a_file, "null, or model.tokenizer.library=file")
    yield NoEffect("model.tokenizer.vocab_size", _unless("model.tokenizer.library", TokenizerLibrary.bpe))


def _loop_rows() -> Iterator[NoEffect]:
    nothing_saved = _if(
        _saves_nothing,
        "nothing saved (checkpoint.save_at_end=false, and neither save_interval nor save_interval_minutes)",
    )
    for name, silent in READ_BY_SAVES.items():
        instead = f"checkpoint.save_interval_minutes=30, or checkpoint.{name}={show(silent)}"
        yield NoEffect(f"checkpoint.{name}", nothing_saved, instead, (silent,), joint=": ")
    without_validation = _with("trainer.limit_val_batches", 0)
    yield NoEffect("trainer.val_check_interval", without_validation, silent=(None,))
    yield NoEffect("trainer.validate_at_start", without_validation, silent=(False,))
    some = "trainer.limit_val_batches=8, or model.data.validation_prefix=[]"
    yield NoEffect("model.data.validation_prefix", without_validation, some)
    yield NoEffect("trainer.spike_margin", _with("trainer.max_spike_rewinds", None))
    yield NoEffect("sample.max_new_tokens", _without_tokenizer, silent=(0,))
    yield NoEffect("sample.prompt", _without_sample)
    yield NoEffect("sample.temperature", _without_sample)
    without_wandb = _with("logging.wandb", False)
    yield NoEffect("logging.wandb_project", without_wandb, silent=("",))
    yield NoEffect("logging.wandb_entity", without_wandb, "null, or logging=wandb")


def why_no_effect(run: Resolved, key: str) -> str:
    """Why a key has no effect in this run; empty if it has one."""
    return next((why for row in _table() if row.key == key and (why := row.why(run))), "")


def no_effect_problems(run: Resolved) -> Iterator[str]:
    """One message per reason, with all keys that have no effect for it."""
    asked: dict[tuple[str, str], list[str]] = {}
    told: set[str] = set()
    for row in _table():
        if not row.instead or row.key in told or not row.is_asked(run.config):
            continue
        why = row.why(run)
        if why:
            told.add(row.key)
            asked.setdefault((row.joint + why, row.instead), []).append(_setting(run.config, row.key))
    for (because, instead), settings in asked.items():
        has = "has" if len(settings) == 1 else "have"
        yield f"{', '.join(settings)} {has} no effect{because}; use {instead}"


def given_without_effect(config: Config, given: frozenset[str]) -> list[str]:
    """A message for each key of the command line, including elements of lists, that only the command line asks for."""
    return [
        f"{_setting(config, row.key)} has no effect with {why}; leave it out"
        for row, why in _unread(config, given)
        if not row.instead
    ]


def unread_keys(config: Config, given: frozenset[str]) -> dict[str, str]:
    """The keys of the command line that are refused because the run does not read them, and why."""
    return {path: why for row, why in _unread(config, given) for path in given if _is_of(path, row)}


def _unread(config: Config, given: frozenset[str]) -> Iterator[tuple[NoEffect, str]]:
    run = resolve(config)
    for row in _table():
        is_asked = row.is_asked(config) if row.instead or row.silent is not None else True
        if is_asked and any(_is_of(path, row) for path in given) and (why := row.why(run)):
            yield row, why


def _is_of(path: str, row: NoEffect) -> bool:
    return path == row.key or path.startswith(f"{row.key}.")


def _setting(config: Config, key: str) -> str:
    value = value_of(config, key)
    return f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={show(value)}"
