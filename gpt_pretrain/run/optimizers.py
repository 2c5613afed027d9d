"""The optimizers: one record each, read by the rules, the translation and the plan.

A new optimizer is a member of `config.choices.OptimizerName`, a record here, `conf/optimizer/NAME.yaml`, and its
construction in `megatron.optimizer`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.config.errors import one_of
from gpt_pretrain.config.schema import OptimConfig
from gpt_pretrain.extend.optimizers import OwnOptimizer
from gpt_pretrain.extend.registry import registered_choice

# Values of whole matrices that Muon orthogonalizes at once on a rank, unless one matrix has more.
MUON_VALUES_AT_ONCE = 2**26


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
    matrix_state_bytes: float | None = None
    """The same for the layers' matrices, if it differs."""
    moved_bytes: int
    """Bytes read and written per parameter and step: gradient, master, states and the BF16 weight."""
    needs_whole_matrices: bool = False
    """It cannot update a part of a matrix by itself."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Keys of `model.optim` that it ignores, with the reasons."""


_BUILT_IN: Mapping[OptimizerName, Optimizer] = {
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
    OptimizerName.muon: Optimizer(
        # It takes Adam's place (`megatron.optimizer`).
        core_name="adam",
        class_name="Muon",
        decoupled_weight_decay=True,
        has_distributed_form=True,
        has_small_states=False,
        state_bytes=lambda _: 8,
        matrix_state_bytes=4,
        moved_bytes=34,
        unread={"momentum": "model.optim.name=muon, whose momentum is model.optim.muon_momentum"},
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


class _Optimizers(dict[OptimizerName, Optimizer]):
    """The program's own; others are looked up among the registered ones."""

    def __missing__(self, name: OptimizerName) -> Optimizer:
        registered = registered_choice("optimizer", name)
        assert registered is not None, "a name is a record's here or a registered one"
        own: OwnOptimizer = registered.value
        states = [state for state in own.states if state != "step"]
        unread = [key for key in ("betas", "eps", "momentum") if key not in own.reads]
        return Optimizer(
            # It takes Adam's place (`megatron.optimizer`).
            core_name="adam",
            class_name="SkippingOptimizer",
            decoupled_weight_decay=True,
            has_distributed_form=own.elementwise,
            needs_whole_matrices=not own.elementwise,
            has_small_states=False,
            state_bytes=lambda _: 4 * len(states),
            # As Adam's, and what an update copies to be able to skip: `SkippingOptimizer`.
            moved_bytes=18 + 8 * len(states) + 28 * (1 + len(states)),
            unread=dict.fromkeys(unread, f"model.optim.name={name.name}, which does not read it"),
        )


OPTIMIZERS: Mapping[OptimizerName, Optimizer] = _Optimizers(_BUILT_IN)


def names_with(column: str) -> str:
    """Names of the optimizers whose field `column` is true, as messages offer them."""
    return one_of([name.name for name, optimizer in OPTIMIZERS.items() if getattr(optimizer, column)])
