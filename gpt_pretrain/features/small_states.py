"""`model.optim.use_precision_aware_optimizer`: masters and moments in few bytes (`megatron.precision_aware`)."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import MainParamsDtype, MomentDtype, Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.errors import refusal, show
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.config.schema import ModelConfig, OptimConfig
from gpt_pretrain.features.feature import Feature, Resolved, RunSpec
from gpt_pretrain.kernels import SCALED_BLOCK
from gpt_pretrain.run.optimizers import names_with, optimizer_of

# Half of the relative gap between neighboring numbers of a type is at most two to the minus this.
_HALF_STEP = {MomentDtype.bf16: 8, MomentDtype.fp16: 11, MomentDtype.fp8: 4}
# Types whose blocks of values share a scale.
_SCALED = (MomentDtype.fp16, MomentDtype.fp8)
# Bytes of a parameter's moment; scaled types have one fp32 scale per block.
_MOMENT_BYTES = {
    MomentDtype.fp32: 4.0,
    MomentDtype.bf16: 2.0,
    MomentDtype.fp16: 2 + 4 / SCALED_BLOCK,
    MomentDtype.fp8: 1 + 4 / SCALED_BLOCK,
}
_SAVED_BYTES = {MomentDtype.fp32: 4, MomentDtype.bf16: 2, MomentDtype.fp16: 4, MomentDtype.fp8: 2}


class SmallStates(Feature):
    """Optimizer states in few bytes."""

    key = "optim.use_precision_aware_optimizer"
    off = "model.optim.use_precision_aware_optimizer=false"

    @override
    def problems(self, run: Resolved, *, sizes_known: bool) -> Iterator[str]:
        model, optim, off = run.model, run.model.optim, self.off
        setting = self.setting(model)
        if not optimizer_of(optim.name).has_small_states:
            names, asked = names_with("has_small_states"), f"model.optim.name={optim.name.name}"
            yield refusal(setting, asked, f"it is a form of {names}", f"model.optim.name={names}")
        if not uses_distributed_optimizer(model):
            why = "it is a form of the distributed optimizer"
            if model.use_distributed_optimizer is None:
                why += ", which null leaves out here"
            sharded = f"model.use_distributed_optimizer={show(model.use_distributed_optimizer)}"
            yield refusal(setting, sharded, why, "model.use_distributed_optimizer=true (on one GPU, too)", off)
        if run.config.trainer.precision is Precision.fp32:
            why = "it needs weights in BF16 or FP8 with masters beside them"
            yield refusal(setting, "trainer.precision=fp32", why, "trainer.precision=bf16", off)
        if optim.ema_decay is not None:
            asked = f"model.optim.ema_decay={optim.ema_decay:g}"
            why = "the average takes fp32 masters, and here they may be stored in pieces or rounded"
            yield refusal(setting, asked, why, "model.optim.ema_decay=null", off)
        yield from _moments(optim)
        use = Use.fp8_params_and_precision_aware_optimizer
        if run.fp8 is not None and run.fp8.params and (why_not := run.fp8.recipe.why_not(use)) is not None:
            fp8 = f"model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}"
            yield refusal(setting, fp8, why_not, f"fp8={recipes_for(Use.fp8_params, use)}", off)
        if model.share_embeddings_and_output_weights and model.pipeline_model_parallel_size > 1:
            yield from _copies_of_embeddings(model)

    @override
    def problems_here(self, spec: RunSpec) -> Iterator[str]:
        platform, optim = spec.platform, spec.model.optim
        if optim.exp_avg_dtype is MomentDtype.fp8 and platform.cuda and not platform.has_fp8:
            # Triton reads and writes E4M3 only there.
            e4m3 = "a GPU with E4M3 (compute capability 8.9 or newer)"
            yield f"model.optim.exp_avg_dtype=fp8 needs {e4m3}: this is {platform.gpu}; use fp16, bf16 or fp32"


def _moments(optim: OptimConfig) -> Iterator[str]:
    """Types too coarse for one step's decay of a moving average, which would grow with the gradients and never fall."""
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


def _copies_of_embeddings(model: ModelConfig) -> Iterator[str]:
    """Types that round, where the first and the last stage each update a copy of the embedding."""
    shared = (
        "model.share_embeddings_and_output_weights=true and "
        f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}"
    )
    # The two stages split their buffers at different places.
    why = "rounding depends on the place in a rank's part, and the copies on the first and last stage would diverge"
    for name, is_rounded, wider in (
        ("main_params_dtype", model.optim.main_params_dtype is MainParamsDtype.fp16, "fp32"),
        ("exp_avg_dtype", model.optim.exp_avg_dtype in _SCALED, "bf16 or fp32"),
        ("exp_avg_sq_dtype", model.optim.exp_avg_sq_dtype in _SCALED, "bf16 or fp32"),
    ):
        if is_rounded:
            asked = f"model.optim.{name}={getattr(model.optim, name).name}"
            yield refusal(asked, shared, why, wider, "model.pipeline_model_parallel_size=1")


def state_bytes(optim: OptimConfig, *, in_fp8: float) -> tuple[float, float]:
    """Bytes per parameter of its master and of its moments; `in_fp8` is the share of weights stored in FP8."""
    # A BF16 weight holds one half of its master.
    whole = 2 if optim.main_params_dtype is MainParamsDtype.fp16 else 4
    master = whole * in_fp8 + (2 if optim.store_param_remainders else whole) * (1 - in_fp8)
    return master, _MOMENT_BYTES[optim.exp_avg_dtype] + _MOMENT_BYTES[optim.exp_avg_sq_dtype]


def saved_bytes(optim: OptimConfig) -> tuple[float, float]:
    """The same in a checkpoint, which has the smallest plain types that hold them exactly (`kernels.adam`)."""
    master = 2.0 if optim.main_params_dtype is MainParamsDtype.fp16 else 4.0
    return master, _SAVED_BYTES[optim.exp_avg_dtype] + _SAVED_BYTES[optim.exp_avg_sq_dtype]


def describe_states(optim: OptimConfig) -> str:
    """The states in one line."""
    remainders = optim.store_param_remainders and optim.main_params_dtype is MainParamsDtype.fp32
    masters = optim.main_params_dtype.name + (" (only the 16 bits that BF16 weights lack)" if remainders else "")
    return f"masters {masters}, moments {optim.exp_avg_dtype.name} and {optim.exp_avg_sq_dtype.name}"
