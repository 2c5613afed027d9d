"""`extend.optimizer`: a name for `model.optim.name`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import registering

if TYPE_CHECKING:
    import torch

# Keys of `model.optim` that an optimizer may or may not read; all read the others.
_OPTIM_KEYS = ("betas", "eps", "momentum")

type BuildOptimizer = Callable[[list[dict[str, Any]], Config], "torch.optim.Optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOptimizer:
    """An optimizer that an extension has registered."""

    build: BuildOptimizer
    states: tuple[str, ...]
    reads: tuple[str, ...]
    elementwise: bool


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

    def own(build: BuildOptimizer) -> OwnOptimizer:
        return OwnOptimizer(build=build, states=tuple(states), reads=tuple(reads), elementwise=elementwise)

    return registering("optimizer", name, "params, config", builtin=OptimizerName, value_of=own)
