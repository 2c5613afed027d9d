"""The optimizers: one record each, read by the rules, the translation and the plan.

A new optimizer is a member of `config.choices.OptimizerName`, a record here, `conf/optimizer/NAME.yaml`, and its
construction in `megatron.optimizer`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpt_pretrain.config.choices import MomentDtype, OptimizerName
from gpt_pretrain.config.errors import one_of
from gpt_pretrain.config.schema import OptimConfig
from gpt_pretrain.kernels import SCALED_BLOCK

# Bytes of a parameter's moment; scaled types have one fp32 scale per block.
MOMENT_BYTES = {
    MomentDtype.fp32: 4.0,
    MomentDtype.bf16: 2.0,
    MomentDtype.fp16: 2 + 4 / SCALED_BLOCK,
    MomentDtype.fp8: 1 + 4 / SCALED_BLOCK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """An optimizer's properties."""

    core_name: str
    """`OptimizerConfig.optimizer`: what megatron-core builds."""
    class_name: str
    """The class that it must have built; another is an error. With small states it is `PrecisionAwareAdam`."""
    decoupled_weight_decay: bool
    """Weights shrink by themselves, not through their gradients (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    has_distributed_form: bool
    """megatron-core can shard its states over the data-parallel ranks."""
    has_small_states: bool
    """It can keep masters and moments in fewer bytes (`use_precision_aware_optimizer`)."""
    state_bytes: Callable[[OptimConfig], float]
    """Bytes of fp32 states per parameter, without masters."""
    moved_bytes: int
    """Bytes read and written per parameter and step: gradient, master, states and the BF16 weight."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Keys of `model.optim` that it ignores, with the reasons."""


OPTIMIZERS: Mapping[OptimizerName, Optimizer] = {
    OptimizerName.adam: Optimizer(
        core_name="adam",
        class_name="AdamW",
        decoupled_weight_decay=True,
        has_distributed_form=True,
        has_small_states=True,
        state_bytes=lambda _: 8,
        # The norm reads the gradient (4); the update reads gradient, master and two moments (16) and writes the last
        # three and the weight (14).
        moved_bytes=34,
        unread={"momentum": "model.optim.name=adam, whose momentum is the first of model.optim.betas"},
    ),
    OptimizerName.sgd: Optimizer(
        core_name="sgd",
        class_name="SGD",
        decoupled_weight_decay=False,
        has_distributed_form=False,
        has_small_states=False,
        state_bytes=lambda optim: 4 if optim.momentum > 0 else 0,
        moved_bytes=26,
        unread=dict.fromkeys(("betas", "eps"), "model.optim.name=sgd: it is Adam's"),
    ),
}


def names_with(column: str) -> str:
    """Names of the optimizers whose field `column` is true, as messages offer them."""
    return one_of([name.name for name, optimizer in OPTIMIZERS.items() if getattr(optimizer, column)])
