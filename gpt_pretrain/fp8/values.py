"""Whether the numbers of one training step are what the plan's FP8 makes of its tensors.

Labels are no evidence: a layer may say "E4M3, delayed" and round nothing. So codes, scales, results and the state of
delayed scaling are computed again from the tensors and the plan alone (`fp8/cast_checks.py`, `fp8/results.py`,
`fp8/state_checks.py`). `fp8/comparisons.py` says how near they must be; docs/fp8.md, "The proof", what cannot be seen.

Each layer's three products are counted in every microbatch. In the microbatch whose turn it is (`fp8/turns.py`) each is
multiplied again in part, the output that the layer passes on must be that result, and the weight gradient must read the
input of the forward product. In Transformer Engine's layers the values that a cast rounded are unknown if the kernel of
an activation casts it, or if ranks that split a sequence gather codes. A weight stored in FP8 has no other values.

Nothing here waits for the device before `differences`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.fp8.cast_checks import Checks, Window
from gpt_pretrain.fp8.comparisons import COUNTS, OPERANDS_OF_WGRAD, OUTPUT, Difference
from gpt_pretrain.fp8.gemms import (
    CAST_IN,
    CODE_TYPES,
    Fp8Operand,
    Operand,
    Phase,
    Product,
    Role,
    other_codes,
    role_format,
    role_name,
)
from gpt_pretrain.fp8.local_layers import Fp8Linear
from gpt_pretrain.fp8.results import Sample, check_result
from gpt_pretrain.fp8.state_checks import Replay, is_recomputed
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.fp8.turns import Turn
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC2, PROJ, Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A sample of an operand of a forward product or a dgrad, to find it again in the weight gradient."""

    sample: Sample
    values: torch.Tensor | None
    """Before the cast; None if unknown."""
    codes: torch.Tensor | None
    """uint8; None if the weight gradient reads others: with scales of blocks or rows, and outside FP8."""


class WatchedValues:
    """Records one training step."""

    def __init__(
        self,
        settings: Fp8Settings,
        linears: Mapping[str, Linear],
        modules: Mapping[str, torch.nn.Module],
        turn: Turn,
    ) -> None:
        self._settings = settings
        # `WatchedProducts` reports layers of other kinds.
        held = {name: modules[name] for name in linears if name in modules}
        self._modules = {name: each for name, each in held.items() if isinstance(each, Fp8Linear) or is_te_linear(each)}
        self._turn = turn
        # Tensor parallel ranks pass on the sum of these layers' results. Experts compute theirs one by one.
        summed = (PROJ, FC2) if parallel_state.get_tensor_model_parallel_world_size() > 1 else ()
        self._passing_on = {
            name: each for name, each in self._modules.items() if not name.endswith((*summed, EXPERT_FC1, EXPERT_FC2))
        }
        self._checks = Checks(settings, turn.part)
        self._results: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[str, int, Role], _Seen] = {}
        self._counts: Counter[tuple[str, Phase]] = Counter()
        self._multiplied: set[tuple[str, Phase]] = set()
        self._replay: Replay | None = None
        if settings.recipe.keeps_history:
            self._replay = Replay(settings, self._modules, linears, turn.num_microbatches)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the outputs of layers during the step; `note` must be called with its products."""
        with ExitStack() as stack:
            for name, module in self._passing_on.items():
                stack.callback(module.register_forward_hook(partial(self._check_output, name)).remove)
            yield
        self._results.clear()
        self._seen.clear()

    def _check_output(self, name: str, module: torch.nn.Module, arguments: Any, returned: Any) -> None:
        # A second result is the bias, which the next layer adds.
        output = returned[0] if isinstance(returned, tuple) else returned
        result = self._results.pop(name, None)
        if result is not None:
            window = Window.of_turn(self._turn.part, result.shape)
            given, expected = window.of(output.detach().reshape(result.shape)), window.of(result)
            off = (given != expected).sum()
            planned, live = "{0:,.0f} values of the product", "{1:,.0f} others"
            self._checks.add(OUTPUT, name, "output", off, expected.numel(), off, planned=planned, live=live)

    def asks_result(self, module: str, phase: Phase) -> bool:
        """Whether the result of a layer's next product is needed."""
        is_turn = self._counts[module, phase] == self._turn.microbatch and not is_recomputed(phase)
        return is_turn and module in self._modules

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
        is_turn = is_first_pass and self._counts[module, phase] - 1 == self._turn.microbatch
        # `WatchedProducts` reports operands without codes.
        in_fp8 = [operand for operand in product.operands if isinstance(operand, Fp8Operand)]
        are_whole = [self._check_cast(module, phase, operand, is_turn=is_turn) for operand in in_fp8]
        if not all(are_whole):
            return
        # A forward pass that is computed again belongs to the backward pass that runs now.
        is_again = phase is Phase.forward and not is_first_pass
        if is_turn or (is_again and self._counts[module, Phase.wgrad] == self._turn.microbatch):
            self._follow_operands(module, product)
        if product.output is None or not is_turn:
            return
        if phase is Phase.forward and module in self._passing_on:
            self._results[module] = product.output.detach()
        is_high = not in_fp8 and not self._settings.wgrad and phase is Phase.wgrad
        if len(in_fp8) == 2 or (is_high and all(operand.values is not None for operand in product.operands)):
            self._multiplied.add((module, phase))
            check_result(self._checks, module, product, product.output, self._turn.part)

    def _follow_operands(self, module: str, product: Product) -> None:
        """Keeps samples of what a weight gradient will read, and compares them with what it reads."""
        for operand in product.operands:
            key = module, product.part, operand.role
            if operand.role is Role.weight:
                continue
            if product.phase is not Phase.wgrad:
                if isinstance(operand, Fp8Operand):
                    self._seen[key] = self._sampled(product.phase, operand)
            elif (seen := self._seen.pop(key, None)) is not None:
                self._compare_operand(module, operand, seen)

    def _sampled(self, phase: Phase, operand: Fp8Operand) -> _Seen:
        sample = Sample.of_turn(operand.codes.shape, self._turn.part, operand.codes.device)
        is_same_cast = self._checks.block(phase, operand) is None and self._settings.wgrad
        return _Seen(
            sample=sample,
            values=None if operand.values is None else sample.of(operand.values),
            codes=sample.of(operand.codes.view(torch.uint8)) if is_same_cast else None,
        )

    def _compare_operand(self, module: str, operand: Operand, seen: _Seen) -> None:
        sample, role = seen.sample, operand.role
        if not isinstance(operand, Fp8Operand):
            if operand.values is None or seen.values is None:
                return
            off = sample.of(operand.values) != seen.values.to(operand.values.dtype)
        elif seen.codes is not None:
            off = sample.of(operand.codes.view(torch.uint8)) != seen.codes
        elif seen.values is not None:
            # Values are known to the bit where scales are of blocks or rows.
            factors, exact = sample.factors(operand.scale, self._checks.block(Phase.wgrad, operand)), torch.zeros(())
            codes, format = sample.of(operand.codes.view(torch.uint8)), role_format(self._settings, role)
            off = other_codes(codes.view(CODE_TYPES[format]), seen.values, exact.to(factors), factors, format)
        else:
            return
        what = f"{role_name(role)} in wgrad"
        planned, live = f"that of {CAST_IN[role].value}", "{1:,.0f} of {0:,.0f} values differ"
        self._checks.add(OPERANDS_OF_WGRAD, module, what, off.sum(), off.numel(), off.sum(), planned=planned, live=live)

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
            is_first = self._replay is not None and self._counts[module, phase] == 1
            earlier = self._replay.row_before((module, role)) if self._replay is not None and is_first else None
            self._checks.check_codes_alone(module, phase, operand, amax, earlier)
        return True

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
                count, planned = self._counts[name, phase], self._turn.num_microbatches
                # `WatchedProducts` reports products without any.
                if 0 < count < planned:
                    what = f"{phase.value} products"
                    yield Difference(
                        comparison=COUNTS, module=name, what=what, planned=f"{planned} or more", live=str(count)
                    )

    def _unmultiplied(self) -> Iterator[Difference]:
        for name in sorted(self._modules):
            for phase in Phase:
                if self._counts[name, phase] and (name, phase) not in self._multiplied:
                    what = f"result of {phase.value}"
                    yield Difference(comparison=COUNTS, module=name, what=what, planned="reported", live="none")
