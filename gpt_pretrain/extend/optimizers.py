"""`extend.optimizer`: a name for `model.optim.name`, and what rules, plan and translation read of every optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config, OptimConfig
from gpt_pretrain.extend.registry import registering

if TYPE_CHECKING:
    import torch

# Keys of `model.optim` that an optimizer may or may not read; all read the others.
_OPTIM_KEYS = ("betas", "eps", "momentum")

type BuildOptimizer = Callable[[list[dict[str, Any]], Config], "torch.optim.Optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """An optimizer's properties."""

    core_name: str = "adam"
    """`OptimizerConfig.optimizer`: what megatron-core builds."""
    class_name: str
    """The class that it must have built; another is an error. With small states it is `PrecisionAwareAdam`."""
    decoupled_weight_decay: bool = True
    """Weights shrink by themselves, not through their gradients (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    has_distributed_form: bool
    """megatron-core can shard its states over the data-parallel ranks."""
    has_small_states: bool = False
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
    build: BuildOptimizer | None = None
    """What builds it in Adam's place; None: `megatron.optimizer` does."""
    states: tuple[str, ...] = ()
    """If `build` does: names of its tensors in `optimizer.state[parameter]`."""


def optimizer(
    name: str, *, states: Sequence[str], elementwise: bool, reads: Sequence[str] = ()
) -> Callable[[BuildOptimizer], BuildOptimizer]:
    """Registers a function that builds a `torch.optim.Optimizer`, as a decorator; `model.optim.name=NAME` chooses it.

    The function gets torch's parameter groups and the whole configuration. Parameters and gradients are fp32; the
    schedule sets each group's "lr" and "weight_decay" before every step. Before the run builds its model, the optimizer
    makes trial steps on a small matrix, and is refused if what is said here does not hold.

    The optimizer need not know about skipped updates: its `step` is called for one parameter at a time, and where the
    loss, a gradient or an FP8 tensor was not finite, the parameter and its states keep their values, without a wait for
    the device. For that time, a copy of them takes memory.

    Args:
        name: What `model.optim.name` takes.
        states: Its tensors in `optimizer.state[parameter]`, of the parameter's shape, fp32, zero at first. They are
            counted in the plan and saved in checkpoints. "step", if named, is a single number instead.
        elementwise: Whether a value's update depends on this value, its gradients and states alone. Others need whole
            matrices and cannot train with a distributed optimizer or tensor parallelism, which cut them.
        reads: Which of `model.optim.betas`, `eps` and `momentum` it reads; the others are refused on the command line.
    """
    if wrong := [key for key in reads if key not in _OPTIM_KEYS]:
        raise UserError(f"optimizer {name!r}: reads={wrong} is none of {', '.join(_OPTIM_KEYS)}")

    num_tensors = len([state for state in states if state != "step"])
    unread = [key for key in _OPTIM_KEYS if key not in reads]

    def described(build: BuildOptimizer) -> Optimizer:
        return Optimizer(
            class_name="SkippingOptimizer",
            has_distributed_form=elementwise,
            needs_whole_matrices=not elementwise,
            state_bytes=lambda _: 4 * num_tensors,
            # As Adam's, and what an update copies to be able to skip.
            moved_bytes=18 + 8 * num_tensors + 28 * (1 + num_tensors),
            unread=dict.fromkeys(unread, f"model.optim.name={name}, which does not read it"),
            build=build,
            states=tuple(states),
        )

    return registering("optimizer", name, "params, config", builtin=OptimizerName, value_of=described)
