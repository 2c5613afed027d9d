"""Keys that have no effect in a run, and why: one table for the rules, which refuse such a key, and for the plan.

A key is refused where somebody asked for it. Most keys have a value that asks for nothing (null, false, empty). Where
YAML must name a real value, as for Adam's betas, only the command line shows that somebody asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from gpt_pretrain.config.choices import (
    AUTO,
    AmaxComputeAlgo,
    CudaGraphImpl,
    DataImpl,
    Fp8Backend,
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
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.config.schema import Config
from gpt_pretrain.spec.optimizers import OPTIMIZERS
from gpt_pretrain.spec.products import Resolved, resolve
from gpt_pretrain.spec.recipes import DELAYED_KEYS, RECIPES

# The keys of FP8 whose names do not say so.
_KEPT_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoEffect:
    """A reason for which a key may have no effect."""

    key: str
    why: Callable[[Resolved], str]
    """The reason in a given run; empty where the key counts."""
    instead: str = ""
    """The way out, after "use". Empty, for leaving the key out, where only the command line shows that it is wanted."""
    silent: tuple[Any, ...] | None = None
    """Values that ask for nothing; None: null, false and empty, or without `instead`, no value."""
    is_harmless: bool = False
    """Nobody expects the key to count: the plan shows it, and no rule refuses it."""

    def is_asked(self, config: Config) -> bool:
        """Whether the value asks for something."""
        value = value_of(config, self.key)
        if self.silent is not None:
            return value not in self.silent
        return value is not None and (schema_keys()[self.key].optional or bool(value))


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def _with(key: str, value: object, because: str = "") -> Callable[[Resolved], str]:
    """A setting that leaves another key without effect."""
    return lambda run: f"{key}={show(value)}{because}" * (value_of(run.config, key) is value)


def _unless(key: str, needed: object, because: str = "") -> Callable[[Resolved], str]:
    """A setting other than the one that reads another key."""

    def why(run: Resolved) -> str:
        value = value_of(run.config, key)
        return "" if value is needed else f"{key}={show(value)}{because}"

    return why


_without_experts = _with("model.num_moe_experts", None)
_without_full_recomputation = _unless("model.activations_checkpoint_granularity", RecomputeGranularity.full)
_with_graphs = _with("model.cuda_graph_impl", CudaGraphImpl.local, ": a replay reports none of its products")
_without_rope = _unless("model.position_embedding_type", PositionEmbedding.rope)
_with_plain_states = _with("model.optim.use_precision_aware_optimizer", False)
_with_random_tokens = _with("model.data.data_impl", DataImpl.mock, ", whose random tokens come from no file")
_without_tokenizer = _with("model.tokenizer.library", TokenizerLibrary.none, ": no text can be sampled")
_without_wandb = _with("logging.wandb", False)


def _without_fp8(run: Resolved) -> str:
    return "" if run.fp8 is not None else "model.fp8=false"


def _without_history(run: Resolved) -> str:
    if run.fp8 is None or run.fp8.recipe.keeps_history:
        return ""
    return f"model.fp8_recipe={run.fp8.recipe.name}: {run.fp8.recipe.scales_from}"


def _one_amax_counts(run: Resolved) -> str:
    if run.fp8 is None or not run.fp8.recipe.keeps_history:
        return ""
    newest = run.fp8.amax_compute_algo is AmaxComputeAlgo.most_recent
    return "model.fp8_amax_compute_algo=most_recent" if newest else ""


def _one_amax_kept(run: Resolved) -> str:
    one = run.fp8 is not None and run.fp8.recipe.keeps_history and run.fp8.amax_history_len == 1
    return "model.fp8_amax_history_len=1" if one else ""


def _no_high_precision_wgrad(run: Resolved) -> str:
    if run.fp8 is None or not run.fp8.recipe.has_wgrad or (run.fp8.recipe.leaves_wgrad_out and run.fp8.emulate):
        return ""
    if run.fp8.backend is Fp8Backend.torchao:
        return f"model.fp8_recipe={run.fp8.recipe.name}, which computes weight gradients in FP8"
    return (
        f"model.fp8_recipe={run.fp8.recipe.name} and model.fp8_emulate={show(run.fp8.emulate)}: only delayed "
        "has it, and Transformer Engine 2.12 drops it (override_linear_precision is gone)"
    )


def _all_layers_in_fp8(run: Resolved) -> str:
    return "" if run.fp8 is None or run.model.first_last_layers_bf16 else "model.first_last_layers_bf16=false"


def _without_remainders(run: Resolved) -> str:
    if not run.model.optim.use_precision_aware_optimizer:
        return _with_plain_states(run)
    fp16 = run.model.optim.main_params_dtype is MainParamsDtype.fp16
    return "model.optim.main_params_dtype=fp16, which is stored whole" if fp16 else ""


def _unread_by_optimizer(name: str) -> Callable[[Resolved], str]:
    return lambda run: OPTIMIZERS[run.model.optim.name].unread.get(name, "")


def _unless_schedule(*names: ScheduleName) -> Callable[[Resolved], str]:
    def why(run: Resolved) -> str:
        name = run.model.optim.sched.name
        only = one_of([other.name for other in names])
        return "" if name in names else f"model.optim.sched.name={name.name}: only {only} reads it"

    return why


def _constant_with_own_warmup(run: Resolved) -> str:
    sched = run.model.optim.sched
    if sched.name is not ScheduleName.constant or sched.warmup_steps is None:
        return ""
    return "model.optim.sched.name=constant, and the warmup has steps of its own"


def _without_warmup(run: Resolved) -> str:
    return "" if warmup_steps(run.config) else "no warmup (model.optim.sched.warmup_steps)"


def _unless_data(impl: DataImpl) -> Callable[[Resolved], str]:
    return _unless("model.data.data_impl", impl, ", which does not read it")


def _without_saves(run: Resolved) -> str:
    saves = run.config.checkpoint
    if saves.save_at_end or saves.save_interval is not None or saves.save_interval_minutes is not None:
        return ""
    return "nothing saved (checkpoint.save_at_end=false, and neither save_interval nor save_interval_minutes)"


def _without_validation(run: Resolved) -> str:
    return "" if run.config.trainer.limit_val_batches else "trainer.limit_val_batches=0"


def _without_sample(run: Resolved) -> str:
    return _without_tokenizer(run) if run.config.sample.max_new_tokens else "sample.max_new_tokens=0"


@cache
def _table() -> tuple[NoEffect, ...]:
    fp8_keys = [
        path
        for path in schema_keys()
        if path.startswith("model.fp8_") or path in [f"model.{name}" for name in _KEPT_LAYERS]
    ]
    without_wgrad = [name for name, recipe in RECIPES.items() if recipe.leaves_wgrad_out or not recipe.has_wgrad]
    turn_on = "model.fp8=true, or leave all keys of FP8 out (fp8=none)"
    # An engine alone may need more than FP8 to be on.
    leave_out = "null, or leave all keys of FP8 out (fp8=none)"
    experts = {
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
    states = {
        "main_params_dtype": MainParamsDtype.fp32,
        "exp_avg_dtype": MomentDtype.fp32,
        "exp_avg_sq_dtype": MomentDtype.fp32,
    }
    return (
        # FP8. The default recipe has no measured size, so that to turn FP8 on is not enough.
        NoEffect(
            key="model.fp8_exclude",
            why=lambda run: _without_fp8(run) if AUTO in run.model.fp8_exclude else "",
            instead="[], or leave all keys of FP8 out (fp8=none)",
        ),
        *(
            NoEffect(key=key, why=_without_fp8, instead=leave_out if key == "model.fp8_backend" else turn_on)
            for key in fp8_keys
        ),
        NoEffect(key="logging.fp8_proof_interval", why=_without_fp8),
        NoEffect(key="logging.fp8_proof_interval", why=_with_graphs),
        NoEffect(key="logging.fp8_statistics_interval", why=_without_fp8, instead="model.fp8=true, or null"),
        NoEffect(key="logging.fp8_saturation_threshold", why=_without_fp8),
        *(NoEffect(key=f"model.{name}", why=_without_history, instead="null, or fp8=delayed") for name in DELAYED_KEYS),
        NoEffect(
            key="model.fp8_amax_history_len",
            why=_one_amax_counts,
            instead="null, or fp8_amax_compute_algo=max",
            # The recipe's own length, which conf/ names, and the length that says the same (NeMo's pair of old).
            silent=(None, 1, 1024),
        ),
        NoEffect(key="model.fp8_amax_compute_algo", why=_one_amax_kept, silent=(None, AmaxComputeAlgo.most_recent)),
        NoEffect(
            key="model.fp8_interval",
            why=lambda run: (
                "Transformer Engine ignores it and computes new scales at every step (since 1.8)"
                * (run.fp8 is not None)
            ),
            instead="1, or null",
            silent=(None, 1),
        ),
        NoEffect(
            key="model.fp8_hybrid",
            why=lambda run: (
                "model.fp8_e4m3=true, which overrules it" * bool(run.model.fp8_e4m3 and run.model.fp8_hybrid)
            ),
            instead="one of the two",
            is_harmless=True,
        ),
        NoEffect(
            key="model.fp8_wgrad",
            why=_no_high_precision_wgrad,
            instead=", or ".join(["null", *(f"fp8={each} with model.fp8_emulate=true" for each in without_wgrad)]),
            silent=(None, True),
        ),
        *(
            NoEffect(key=f"model.{name}", why=_all_layers_in_fp8, instead="first_last_layers_bf16=true, or null")
            for name in _KEPT_LAYERS[1:]
        ),
        # Layers.
        *(
            NoEffect(
                key=f"model.{name}",
                why=_without_experts,
                instead=f"{show(silent[0])}, or a number of experts",
                silent=silent,
            )
            for name, silent in experts.items()
        ),
        *(
            NoEffect(
                key=f"model.activations_checkpoint_{name}",
                why=_without_full_recomputation,
                instead=f"null, or activations_checkpoint_granularity=full with activations_checkpoint_{other}",
            )
            for name, other in (("method", "num_layers=1"), ("num_layers", "method=uniform"))
        ),
        NoEffect(key="model.rope_scaling_factor", why=_without_rope, instead="null, or position_embedding_type=rope"),
        *(NoEffect(key=f"model.rotary_{name}", why=_without_rope) for name in ("percentage", "base")),
        NoEffect(
            key="model.ddp_bucket_size",
            why=_with("model.overlap_grad_reduce", False),
            instead="null, or overlap_grad_reduce=true (parallelism=dp has it so)",
        ),
        NoEffect(
            key="model.cross_entropy_fusion_impl",
            why=_with("model.cross_entropy_loss_fusion", False),
            instead="cross_entropy_loss_fusion=true, or cross_entropy_fusion_impl=null",
        ),
        # The optimizer and its schedule.
        *(
            NoEffect(
                key=f"model.optim.{name}",
                why=_with_plain_states,
                instead=f"{name}=fp32, or use_precision_aware_optimizer=true with use_distributed_optimizer=true",
                silent=(silent,),
            )
            for name, silent in states.items()
        ),
        NoEffect(key="model.optim.store_param_remainders", why=_without_remainders),
        *(
            NoEffect(key=f"model.optim.{name}", why=_unread_by_optimizer(name))
            for name in sorted({name for optimizer in OPTIMIZERS.values() for name in optimizer.unread})
        ),
        NoEffect(key="model.optim.sched.wsd_decay_style", why=_unless_schedule(ScheduleName.wsd)),
        NoEffect(
            key="model.optim.sched.wsd_decay_steps",
            why=_unless_schedule(ScheduleName.wsd),
            instead="model.optim.sched.name=wsd, or wsd_decay_steps=null",
        ),
        NoEffect(
            key="model.optim.sched.min_lr",
            why=_unless_schedule(*(name for name in ScheduleName if name is not ScheduleName.constant)),
            instead="null, or model.optim.sched.name=cosine or linear",
        ),
        NoEffect(key="model.optim.sched.decay_steps", why=_constant_with_own_warmup),
        NoEffect(key="model.optim.sched.init_lr", why=_without_warmup),
        # Data.
        *(
            NoEffect(
                key=f"model.data.{impl.files_key}",
                why=_unless_data(impl),
                instead=f"data={impl.name}, or leave {impl.files_key} empty",
            )
            for impl in DataImpl
            if impl.files_key is not None
        ),
        *(
            NoEffect(key=f"model.data.{name}", why=_with_random_tokens)
            for name in ("splits_string", "cache_dir", "num_dataset_builder_threads")
        ),
        NoEffect(key="model.data.text_key", why=_unless_data(DataImpl.text)),
        NoEffect(
            key="model.tokenizer.model",
            why=_unless("model.tokenizer.library", TokenizerLibrary.file),
            instead="null, or library=file",
        ),
        NoEffect(key="model.tokenizer.vocab_size", why=_unless("model.tokenizer.library", TokenizerLibrary.bpe)),
        # Checkpoints.
        *(
            NoEffect(
                key=f"checkpoint.{name}",
                why=_without_saves,
                instead=f"save_interval_minutes=30, or {name}={show(silent)}",
                silent=(silent,),
            )
            for name, silent in (
                ("async_save", True),
                ("keep_last", None),
                ("keep_every", None),
                ("on_save_error", OnSaveError.stop),
            )
        ),
        # The loop, and what it leaves.
        *(
            NoEffect(key=f"trainer.{name}", why=_without_validation, silent=(silent,))
            for name, silent in (("val_check_interval", None), ("validate_at_start", False))
        ),
        NoEffect(key="trainer.spike_margin", why=_with("trainer.max_spike_rewinds", None)),
        NoEffect(key="sample.max_new_tokens", why=_without_tokenizer, silent=(0,)),
        *(NoEffect(key=f"sample.{name}", why=_without_sample) for name in ("prompt", "temperature")),
        NoEffect(key="logging.wandb_project", why=_without_wandb, silent=("",)),
        NoEffect(key="logging.wandb_entity", why=_without_wandb, instead="null, or logging=wandb"),
    )


def why_no_effect(run: Resolved, key: str) -> str:
    """Why a key has no effect in this run; empty where it counts."""
    return next((why for row in _table() if row.key == key and (why := row.why(run))), "")


def no_effect_problems(run: Resolved) -> Iterator[str]:
    """One message for each reason, with all the keys that it leaves without effect."""
    asked: dict[tuple[str, str], list[str]] = {}
    told: set[str] = set()
    for row in _table():
        if not row.instead or row.is_harmless or row.key in told or not row.is_asked(run.config):
            continue
        why = row.why(run)
        if why:
            told.add(row.key)
            asked.setdefault((why, row.instead), []).append(_setting(run.config, row.key))
    for (why, instead), settings in asked.items():
        has = "has" if len(settings) == 1 else "have"
        because = f" with {why}" if why.startswith(("model.", "trainer.")) else f": {why}"
        yield f"{', '.join(settings)} {has} no effect{because}; use {instead}"


def given_without_effect(config: Config, given: frozenset[str]) -> list[str]:
    """A message for each key of the command line, elements of lists included, that the run does not read at all."""
    run = resolve(config)
    return [
        f"{_setting(config, row.key)} has no effect with {why}; leave it out"
        for row in _table()
        if not row.instead
        and (row.silent is None or row.is_asked(config))
        and any(path == row.key or path.startswith(f"{row.key}.") for path in given)
        and (why := row.why(run))
    ]


def _setting(config: Config, key: str) -> str:
    value = value_of(config, key)
    return f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={show(value)}"
