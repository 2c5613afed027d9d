"""Cross-field rules about the types that Adam keeps masters and moments in."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import MainParamsDtype, MomentDtype, Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import OptimConfig
from gpt_pretrain.spec.optimizers import OPTIMIZERS, names_with
from gpt_pretrain.spec.recipes import recipes_for
from gpt_pretrain.spec.resolved import Resolved

_ASKED = "model.optim.use_precision_aware_optimizer=true"
# Half of what lies between a number of the type and the next, divided by the number: two to minus this, at most.
_HALF_STEP = {MomentDtype.bf16: 8, MomentDtype.fp16: 11, MomentDtype.fp8: 4}
# Of which blocks of values share a scale.
_SCALED = (MomentDtype.fp16, MomentDtype.fp8)


def _moments(optim: OptimConfig) -> Iterator[str]:
    """Types that round away what an average is to lose in a step: it would grow with the gradients and never fall."""
    never_falls = "rounded to the nearest in each step, it grows with the gradients and never falls again"
    dtypes = {"exp_avg_dtype": optim.exp_avg_dtype, "exp_avg_sq_dtype": optim.exp_avg_sq_dtype}
    if dtypes["exp_avg_sq_dtype"] is MomentDtype.fp8:
        yield (
            "model.optim.exp_avg_sq_dtype=fp8: E4M3 has 4 bits, too few for a second moment with the betas that are "
            f"usual: {never_falls}; use fp16, bf16 or fp32"
        )
        del dtypes["exp_avg_sq_dtype"]
    # How many betas there are, and in which range, is another rule's.
    for (name, dtype), beta in zip(dtypes.items(), optim.betas, strict=False):
        bits = _HALF_STEP.get(dtype)
        if bits is None or 1 - beta >= 2.0**-bits:
            continue
        wider = [other.name for other, more in _HALF_STEP.items() if more > bits and 1 - beta >= 2.0**-more]
        yield (
            f"model.optim.{name}={dtype.name} with a beta of {beta:g} (model.optim.betas): the {1 - beta:.2g} that a "
            f"step takes of the average is less than half of what lies between two numbers of {dtype.name}, up to "
            f"2^-{bits}; {never_falls}; use {', '.join([*wider, 'fp32'])}, or a beta of at most {1 - 2.0**-bits}"
        )


def _untried(run: Resolved) -> Iterator[str]:
    """What no test has shown to train."""
    model, optim = run.model, run.model.optim
    feature = "fp8_params with use_precision_aware_optimizer"
    if run.fp8 is not None and run.fp8.params and (why := run.fp8.recipe.why_not(feature)) is not None:
        yield (
            f"{_ASKED} with model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}: {why}; "
            f"use fp8={' or '.join(recipes_for('fp8_params', feature))}, or fp8_params=false"
        )
    by_place = {
        "main_params_dtype": optim.main_params_dtype is MainParamsDtype.fp16,
        "exp_avg_dtype": optim.exp_avg_dtype in _SCALED,
        "exp_avg_sq_dtype": optim.exp_avg_sq_dtype in _SCALED,
    }
    if model.share_embeddings_and_output_weights and model.pipeline_model_parallel_size > 1:
        # The two stages cut their buffers at other places.
        for name in (name for name, is_so in by_place.items() if is_so):
            yield (
                f"model.optim.{name}={getattr(optim, name).name} with model.share_embeddings_and_output_weights=true "
                f"and model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}: it rounds by the place "
                "in a rank's part, and the copies on the first and the last stage would part; use "
                f"{'fp32' if name == 'main_params_dtype' else 'bf16 or fp32'}, or one stage"
            )


def optimizer_memory(run: Resolved) -> Iterator[str]:
    """What the precision-aware optimizer needs, and types that are ignored without it."""
    config, model, optim = run.config, run.model, run.model.optim
    if not optim.use_precision_aware_optimizer:
        return
    if not OPTIMIZERS[optim.name].has_small_states:
        names = " or ".join(names_with("has_small_states"))
        yield f"{_ASKED} is a form of {names}, and model.optim.name={optim.name.name}; use {names}, or false"
    if not uses_distributed_optimizer(model):
        yield (
            f"{_ASKED} is a form of the distributed optimizer, and model.use_distributed_optimizer="
            f"{'null comes to false' if model.use_distributed_optimizer is None else 'false'}; "
            "use use_distributed_optimizer=true (on one GPU, too), or use_precision_aware_optimizer=false"
        )
    if config.trainer.precision is Precision.fp32:
        yield (
            f"{_ASKED} is for weights in BF16 or FP8 with masters beside them, and trainer.precision=fp32 has no "
            "masters; use bf16, or false"
        )
    yield from _moments(optim)
    yield from _untried(run)
