"""Cross-field rules about the types that Adam keeps masters and moments in."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Fp8RecipeName, MainParamsDtype, MomentDtype, OptimizerName, Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import Config, ModelConfig, OptimConfig

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


def _untried(model: ModelConfig) -> Iterator[str]:
    """What no test has shown to train."""
    optim = model.optim
    if model.fp8_params and model.fp8_recipe is Fp8RecipeName.blockwise:
        yield (
            f"{_ASKED} with model.fp8_params=true and model.fp8_recipe=blockwise: nobody has shown that weights in "
            "blocks are cast from its masters; use fp8=tensorwise or delayed, or fp8_params=false"
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


def optimizer_memory(config: Config) -> Iterator[str]:
    """What the precision-aware optimizer needs, and types that are ignored without it."""
    model, optim = config.model, config.model.optim
    if not optim.use_precision_aware_optimizer:
        types = {
            "main_params_dtype": (optim.main_params_dtype, MainParamsDtype.fp32),
            "exp_avg_dtype": (optim.exp_avg_dtype, MomentDtype.fp32),
            "exp_avg_sq_dtype": (optim.exp_avg_sq_dtype, MomentDtype.fp32),
        }
        for name, (value, usual) in types.items():
            if value is not usual:
                yield (
                    f"model.optim.{name}={value.name} has no effect with model.optim.use_precision_aware_optimizer="
                    f"false; use true, or {name}=fp32"
                )
        return
    if optim.name is not OptimizerName.adam:
        yield f"{_ASKED} is a form of Adam, and model.optim.name={optim.name.name}; use adam, or false"
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
    yield from _untried(model)
