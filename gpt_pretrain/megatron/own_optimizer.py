"""Optimizers registered with what builds them: any `torch.optim.Optimizer`, made to skip updates on the device.

`check_own_optimizer` tries one on a small matrix before a run builds its model, and refuses it if its registration does
not say how it behaves: wrong states would be missing in the plan and in checkpoints.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import Registered, check_call, registered_choice

type Cut = Callable[[torch.Tensor], Sequence[torch.Tensor]]

# How a distributed optimizer and tensor parallelism cut matrices.
_CUTS: dict[str, Cut] = {
    "as a flat range": lambda matrix: matrix.flatten().chunk(2),
    "by rows": lambda matrix: matrix.chunk(2),
    "by columns": lambda matrix: matrix.chunk(2, dim=1),
}
_VALUES = ""


class SkippingOptimizer(torch.optim.Optimizer):
    """Steps another optimizer one parameter at a time, and takes a step back on the device if `found_inf` is not zero.

    A parameter's values and states are copied before its step. The host does not learn which ones stay.
    """

    found_inf: torch.Tensor

    def __init__(self, inner: torch.optim.Optimizer, state_names: Sequence[str], registered: Registered) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.state_names = state_names
        self._inner, self._registered = inner, registered

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters with gradients."""
        assert closure is None, "megatron-core computes the gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        states = self.state[parameter]
        before = parameter.clone(), {name: states[name].clone() for name in self.state_names}
        self._inner.param_groups, self._inner.state = [{**group, "params": [parameter]}], self.state
        with self._registered.named("step"):
            self._inner.step()
        skips = self.found_inf > 0
        parameter.copy_(torch.where(skips, before[0], parameter))
        for name, value in before[1].items():
            states[name].copy_(torch.where(skips, value, states[name]))


def build_own(registered: Registered, config: Config, params: list[dict[str, Any]]) -> SkippingOptimizer:
    """Builds a registered optimizer for torch's parameter groups."""
    with registered.named("build"):
        inner = registered.value.build(params, config)
        if not isinstance(inner, torch.optim.Optimizer):
            raise UserError(f"it returned {type(inner).__name__}, which is no torch.optim.Optimizer")
    check_call("optimizer", registered.name, inner.step, "", written="step(self, closure=None)")
    return SkippingOptimizer(inner, registered.value.states, registered)


def check_own_optimizer(config: Config) -> None:
    """Tries the run's optimizer on a small matrix, if it was registered with what builds it.

    Raises:
        UserError: It does not behave as registered.
    """
    registered = registered_choice("optimizer", config.model.optim.name)
    if registered is None or registered.value.build is None:
        return
    alone, fresh = _trial(registered, config)
    before = fresh.detach().clone()
    group = alone._inner.param_groups[0]
    settings = {name: value for name, value in group.items() if name != "params"}
    with registered.named("step"):
        alone._inner.step()
    problem = _state_problem(registered, fresh, dict(alone._inner.state[fresh]))
    if {name: value for name, value in group.items() if name != "params"} != settings:
        problem = "it changes its parameter groups in a step, which checkpoints and skipped updates do not cover"
    if problem is None and torch.equal(fresh, before):
        problem = "its step leaves a parameter as it is"
    if problem is None:
        stepped, zeroed = _trial(registered, config)
        _zero_states(stepped)
        stepped.step()
        if not torch.equal(fresh, zeroed):
            problem = "its first step is another one from states of zeros, which is how a run makes them"
    if problem is None and not _steps_are_those_of_a_resume(registered, config):
        problem = (
            "made anew, with the states that checkpoints keep, its second step is another one: it keeps something "
            "outside of optimizer.state, such as a counter in an attribute; keep that in a state, which `states` names"
        )
    if problem is None and registered.value.has_distributed_form:
        problem = _elementwise_problem(registered, config)
    if problem is None:
        halved, changed = _trial(registered, config)
        halved._inner.param_groups[0]["lr"] = group["lr"] / 2
        halved._inner.step()
        if torch.equal(fresh, changed):
            problem = (
                "its step is the same with half the learning rate; read it from each parameter group, group['lr'], "
                "where the schedule writes it"
            )
    if problem is not None:
        raise UserError(f"{registered}: {problem}")


def _trial(registered: Registered, config: Config) -> tuple[SkippingOptimizer, torch.nn.Parameter]:
    """The optimizer of a matrix with gradients, on the run's device."""
    parameter = torch.nn.Parameter(_numbers(0.5, 1))
    parameter.grad = _numbers(-1, 2)
    return build_own(registered, config, [{"params": [parameter]}]), parameter


def _numbers(first: float, last: float) -> torch.Tensor:
    """A matrix of [8, 16]: its halves fill vector registers too, so that cutting does not change how values round."""
    return torch.linspace(first, last, 128, device=torch.cuda.current_device()).view(8, 16)


def _zero_states(optimizer: SkippingOptimizer) -> None:
    """States as a run makes them, and nothing that skips a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in optimizer.state_names:
                shape = () if name == "step" else parameter.shape
                optimizer.state[parameter][name] = parameter.new_zeros(shape)
            optimizer.found_inf = parameter.new_zeros(())


def _elementwise_problem(registered: Registered, config: Config) -> str | None:
    """Why its matrices cannot be cut: two steps of the halves are other ones than those of the whole, in some bit."""
    (whole,) = _two_steps(registered, config, lambda matrix: [matrix])
    for how, cut in _CUTS.items():
        halves = _two_steps(registered, config, cut)
        for number, half in enumerate(halves):
            for name, value in half.items():
                expected = whole[name] if name == "step" else cut(whole[name])[number]
                if not torch.equal(value, expected):
                    what = "values" if name == _VALUES else f"state {name!r}"
                    return (
                        f"elementwise=True was registered, and of a matrix that is cut in two {how} it computes other "
                        f"{what} than of the whole matrix; register elementwise=False, with which a distributed "
                        "optimizer and tensor parallelism, which cut matrices, are refused"
                    )
    return None


def _steps_are_those_of_a_resume(registered: Registered, config: Config) -> bool:
    """Whether two steps are the same if a new object takes the second one."""
    (uncut,), (resumed,) = (
        _two_steps(registered, config, lambda matrix: [matrix], anew=anew) for anew in (False, True)
    )
    return all(torch.equal(uncut[name], resumed[name]) for name in uncut)


def _two_steps(
    registered: Registered, config: Config, cut: Cut, *, anew: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Values and states of the parts of a matrix after two steps; `anew`, a new object takes the second one."""
    parameters = [torch.nn.Parameter(part.clone()) for part in cut(_numbers(0.5, 1))]
    optimizer = build_own(registered, config, [{"params": parameters}])
    _zero_states(optimizer)
    for number, gradient in enumerate((_numbers(-1, 2), _numbers(-3, 0.5).flip(0, 1))):
        if anew and number:
            states, found_inf = optimizer.state, optimizer.found_inf
            optimizer = build_own(registered, config, [{"params": parameters}])
            optimizer.state, optimizer.found_inf = states, found_inf
        for parameter, part in zip(parameters, cut(gradient), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return [{_VALUES: parameter.detach(), **optimizer.state[parameter]} for parameter in parameters]


def _state_problem(registered: Registered, parameter: torch.Tensor, found: dict[str, Any]) -> str | None:
    declared = registered.value.states
    if set(found) != set(declared):
        names = ", ".join(sorted(found)) or "none"
        return f"after a step it has the states {names}, and states={list(declared)} was registered"
    for name, value in found.items():
        shape = torch.Size() if name == "step" else parameter.shape
        if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype is not torch.float32:
            kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            return f"its state {name!r} is {kind}, and a run keeps fp32 tensors {list(shape)}"
    return None
