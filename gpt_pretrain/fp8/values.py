"""Whether the numbers of one training step are what the plan's FP8 makes of its tensors.

Labels are no evidence: a layer may say "E4M3, delayed" and round nothing. This looks at what the step left (codes,
scales, results, the state of delayed scaling) and computes each of them again from the tensors and the plan alone
(`fp8/cast_checks.py`, `fp8/replay.py`). docs/fp8.md, "The proof", says what is compared, how near it
must be, and what cannot be seen.

Each layer's three products are counted in every microbatch. One of each kind per type of layer is multiplied again, and
the output that these layers pass on must be that result. Ranks and steps take turns at microbatches, at layers, and at
parts of tensors that are large, so that a proof takes seconds and megabytes whatever the model.

Local layers tell the values of all that they cast. Those of Transformer Engine's layers are unknown where the kernel
that computes an activation casts it, and where ranks that split a sequence gather codes. A weight that is stored in FP8
has no other values (`proof.MasterCheck` compares it with its master).

Nothing here waits for the device before `differences`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.fp8.cast_checks import CAST_VALUES, CastChecks, Checks, Window, part
from gpt_pretrain.fp8.gemms import CODE_TYPES, Operand, Phase, Product, Role, multiply, role_format, role_name
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.fp8.replay import Replay, is_recomputed
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, FC2, PROJ, Linear

# By what factor rounding errors that are not independent may miss the sum of independent ones.
_COHERENCE = 8.0
# Of values with BF16's eight bits one in sixteen has no more than the four of E4M3; one in 32 no more than E5M2's.
_LEAST_ROUNDED = 0.5
# The dimension of each of a product's operands that it does not sum over.
_OWN_DIMENSION = {Phase.forward: (0, 0), Phase.dgrad: (0, 1), Phase.wgrad: (1, 1)}
# Of a result this many rows and columns are multiplied again.
_RESULT_SIDE = 1024


class WatchedValues:
    """Records one training step.

    `turn` says whose turn it is to be looked at: another number on each rank and at each step.
    """

    def __init__(
        self,
        settings: Fp8Settings,
        linears: Mapping[str, Linear],
        modules: Mapping[str, torch.nn.Module],
        *,
        num_microbatches: int,
        turn: int,
    ) -> None:
        self._settings = settings
        emulated = {name: modules[name] for name in linears if hasattr(modules.get(name), "product_listener")}
        own = {name: modules[name] for name in linears if name in modules and is_te_linear(modules[name])}
        # `WatchedProducts` reports other layers in their places.
        self._modules = {**emulated, **own}
        self._emulated = frozenset(emulated)
        self._num_microbatches = num_microbatches
        self._turn = turn
        self._microbatch = turn % num_microbatches
        kinds: dict[str, list[str]] = defaultdict(list)
        for name, linear in linears.items():
            kinds[linear.kind].append(name)
        self._repeated = {names[turn % len(names)] for names in kinds.values()}
        self._checks = Checks()
        self._casts = CastChecks(settings, self._checks, turn)
        self._results: dict[str, torch.Tensor] = {}
        self._counts: Counter[tuple[str, Phase]] = Counter()
        self._multiplied: set[tuple[str, Phase]] = set()
        # The parts of these layers' inputs from which their weight gradients are multiplied again.
        self._inputs: dict[str, torch.Tensor] = {}
        self._replay = (
            Replay(settings, self._modules, list(linears), num_microbatches) if settings.recipe.keeps_history else None
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the step; `note` is called with its products."""
        # Of these layers, tensor parallel ranks pass on the sum of their results; experts compute theirs one by one.
        summed = (PROJ, FC2) if parallel_state.get_tensor_model_parallel_world_size() > 1 else ()
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if name in self._repeated and not name.endswith((*summed, EXPERT_FC1, EXPERT_FC2)):
                    stack.callback(module.register_forward_hook(partial(self._check_output, name)).remove)
            yield
        self._results.clear()
        self._inputs.clear()

    def _check_output(self, name: str, module: torch.nn.Module, arguments: Any, returned: Any) -> None:
        # A second result is the bias, which the next layer adds.
        output = returned[0] if isinstance(returned, tuple) else returned
        result = self._results.pop(name, None)
        if result is not None:
            window = Window.of_size(result.shape, None, CAST_VALUES, self._turn)
            given, expected = window.of(output.detach().reshape(result.shape)), window.of(result)
            off = (given != expected).sum()
            planned, live = "{0:,.0f} values of the product", "{1:,.0f} others"
            self._checks.add(name, "output", off, expected.numel(), off, planned=planned, live=live)

    def asks_result(self, module: str, phase: Phase) -> bool:
        """Whether the next product of a layer is to be told of with its result."""
        is_turn = self._counts[module, phase] == self._microbatch and not is_recomputed(phase)
        return is_turn and module in self._repeated and module in self._modules

    def note_idle(self, module: str, phase: Phase) -> None:
        """Records a grouped product that is called for no rows."""
        if self.asks_result(module, phase):
            self._multiplied.add((module, phase))
        self._counts[module, phase] += 1

    @torch.no_grad()
    def note(self, module: str, product: Product) -> None:
        """Records a product that has been computed."""
        if module not in self._modules:
            return
        phase = product.phase
        is_first_pass = not is_recomputed(phase)
        self._counts[module, phase] += is_first_pass and product.part == 0
        is_turn = is_first_pass and self._counts[module, phase] - 1 == self._microbatch
        # Operands in other formats, which `WatchedProducts` reports, have no codes.
        operands = [operand for operand in product.operands if operand.codes is not None]
        are_whole = [self._check_cast(module, phase, operand, is_turn=is_turn) for operand in operands]
        if product.output is None or module not in self._repeated:
            return
        if phase is Phase.forward:
            self._results[module] = product.output.detach()
        if is_turn and len(operands) == 2 and all(are_whole):
            self._keep_input(module, product)
            self._multiply(module, product, product.output)
        elif is_turn and not operands and not self._settings.wgrad and phase is Phase.wgrad:
            self._multiply_values(module, product, product.output)

    def _keep_input(self, module: str, product: Product) -> None:
        values = product.operands[0].values
        if product.phase is Phase.forward and values is not None:
            columns = part(values.shape[1], _RESULT_SIDE, self._turn)
            self._inputs[module] = values[:, slice(*columns)].clone()

    def _check_cast(self, module: str, phase: Phase, operand: Operand, *, is_turn: bool) -> bool:
        """Checks an operand's codes, scale and amax; whether they have the shapes to go on with."""
        role, codes, values, scale = operand.role, operand.codes, operand.values, operand.scale
        assert codes is not None
        what, format = f"codes of the {role_name(role)} in {phase.value}", role_format(self._settings, role)
        if codes.dtype is not CODE_TYPES[format]:
            self._checks.add_fault(module, what, format, str(codes.dtype).removeprefix("torch."))
            return False
        is_stored = role is Role.weight and self._settings.params
        unknown = values is None and module in self._emulated and not is_stored
        if unknown or scale is None or (values is not None and values.shape != codes.shape):
            planned = "none reported" if values is None else str(list(values.shape))
            self._checks.add_fault(module, what, f"of {planned} values", str(list(codes.shape)))
            return False
        block = self._casts.block(phase, operand)
        rows, columns = codes.shape
        planned_shape = [1] if block is None else [-(-rows // block[0]), -(-columns // block[1])]
        if list(scale.shape) != planned_shape:
            shape = f"scales of the {role_name(role)} in {phase.value}"
            self._checks.add_fault(module, shape, str(planned_shape), str(list(scale.shape)))
            return False
        # Local layers tell the amax that the optimizer has cast a weight with; TE does not.
        has_amax = not is_stored or module in self._emulated
        amax = self._casts.amax(phase, operand) if has_amax else None
        if self._replay is not None and is_stored:
            self._replay.note_stored(module, scale)
        elif self._replay is not None:
            self._replay.note((module, role), phase, amax, scale)
        if is_turn and values is not None:
            self._casts.check_values(module, phase, operand)
        elif is_turn:
            self._casts.check_codes_alone(module, phase, operand, amax)
        return True

    def _multiply_values(self, module: str, product: Product, output: torch.Tensor) -> None:
        """Computes a part of a weight gradient outside of FP8 again, from the input of the forward pass."""
        gradient, given = (operand.values for operand in product.operands)
        columns = part(output.shape[1], _RESULT_SIDE, self._turn)
        if gradient is None or given is None or module not in self._inputs:
            return
        self._multiplied.add((module, product.phase))
        inputs = self._inputs[module].to(given.dtype)
        again = multiply(product.phase, gradient.float(), inputs.float())
        found = output[:, slice(*columns)].float()
        away, what = (found - again).norm() / found.norm(), f"result of {product.phase.value}"
        planned, tolerance = "within {0:.3g} of the product of its values", product.result_error
        self._checks.add(module, what, away > tolerance, tolerance, away, planned=planned, live="{1:.3g} away")

    def _multiply(self, module: str, product: Product, output: torch.Tensor) -> None:
        """Computes a part of a product again, from the codes and from the values that were rounded."""
        phase = product.phase
        self._multiplied.add((module, phase))
        rows, columns = (part(size, _RESULT_SIDE, self._turn) for size in output.shape)
        exact, rounded = [], []
        for operand, side, own in zip(product.operands, (rows, columns), _OWN_DIMENSION[phase], strict=True):
            assert operand.codes is not None
            assert operand.scale is not None
            whole = (0, operand.codes.shape[1 - own])
            window = Window(side, whole) if own == 0 else Window(whole, side)
            factors = window.factors(operand.scale, self._casts.block(phase, operand))
            rounded.append(window.of(operand.codes).float() / factors)
            if operand.values is not None:
                values = window.of(operand.values)
            elif phase is Phase.wgrad and operand.role is Role.input and module in self._inputs:
                values = self._inputs[module]
            else:
                continue
            exact.append(values.float())
            changed = ((exact[-1] != rounded[-1]).sum() / (exact[-1] != 0).sum()).nan_to_num(nan=1.0)
            what, planned = f"{role_name(operand.role)} in {phase.value}", "rounding changes {0:.0%} of the values"
            too_few = changed < _LEAST_ROUNDED
            self._checks.add(module, what, too_few, _LEAST_ROUNDED, changed, planned=planned, live="{1:.1%}")
        again = multiply(phase, *rounded)
        result = output[slice(*rows), slice(*columns)].float()
        found = result
        if product.added is not None:
            added = product.added[..., slice(*columns)]
            found = result - (added if added.dim() == 1 else added[slice(*rows)]).float()
        # What was added to the product has been rounded with it. A result of zeros has no size of its own.
        size = torch.maximum((found if output.dtype is torch.float32 else result).norm(), again.norm())
        lost = product.sum_error * multiply(phase, *map(torch.abs, rounded)).norm() / size
        tolerance = product.result_error + lost
        away = (found - again).norm() / size
        what, live = f"result of {phase.value}", "{1:.3g} away"
        planned = "within {0:.3g} of the product of its codes"
        self._checks.add(module, what, away > tolerance, tolerance, away, planned=planned, live=live)
        if len(exact) < 2:
            return
        explained = _rounding_error(phase, exact, rounded)
        distance, blur = (found - multiply(phase, *exact)).norm(), tolerance * size
        too_near = (distance < explained / _COHERENCE) & (explained / _COHERENCE > blur)
        too_far = distance > explained * _COHERENCE + blur
        planned = "{0:.3g} away from the product without rounding"
        self._checks.add(
            module, what, too_near | too_far, explained / size, distance / size, planned=planned, live=live
        )

    @torch.no_grad()
    def differences(self, group: torch.distributed.ProcessGroup) -> list[Difference]:
        """All that is not as planned, on every rank of the amax reduction group together; waits for the device."""
        found = [*self._uncomputed(), *self._checks.differences()]
        faulty = {difference.module for difference in found}
        found += [each for each in self._unmultiplied() if each.module not in faulty]
        return found if self._replay is None else [*found, *self._replay.differences(group)]

    def _uncomputed(self) -> Iterator[Difference]:
        for name in self._modules:
            for phase in Phase:
                count, planned = self._counts[name, phase], self._num_microbatches
                # `WatchedProducts` reports products that never ran.
                if 0 < count < planned:
                    what = f"{phase.value} products"
                    yield Difference(module=name, what=what, planned=f"{planned} or more", live=str(count))

    def _unmultiplied(self) -> Iterator[Difference]:
        for name in sorted(self._repeated & self._modules.keys()):
            for phase in Phase:
                if self._counts[name, phase] and (name, phase) not in self._multiplied:
                    yield Difference(module=name, what=f"result of {phase.value}", planned="reported", live="none")


def _rounding_error(phase: Phase, exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of what the operands' rounding errors do to their product, as if independent of one another; fp64 [].

    For c = Σ aₖ·bₖ the mean of ‖δc‖² is Σ ‖δaₖ‖²·‖bₖ‖² + ‖aₖ‖²·‖δbₖ‖² + ‖δaₖ‖²·‖δbₖ‖² over all rows and columns.
    """
    own = _OWN_DIMENSION[phase]
    sizes = [values.double().square().sum(dim) for values, dim in zip(exact, own, strict=True)]
    errors = [
        (values.double() - codes.double()).square().sum(dim)
        for values, codes, dim in zip(exact, rounded, own, strict=True)
    ]
    return (errors[0] * sizes[1] + sizes[0] * errors[1] + errors[0] * errors[1]).sum().sqrt()
