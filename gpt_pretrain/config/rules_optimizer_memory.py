"""Cross-field rules about the types that Adam keeps masters and moments in."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import MainParamsDtype, MomentDtype, OptimizerName, Precision
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import Config

_ASKED = "model.optim.use_precision_aware_optimizer=true"


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
