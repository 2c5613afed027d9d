"""Cross-field rules of the optimizer, the types it keeps masters and moments in, and its schedule."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import MainParamsDtype, MomentDtype, Precision, ScheduleName
from gpt_pretrain.config.derived import decay_steps, min_lr, uses_distributed_optimizer, warmup_steps
from gpt_pretrain.config.errors import one_of
from gpt_pretrain.config.schema import Config, OptimConfig
from gpt_pretrain.spec.optimizers import OPTIMIZERS, names_with
from gpt_pretrain.spec.products import Resolved
from gpt_pretrain.spec.recipes import recipes_for

_ASKED = "model.optim.use_precision_aware_optimizer=true"
# Half of the gap between a number of the type and the next, divided by the number: two to minus this, at most.
_HALF_STEP = {MomentDtype.bf16: 8, MomentDtype.fp16: 11, MomentDtype.fp8: 4}
# Types whose blocks of values share a scale.
_SCALED = (MomentDtype.fp16, MomentDtype.fp8)


def at_least(section: object, prefix: str, minimum: int, *names: str) -> Iterator[str]:
    """Keys of a section below a minimum."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < minimum:
            yield f"{prefix}.{name}={value} is too small; use {minimum} or more"


def optimizer(config: Config) -> Iterator[str]:
    """Ranges of the optimizer, and what the distributed one supports."""
    optim = config.model.optim
    if optim.lr <= 0:
        yield f"model.optim.lr={optim.lr} is not positive; a usual value is 3e-4"
    if optim.eps <= 0:
        yield f"model.optim.eps={optim.eps} is not positive; a usual value is 1e-8"
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas={optim.betas} are not two numbers of at least 0 and below 1; use [0.9,0.95] or others"
    if not 0 <= optim.momentum < 1:
        yield f"model.optim.momentum={optim.momentum} is not at least 0 and below 1; use 0.9 or another"
    if optim.weight_decay < 0:
        yield f"model.optim.weight_decay={optim.weight_decay} is negative; use 0 or more"
    # rules.fp8 tells of FP8 parameters, which need the distributed optimizer.
    if not OPTIMIZERS[optim.name].has_distributed_form and config.model.use_distributed_optimizer:
        also = " with overlap_param_gather=false" * config.model.overlap_param_gather
        also += " with use_precision_aware_optimizer=false" * optim.use_precision_aware_optimizer
        yield (
            f"model.optim.name={optim.name.name} has no distributed form in megatron-core, and "
            "model.use_distributed_optimizer=true; use "
            f"{' or '.join(names_with('has_distributed_form'))}, or use_distributed_optimizer=false{also}"
        )


def schedule(config: Config) -> Iterator[str]:
    """What OptimizerParamScheduler asserts."""
    optim, sched = config.model.optim, config.model.optim.sched
    decay, warmup = decay_steps(config), warmup_steps(config)
    decay_key = (
        f"trainer.max_steps={decay} (decay_steps=null)"
        if sched.decay_steps is None
        else f"model.optim.sched.decay_steps={decay}"
    )
    yield from at_least(sched, "model.optim.sched", 0, "warmup_steps")
    yield from at_least(sched, "model.optim.sched", 1, "decay_steps", "wsd_decay_steps")
    if 0 < decay <= warmup:
        yield (
            f"model.optim.sched.warmup_steps={warmup} is not below {decay_key}; "
            f"use 0 to {decay - 1}, or set a longer decay_steps"
        )
    for name, value in (("min_lr", min_lr(optim)), ("init_lr", sched.init_lr)):
        if not 0 <= value <= optim.lr:
            yield f"model.optim.sched.{name}={value} is not between 0 and model.optim.lr={optim.lr}; set both together"
    wsd, phase = sched.name is ScheduleName.wsd, sched.wsd_decay_steps
    if wsd and phase is None:
        yield (
            "model.optim.sched.name=wsd needs model.optim.sched.wsd_decay_steps, the length of its last phase; "
            f"use wsd_decay_steps=1 to {max(1, decay - warmup)}"
        )
    if wsd and phase is not None and phase > decay - warmup > 0:
        yield (
            f"model.optim.sched.wsd_decay_steps={phase} is longer than the steps that warmup leaves of {decay_key}; "
            f"use 1 to {decay - warmup}"
        )


def _moments(optim: OptimConfig) -> Iterator[str]:
    """Types too coarse for the decay of an average in a step: it would grow with the gradients and never fall."""
    never_falls = "rounded to the nearest in each step, it grows with the gradients and never falls again"
    dtypes = {"exp_avg_dtype": optim.exp_avg_dtype, "exp_avg_sq_dtype": optim.exp_avg_sq_dtype}
    if dtypes["exp_avg_sq_dtype"] is MomentDtype.fp8:
        yield (
            "model.optim.exp_avg_sq_dtype=fp8: E4M3 has 4 bits, too few for a second moment with usual "
            f"betas: {never_falls}; use fp16, bf16 or fp32"
        )
        del dtypes["exp_avg_sq_dtype"]
    # Another rule checks the number and the range of betas.
    for (name, dtype), beta in zip(dtypes.items(), optim.betas, strict=False):
        bits = _HALF_STEP.get(dtype)
        if bits is None or 1 - beta >= 2.0**-bits:
            continue
        wider = [other.name for other, more in _HALF_STEP.items() if more > bits and 1 - beta >= 2.0**-more]
        yield (
            f"model.optim.{name}={dtype.name} with a beta of {beta:g} (model.optim.betas): a step removes "
            f"{1 - beta:.2g} of the average, less than half of the gap between two numbers of {dtype.name} (up to "
            f"2^-{bits}): {never_falls}; use {', '.join([*wider, 'fp32'])}, or a beta of at most {1 - 2.0**-bits}"
        )


def _untested(run: Resolved) -> Iterator[str]:
    """Combinations that no test has shown to train."""
    model, optim = run.model, run.model.optim
    feature = "fp8_params with use_precision_aware_optimizer"
    if run.fp8 is not None and run.fp8.params and (why := run.fp8.recipe.why_not(feature)) is not None:
        yield (
            f"{_ASKED} with model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}: {why}; "
            f"use fp8={one_of(recipes_for('fp8_params', feature))}, or "
            "use_precision_aware_optimizer=false"
        )
    by_place = {
        "main_params_dtype": optim.main_params_dtype is MainParamsDtype.fp16,
        "exp_avg_dtype": optim.exp_avg_dtype in _SCALED,
        "exp_avg_sq_dtype": optim.exp_avg_sq_dtype in _SCALED,
    }
    if model.share_embeddings_and_output_weights and model.pipeline_model_parallel_size > 1:
        # The two stages cut their buffers at different places.
        for name in (name for name, is_so in by_place.items() if is_so):
            yield (
                f"model.optim.{name}={getattr(optim, name).name} with model.share_embeddings_and_output_weights=true "
                f"and model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}: its rounding depends on "
                "the place in a rank's part, and the copies on the first and the last stage would diverge; use "
                f"{'fp32' if name == 'main_params_dtype' else 'bf16 or fp32'}, or pipeline_model_parallel_size=1"
            )


def optimizer_memory(run: Resolved) -> Iterator[str]:
    """What the precision-aware optimizer needs."""
    config, model, optim = run.config, run.model, run.model.optim
    if not optim.use_precision_aware_optimizer:
        return
    if not OPTIMIZERS[optim.name].has_small_states:
        names = " or ".join(names_with("has_small_states"))
        also = " with use_distributed_optimizer=false" * bool(model.use_distributed_optimizer)
        yield (
            f"{_ASKED} is a form of {names}, and model.optim.name={optim.name.name}; use optim.name={names}, or "
            f"use_precision_aware_optimizer=false{also}"
        )
    if not uses_distributed_optimizer(model):
        yield (
            f"{_ASKED} is a form of the distributed optimizer, and model.use_distributed_optimizer="
            f"{'null comes to false' if model.use_distributed_optimizer is None else 'false'}; "
            "use use_distributed_optimizer=true (on one GPU, too), or use_precision_aware_optimizer=false"
        )
    if config.trainer.precision is Precision.fp32:
        yield (
            f"{_ASKED} is for weights in BF16 or FP8 with masters beside them, and trainer.precision=fp32 has no "
            "masters; use precision=bf16, or false"
        )
    yield from _moments(optim)
    yield from _untested(run)
