"""Whether the numbers of one training step are what the plan's FP8 makes of its tensors; emulated layers report them.

Labels are no evidence: a layer may say "E4M3, delayed" and round nothing. This looks at what the step left: the tensors
that were cast, their codes and scales, the results of products, and the state of delayed scaling. It computes each of
them again from the tensors and the plan alone, in other words than `fp8/emulation/` does:

- **Casts**, each one: the codes have the planned format and are round(value · scale). Without a history a scale is the
  format's maximum over the amax of the tensor or block, for blocks rounded down to a power of two.
- **Delayed scaling** is replayed (`fp8/replay.py`).
- **Products**: each layer has computed its three in every microbatch. One of each kind per type of layer is multiplied
  again: from the codes, which must give the result, and from the values, from which the result must be as far away as
  rounding explains. What these layers pass on is that result. Ranks and steps take turns at layers and microbatches.

Nothing here waits for the device before `differences`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.fp8.gemms import (
    CODE_TYPES,
    Operand,
    Phase,
    Product,
    Role,
    role_format,
    spread_over_blocks,
)
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.fp8.replay import QUOTIENT_ERROR, Replay, role_name
from gpt_pretrain.spec.products import FC2, PROJ, Linear
from gpt_pretrain.spec.recipes import FORMAT_MAX, Fp8Settings

# Scales and amaxes beyond these limits follow rules of their own, for zeros and for numbers that fp32 cannot hold.
_LEAST, _MOST = 2.0**-100, 2.0**100
# A result is rounded once, to BF16 at worst: by 2^-9 of each value. Sums in fp32 add less than the rest.
_OUTPUT_ERROR = 2e-3
# By what factor rounding errors that are not independent may miss the sum of independent ones.
_COHERENCE = 8.0
# Of values with BF16's eight bits one in sixteen has no more than the four of E4M3; one in 32 no more than E5M2's.
_LEAST_ROUNDED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """A comparison whose numbers are on the device."""

    module: str
    what: str
    planned: str
    """With places for the numbers, like `live`."""
    live: str
    numbers: torch.Tensor
    """fp64 [3]: above 0 where they differ, the number expected, the number found."""


def _numbers(off: torch.Tensor, expected: torch.Tensor | float, found: torch.Tensor | float) -> torch.Tensor:
    return torch.stack(
        [torch.as_tensor(each, device=off.device).double().reshape(()) for each in (off, expected, found)]
    )


class WatchedValues:
    """Records one training step of emulated layers.

    Args:
        settings: The FP8 of the run.
        linears: The layers of this rank that the plan puts in FP8, by their names in the whole model.
        modules: All modules of this rank, likewise.
        num_microbatches: Of the step.
        turn: Whose turn it is to be multiplied again; another number on each rank and at each step.
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
        # Another layer in the place of an emulated one is what `WatchedProducts` tells.
        self._modules = {name: modules[name] for name in linears if hasattr(modules.get(name), "product_listener")}
        self._num_microbatches = num_microbatches
        self._microbatch = turn % num_microbatches
        kinds: dict[str, list[str]] = defaultdict(list)
        for name, linear in linears.items():
            kinds[linear.kind].append(name)
        self._repeated = {names[turn % len(names)] for names in kinds.values()}
        self._checks: list[_Check] = []
        self._results: dict[str, torch.Tensor] = {}
        self._counts: Counter[tuple[str, Phase]] = Counter()
        self._replay = (
            Replay(settings, self._modules, list(linears), num_microbatches) if settings.recipe.keeps_history else None
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the step; `note` is called with its products."""
        # Of these layers, tensor parallel ranks pass on the sum of their results.
        summed = (PROJ, FC2) if parallel_state.get_tensor_model_parallel_world_size() > 1 else ()
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if name in self._repeated and not name.endswith(summed):
                    stack.callback(module.register_forward_hook(partial(self._check_output, name)).remove)
            yield

    def _check_output(self, name: str, module: torch.nn.Module, arguments: Any, returned: Any) -> None:
        # The other is the bias, where the layer leaves its addition to the next.
        output = returned[0] if isinstance(returned, tuple) else returned
        result = self._results.pop(name, None)
        if result is not None:
            off = (output.detach().reshape(result.shape) != result).sum()
            planned, live = "{0:,.0f} values of the product", "{1:,.0f} others"
            self._add(name, "output", off, result.numel(), off, planned=planned, live=live)

    @torch.no_grad()
    def note(self, module: str, product: Product) -> None:
        """Records a product that has been computed."""
        if module not in self._modules:
            return
        index = self._counts[module, product.phase]
        self._counts[module, product.phase] += 1
        # What `WatchedProducts` finds to be in other formats has no codes.
        operands = [operand for operand in product.operands if operand.codes is not None]
        are_whole = [self._check_cast(module, product.phase, operand) for operand in operands]
        if product.phase is Phase.forward and product.output is not None and module in self._repeated:
            self._results[module] = product.output.detach()
        if index == self._microbatch and module in self._repeated and len(operands) == 2 and all(are_whole):
            self._multiply(module, product)

    def _block(self, phase: Phase, role: Role) -> tuple[int, int] | None:
        """Rows and columns of the values that share a scale in a product; None where all do."""
        recipe = self._settings.recipe
        if recipe.block is None:
            return None
        # Weights have square blocks where they have fewer scales than activations do.
        if role is Role.weight and recipe.weight_scale_bytes < recipe.activation_scale_bytes:
            return recipe.block, recipe.block
        # Blocks lie along the dimension that the product sums over.
        within_rows = phase is Phase.forward or (phase is Phase.dgrad and role is Role.output_gradient)
        return (1, recipe.block) if within_rows else (recipe.block, 1)

    def _check_cast(self, module: str, phase: Phase, operand: Operand) -> bool:
        """Checks an operand's codes, scale and amax; whether they have the shapes to go on with."""
        role, codes, values, scale = operand.role, operand.codes, operand.values, operand.scale
        assert codes is not None
        what, format = f"codes of the {role_name(role)} in {phase.value}", role_format(self._settings, role)
        if codes.dtype is not CODE_TYPES[format]:
            self._add_fault(module, what, format, str(codes.dtype).removeprefix("torch."))
            return False
        if values is None or scale is None or values.shape != codes.shape:
            planned = "none reported" if values is None else str(list(values.shape))
            self._add_fault(module, what, f"of {planned} values", str(list(codes.shape)))
            return False
        block, magnitudes = self._block(phase, role), _magnitudes(values)
        amaxes = magnitudes.max().reshape(1) if block is None else _largest_of_blocks(magnitudes, block)
        if scale.shape != amaxes.shape:
            shape = f"scales of the {role_name(role)} in {phase.value}"
            self._add_fault(module, shape, str(list(amaxes.shape)), str(list(scale.shape)))
            return False
        if self._replay is None:
            self._check_scales(module, role, format, amaxes, scale)
        else:
            self._replay.note((module, role), phase, amaxes, scale)
        if operand.amax is not None:
            expected, found = amaxes.max(), operand.amax.max()
            self._add(module, f"amax of the {role_name(role)}", expected != found, expected, found)
        largest = FORMAT_MAX[format]
        factor = scale if block is None else spread_over_blocks(scale, block, (values.shape[0], values.shape[1]))
        expected_codes = (values.float() * factor).clamp(-largest, largest).to(codes.dtype)
        off = (expected_codes.view(torch.uint8) != codes.view(torch.uint8)).sum()
        planned = f"{{0:,.0f}} times round(value · scale) in {format}"
        self._add(module, what, off, codes.numel(), off, planned=planned, live="others {1:,.0f} times")
        return True

    def _add(
        self,
        module: str,
        what: str,
        off: torch.Tensor,
        expected: torch.Tensor | float,
        found: torch.Tensor | float,
        *,
        planned: str = "{0:.6g}",
        live: str = "{1:.6g}",
    ) -> None:
        numbers = _numbers(off, expected, found)
        self._checks.append(_Check(module=module, what=what, planned=planned, live=live, numbers=numbers))

    def _add_fault(self, module: str, what: str, planned: str, live: str) -> None:
        fault = torch.ones(3, dtype=torch.float64, device=torch.cuda.current_device())
        self._checks.append(_Check(module=module, what=what, planned=planned, live=live, numbers=fault))

    def _check_scales(self, module: str, role: Role, format: str, amaxes: torch.Tensor, scale: torch.Tensor) -> None:
        """Checks the scales of a recipe without history, each against the amax of its values."""
        quotient = FORMAT_MAX[format] / amaxes.double()
        ordinary = (quotient > _LEAST) & (quotient < _MOST)

        def rule(exact: torch.Tensor) -> torch.Tensor:
            if self._settings.recipe.scales_tensors:
                return exact
            # mantissa · 2^exponent, with a mantissa from 0.5 to 1
            return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)

        # A quotient next to a power of two may have been rounded to it.
        low, high = rule(quotient * (1 - QUOTIENT_ERROR)), rule(quotient * (1 + QUOTIENT_ERROR))
        off = ordinary & ~((scale >= low) & (scale <= high))
        worst = off.flatten().int().argmax()
        expected, found = rule(quotient).flatten()[worst], scale.flatten()[worst]
        self._add(module, f"scale of the {role_name(role)}", off.any(), expected, found)

    def _multiply(self, module: str, product: Product) -> None:
        """Computes a product again, from the codes and from the values that were rounded."""
        phase, output = product.phase, product.output
        if output is None:
            self._add_fault(module, f"result of {phase.value}", "reported", "none")
            return
        exact, rounded = [], []
        for operand in product.operands:
            assert operand.codes is not None
            assert operand.scale is not None
            assert operand.values is not None
            block, (rows, columns) = self._block(phase, operand.role), operand.codes.shape
            scale = operand.scale if block is None else spread_over_blocks(operand.scale, block, (rows, columns))
            exact.append(operand.values.float())
            rounded.append(operand.codes.float() / scale)
            changed = ((exact[-1] != rounded[-1]).sum() / (exact[-1] != 0).sum()).nan_to_num(nan=1.0)
            what, planned = f"{role_name(operand.role)} in {phase.value}", "rounding changes {0:.0%} of the values"
            too_few = changed < _LEAST_ROUNDED
            self._add(module, what, too_few, _LEAST_ROUNDED, changed, planned=planned, live="{1:.1%}")
        again, without_rounding = _product(phase, *rounded), _product(phase, *exact)
        found = output.float() if product.bias is None else output.float() - product.bias.float()
        # The bias has been rounded with the product.
        size = output.float().norm()
        away = (found - again).norm() / size
        what, live = f"result of {phase.value}", "{1:.3g} away"
        planned = "within {0:.3g} of the product of its codes"
        self._add(module, what, away > _OUTPUT_ERROR, _OUTPUT_ERROR, away, planned=planned, live=live)
        explained = _rounding_error(phase, exact, rounded)
        distance, blur = (found - without_rounding).norm(), _OUTPUT_ERROR * size
        too_near = (distance < explained / _COHERENCE) & (explained / _COHERENCE > blur)
        too_far = distance > explained * _COHERENCE + blur
        planned = "{0:.3g} away from the product without rounding"
        self._add(module, what, too_near | too_far, explained / size, distance / size, planned=planned, live=live)

    @torch.no_grad()
    def differences(self, group: torch.distributed.ProcessGroup) -> list[Difference]:
        """All that is not as planned; every rank calls it, and it waits for the device.

        Args:
            group: The amax reduction group of this rank.
        """
        found = [*self._uncomputed(), *self._checked()]
        return found if self._replay is None else [*found, *self._replay.differences(group)]

    def _uncomputed(self) -> Iterator[Difference]:
        for name in self._modules:
            for phase in Phase:
                count, planned = self._counts[name, phase], self._num_microbatches
                # None at all is what `WatchedProducts` tells.
                if 0 < count < planned:
                    what = f"{phase.value} products"
                    yield Difference(module=name, what=what, planned=f"{planned} or more", live=str(count))

    def _checked(self) -> Iterator[Difference]:
        """The first difference of each kind in each layer."""
        if not self._checks:
            return
        told: set[tuple[str, str]] = set()
        for check, (off, *numbers) in zip(
            self._checks, torch.stack([check.numbers for check in self._checks]).tolist(), strict=True
        ):
            if (off > 0 or math.isnan(off)) and (check.module, check.what) not in told:
                told.add((check.module, check.what))
                expected, found = numbers
                yield Difference(
                    module=check.module,
                    what=check.what,
                    planned=check.planned.format(expected, found),
                    live=check.live.format(expected, found),
                )


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """fp32, zero in place of NaN."""
    magnitudes = values.float().abs()
    return torch.where(magnitudes.isnan(), 0.0, magnitudes)


def _largest_of_blocks(magnitudes: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, fp32 [blocks of rows, blocks of columns]."""
    return torch.nn.functional.max_pool2d(magnitudes[None], block, block, ceil_mode=True)[0]


def _product(phase: Phase, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """x·wᵀ, dy·w or dyᵀ·x."""
    if phase is Phase.forward:
        return first @ second.t()
    return first @ second if phase is Phase.dgrad else first.t() @ second


def _rounding_error(phase: Phase, exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of what the operands' rounding errors do to their product, as if independent of one another; fp64 [].

    For c = Σ aₖ·bₖ the mean of ‖δc‖² is Σ ‖δaₖ‖²·‖bₖ‖² + ‖aₖ‖²·‖δbₖ‖² + ‖δaₖ‖²·‖δbₖ‖² over all rows and columns.
    """
    # The dimension of each operand that the product does not sum over.
    others = {Phase.forward: (0, 0), Phase.dgrad: (0, 1), Phase.wgrad: (1, 1)}[phase]
    sizes = [values.double().square().sum(dim) for values, dim in zip(exact, others, strict=True)]
    errors = [
        (values.double() - codes.double()).square().sum(dim)
        for values, codes, dim in zip(exact, rounded, others, strict=True)
    ]
    return (errors[0] * sizes[1] + sizes[0] * errors[1] + errors[0] * errors[1]).sum().sqrt()
