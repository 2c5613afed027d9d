"""Whether the numbers of one training step are what the plan's FP8 makes of its tensors.

Labels are no evidence: a layer may say "E4M3, delayed" and round nothing. So the codes, scales and results of the step
and the state of delayed scaling are computed again from the tensors and the plan alone (`fp8/cast_checks.py`,
`fp8/state_checks.py`). docs/fp8.md, "The proof", says what is compared, how near it must be, and what cannot be seen.

Each layer's three products are counted in every microbatch. Each product of one layer per kind is multiplied again, and
the output that this layer passes on must be that result. Ranks and steps take turns at microbatches, layers, and parts
of large tensors, so that a proof takes seconds and megabytes whatever the model.

The values that a cast rounded are known in local layers. In Transformer Engine's layers they are unknown if the kernel
of an activation casts it, or if ranks that split a sequence gather codes. A weight stored in FP8 has no other values.

Nothing here waits for the device before `differences`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.fp8.cast_checks import Checks, Window, part
from gpt_pretrain.fp8.gemms import CODE_TYPES, Fp8Operand, Phase, Product, Role, multiply, role_format, role_name
from gpt_pretrain.fp8.local_layers import Fp8Linear
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.fp8.state_checks import Replay, is_recomputed
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, FC2, PROJ, Linear

# The factor by which rounding errors that are not independent may miss the sum of independent ones.
_COHERENCE = 8.0
# The least share of values that rounding changes. One in sixteen of BF16's values fits E4M3, one in 32 E5M2.
_LEAST_ROUNDED = 0.5
# The dimension of each operand that the product does not sum over.
_OWN_DIMENSION = {Phase.forward: (0, 0), Phase.dgrad: (0, 1), Phase.wgrad: (1, 1)}
# Rows and columns of a result that are multiplied again.
_RESULT_SIDE = 1024


class WatchedValues:
    """Records one training step.

    `turn` selects what is looked at: another number on each rank and at each step.
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
        # `WatchedProducts` reports layers of other kinds.
        held = {name: modules[name] for name in linears if name in modules}
        self._modules = {name: each for name, each in held.items() if isinstance(each, Fp8Linear) or is_te_linear(each)}
        self._num_microbatches = num_microbatches
        self._turn = turn
        self._microbatch = turn % num_microbatches
        kinds: dict[str, list[str]] = defaultdict(list)
        for name, linear in linears.items():
            kinds[linear.kind].append(name)
        self._repeated = {names[turn % len(names)] for names in kinds.values()}
        self._checks = Checks(settings, turn)
        self._results: dict[str, torch.Tensor] = {}
        self._counts: Counter[tuple[str, Phase]] = Counter()
        self._multiplied: set[tuple[str, Phase]] = set()
        # The parts of these layers' inputs from which their weight gradients are multiplied again.
        self._inputs: dict[str, torch.Tensor] = {}
        self._replay: Replay | None = None
        if settings.recipe.keeps_history:
            self._replay = Replay(settings, self._modules, list(linears), num_microbatches)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the outputs of layers during the step; `note` must be called with its products."""
        # Tensor parallel ranks pass on the sum of these layers' results. Experts compute theirs one by one.
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
            window = Window.of_turn(self._turn, result.shape)
            given, expected = window.of(output.detach().reshape(result.shape)), window.of(result)
            off = (given != expected).sum()
            planned, live = "{0:,.0f} values of the product", "{1:,.0f} others"
            self._checks.add(name, "output", off, expected.numel(), off, planned=planned, live=live)

    def asks_result(self, module: str, phase: Phase) -> bool:
        """Whether the result of a layer's next product is needed."""
        is_turn = self._counts[module, phase] == self._microbatch and not is_recomputed(phase)
        return is_turn and module in self._repeated and module in self._modules

    def note_idle(self, module: str, phase: Phase) -> None:
        """Records a product without rows."""
        if self.asks_result(module, phase):
            self._multiplied.add((module, phase))
        self._counts[module, phase] += 1

    @torch.no_grad()
    def note(self, module: str, product: Product) -> None:
        """Records and checks a product that has been computed."""
        if module not in self._modules:
            return
        phase = product.phase
        is_first_pass = not is_recomputed(phase)
        self._counts[module, phase] += is_first_pass and product.part == 0
        is_turn = is_first_pass and self._counts[module, phase] - 1 == self._microbatch
        # `WatchedProducts` reports operands without codes.
        operands = [operand for operand in product.operands if isinstance(operand, Fp8Operand)]
        are_whole = [self._check_cast(module, phase, operand, is_turn=is_turn) for operand in operands]
        if product.output is None or module not in self._repeated:
            return
        if phase is Phase.forward:
            self._results[module] = product.output.detach()
        if is_turn and len(operands) == 2 and all(are_whole):
            values = product.operands[0].values
            if phase is Phase.forward and values is not None:
                columns = part(values.shape[1], _RESULT_SIDE, self._turn)
                self._inputs[module] = values[:, slice(*columns)].clone()
            self._multiply(module, product, operands, product.output)
        elif is_turn and not operands and not self._settings.wgrad and phase is Phase.wgrad:
            self._multiply_values(module, product, product.output)

    def _check_cast(self, module: str, phase: Phase, operand: Fp8Operand, *, is_turn: bool) -> bool:
        """Checks an operand's codes, scale and amax; False if their shapes are wrong, so that nothing else can be."""
        role, codes, values, scale = operand.role, operand.codes, operand.values, operand.scale
        what, format = f"codes of the {role_name(role)} in {phase.value}", role_format(self._settings, role)
        if codes.dtype is not CODE_TYPES[format]:
            self._checks.add_fault(module, what, format, str(codes.dtype).removeprefix("torch."))
            return False
        is_stored = role is Role.weight and self._settings.params
        unknown = values is None and isinstance(self._modules[module], Fp8Linear) and not is_stored
        if unknown or (values is not None and values.shape != codes.shape):
            planned = "none reported" if values is None else str(list(values.shape))
            self._checks.add_fault(module, what, f"of {planned} values", str(list(codes.shape)))
            return False
        block = self._checks.block(phase, operand)
        rows, columns = codes.shape
        planned_shape = [1] if block is None else [-(-rows // block[0]), -(-columns // block[1])]
        if list(scale.shape) != planned_shape:
            shape = f"scales of the {role_name(role)} in {phase.value}"
            self._checks.add_fault(module, shape, str(planned_shape), str(list(scale.shape)))
            return False
        # Local layers report the amax with which the optimizer cast a weight; TE does not.
        has_amax = not is_stored or isinstance(self._modules[module], Fp8Linear)
        amax = self._checks.amax(phase, operand) if has_amax else None
        if self._replay is not None and is_stored:
            self._replay.note_stored(module, scale)
        elif self._replay is not None:
            self._replay.note((module, role), phase, amax, scale)
        if is_turn and values is not None:
            self._checks.check_values(module, phase, operand)
        elif is_turn:
            self._checks.check_codes_alone(module, phase, operand, amax)
        return True

    def _multiply_values(self, module: str, product: Product, output: torch.Tensor) -> None:
        """Computes a part of a weight gradient outside FP8 again, from the input of the forward pass."""
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

    def _multiply(self, module: str, product: Product, operands: Sequence[Fp8Operand], output: torch.Tensor) -> None:
        """Computes a part of a product again, from the codes and from the values that were rounded."""
        phase = product.phase
        self._multiplied.add((module, phase))
        rows, columns = (part(size, _RESULT_SIDE, self._turn) for size in output.shape)
        exact, rounded = [], []
        for operand, side, own in zip(operands, (rows, columns), _OWN_DIMENSION[phase], strict=True):
            whole = (0, operand.codes.shape[1 - own])
            window = Window(side, whole) if own == 0 else Window(whole, side)
            factors = window.factors(operand.scale, self._checks.block(phase, operand))
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
        # What was added to the product was rounded with it. A result of zeros has no size of its own.
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
        """All that is not as planned; every rank of the amax reduction group calls it together."""
        found = [*self._uncomputed(), *self._checks.differences()]
        faulty = {difference.module for difference in found}
        found += [each for each in self._unmultiplied() if each.module not in faulty]
        return found if self._replay is None else [*found, *self._replay.differences(group)]

    def _uncomputed(self) -> Iterator[Difference]:
        for name in self._modules:
            for phase in Phase:
                count, planned = self._counts[name, phase], self._num_microbatches
                # `WatchedProducts` reports products without any.
                if 0 < count < planned:
                    what = f"{phase.value} products"
                    yield Difference(module=name, what=what, planned=f"{planned} or more", live=str(count))

    def _unmultiplied(self) -> Iterator[Difference]:
        for name in sorted(self._repeated & self._modules.keys()):
            for phase in Phase:
                if self._counts[name, phase] and (name, phase) not in self._multiplied:
                    yield Difference(module=name, what=f"result of {phase.value}", planned="reported", live="none")


def _rounding_error(phase: Phase, exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> torch.Tensor:
    """The effect of the operands' rounding errors on their product, if they are independent: its 2-norm, fp64 [].

    For c = Σ aₖ·bₖ the mean of ‖δc‖² is Σ ‖δaₖ‖²·‖bₖ‖² + ‖aₖ‖²·‖δbₖ‖² + ‖δaₖ‖²·‖δbₖ‖² over all rows and columns.
    """
    own = _OWN_DIMENSION[phase]
    sizes = [values.double().square().sum(dim) for values, dim in zip(exact, own, strict=True)]
    errors = [
        (values.double() - codes.double()).square().sum(dim)
        for values, codes, dim in zip(exact, rounded, own, strict=True)
    ]
    return (errors[0] * sizes[1] + sizes[0] * errors[1] + errors[0] * errors[1]).sum().sqrt()
