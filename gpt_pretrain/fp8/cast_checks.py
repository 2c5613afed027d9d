"""Whether the codes, scales and amax of one tensor are what the plan's recipe makes of its values.

`Checks` collects the numbers to compare on the device during a step, and reads them once at the end.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Self

import torch

from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.fp8.comparisons import AMAX, CODES, LARGEST_CODE, SCALE, SHAPES, Comparison, Difference
from gpt_pretrain.fp8.gemms import (
    CAST_IN,
    CODE_TYPES,
    QUOTIENT_ERROR,
    Fp8Operand,
    Phase,
    Role,
    count_codes,
    largest_magnitude,
    other_codes,
    role_format,
    role_name,
    rounded_between,
    spread_over_blocks,
)
from gpt_pretrain.run.fp8 import Fp8Settings

# Scales and amaxes beyond these limits follow other rules, for zeros and for numbers that fp32 cannot hold.
_LEAST, _MOST = 2.0**-100, 2.0**100
# Values of a tensor that are rounded again.
_WINDOW_VALUES = 2**22


def part(size: int, most: int, turn: int) -> tuple[int, int]:
    """Start and end of the part of a dimension whose turn it is; parts have `most` indices, the last fewer."""
    start = turn % -(-size // most) * most
    return start, min(size, start + most)


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows and columns of a matrix, starting where its blocks do."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of_turn(cls, turn: int, shape: torch.Size, block: tuple[int, int] | None = None) -> Self:
        """At most `_WINDOW_VALUES` values or one block, in whole rows; in whole columns if blocks lie along these."""
        height, width = shape
        if block is not None and block[0] > block[1]:
            return cls((0, height), part(width, max(1, _WINDOW_VALUES // height), turn))
        # A multiple of any block's height.
        return cls(part(height, max(128, _WINDOW_VALUES // width // 128 * 128), turn), (0, width))

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The window's values."""
        return matrix[slice(*self.rows), slice(*self.columns)]

    def scales(self, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
        """The scales of the window's blocks, [blocks of rows, blocks of columns], or the one scale."""
        if block is None:
            return scale
        (top, bottom), (left, right), (height, width) = self.rows, self.columns, block
        return scale[top // height : -(-bottom // height), left // width : -(-right // width)]

    def factors(self, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
        """The scale of each value, or the one scale."""
        if block is None:
            return scale
        shape = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return spread_over_blocks(self.scales(scale, block), block, shape)


def largest_of_blocks(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, ignoring NaN; fp32 [blocks of rows, blocks of columns]."""
    magnitudes = values.float().abs()
    magnitudes = torch.where(magnitudes.isnan(), 0.0, magnitudes)
    largest: torch.Tensor = torch.nn.functional.max_pool2d(magnitudes[None], block, block, ceil_mode=True)
    return largest[0]


def _read(numbers: Sequence[torch.Tensor | float]) -> list[float]:
    """Numbers, [] or [1] on the device, or known already; waits once for each type."""
    read = [0.0 if isinstance(number, torch.Tensor) else float(number) for number in numbers]
    of_type: dict[torch.dtype, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            of_type[number.dtype].append(place)
    for places in of_type.values():
        values = torch.cat([torch.as_tensor(numbers[place]).reshape(1) for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            read[place] = float(value)
    return read


class Checks:
    """The comparisons of one step; `turn` selects the part of a large tensor that is looked at."""

    def __init__(self, settings: Fp8Settings, turn: int) -> None:
        self._settings = settings
        self._turn = turn
        # Differences whose texts have places for two numbers; above 0 or NaN if it differs, and both numbers.
        self._checks: list[tuple[Difference, tuple[torch.Tensor | float, ...]]] = []

    def add(
        self,
        comparison: Comparison,
        module: str,
        what: str,
        off: torch.Tensor,
        *numbers: torch.Tensor | float,
        planned: str = "{0:.6g}",
        live: str = "{1:.6g}",
    ) -> None:
        """Adds a comparison of two numbers, [] or [1]: what is expected, and what was found.

        It differs if `off`, [], is above 0 or NaN; both texts have places for both numbers.
        """
        difference = Difference(comparison=comparison, module=module, what=what, planned=planned, live=live)
        self._checks.append((difference, (off, *numbers)))

    def add_fault(self, module: str, what: str, planned: str, live: str) -> None:
        """Adds a type or shape that is known to differ."""
        difference = Difference(comparison=SHAPES, module=module, what=what, planned=planned, live=live)
        self._checks.append((difference, (1.0, 0.0, 0.0)))

    def differences(self) -> Iterator[Difference]:
        """The first difference of each kind in each layer."""
        table = _read([number for _, numbers in self._checks for number in numbers])
        told: set[tuple[Comparison, str, str]] = set()
        for (check, _), (off, *numbers) in zip(self._checks, batched(table, 3), strict=True):
            if (off > 0 or math.isnan(off)) and (check.comparison, check.module, check.what) not in told:
                told.add((check.comparison, check.module, check.what))
                yield replace(check, planned=check.planned.format(*numbers), live=check.live.format(*numbers))

    def block(self, phase: Phase, operand: Fp8Operand) -> tuple[int, int] | None:
        """Rows and columns of the values that share a scale in a product; None if all do."""
        numerics, role = self._settings.recipe.numerics, operand.role
        is_dgrad_weight = (phase, role) == (Phase.dgrad, Role.weight)
        if numerics.scales_tensors or (numerics.scales_dgrad_weight_whole and is_dgrad_weight):
            return None
        if numerics.block is not None and numerics.squares_weights and role is Role.weight:
            return numerics.block, numerics.block
        # Blocks and whole rows lie along the dimension that the product sums over.
        within_rows = phase is Phase.forward or (phase is Phase.dgrad and role is Role.output_gradient)
        rows, columns = operand.codes.shape
        return (1, numerics.block or columns) if within_rows else (numerics.block or rows, 1)

    def amax(self, phase: Phase, operand: Fp8Operand) -> torch.Tensor | None:
        """fp32 [1], of a tensor that is cast for this product as a whole; None if unknown.

        If the values are known only up to `blur`, this is the reported amax, provided that it fits them.
        """
        if phase is not CAST_IN[operand.role] or not self._settings.recipe.numerics.scales_tensors:
            return None
        reported = None if operand.amax is None else operand.amax.detach().float().reshape(-1).max().view(1)
        if operand.values is None:
            return reported
        amax = largest_magnitude(operand.values)
        if operand.blur is not None and reported is not None:
            return torch.where((reported - amax).abs() <= operand.margin(amax), reported, amax)
        return amax

    def check_values(self, module: str, phase: Phase, operand: Fp8Operand) -> None:
        """Computes an operand's codes and scales again from its values."""
        role, codes, scale, values = operand.role, operand.codes, operand.scale, operand.values
        assert values is not None
        keeps_history, block = self._settings.recipe.keeps_history, self.block(phase, operand)
        format = role_format(self._settings, role)
        window = Window.of_turn(self._turn, codes.shape, block)
        part_of_values, largest = window.of(values), largest_magnitude(values)
        amaxes = largest if block is None else largest_of_blocks(part_of_values, block)
        if not keeps_history:
            self._check_scales(module, role, format, amaxes, window.scales(scale, block))
        # `Replay` checks Transformer Engine's histories. They lose a weight's amax in the second microbatch.
        if operand.amax is not None and (self._settings.emulate or not keeps_history):
            found = operand.amax.max()
            off = (largest - found).abs() > operand.margin(largest)
            self.add(AMAX, module, f"amax of the {role_name(role)}", off, largest, found)
        factors = window.factors(scale, block)
        off = other_codes(window.of(codes), part_of_values, operand.margin(largest), factors, format).sum()
        what, planned = f"codes of the {role_name(role)} in {phase.value}", "{0:,.0f} times round(value · scale) in "
        num_values, live = part_of_values.numel(), "others {1:,.0f} times"
        self.add(CODES, module, what, off, num_values, off, planned=planned + format, live=live)

    def check_codes_alone(
        self, module: str, phase: Phase, operand: Fp8Operand, amax: torch.Tensor | None, earlier: torch.Tensor | None
    ) -> None:
        """Checks that codes fill their format, where only the `amax` [1] of their values is known, or not even that.

        `earlier` [] is what the reported amax was before the cast: the tensor's own is known only if it is larger.
        """
        role, codes, scale = operand.role, operand.codes, operand.scale
        if phase is not CAST_IN[role]:
            return
        format, block = role_format(self._settings, role), self.block(phase, operand)
        largest, keeps_history = FORMAT_MAX[format], self._settings.recipe.keeps_history
        what = f"largest code of the {role_name(role)} in {phase.value}"
        if block is not None:
            window = Window.of_turn(self._turn, codes.shape, block)
            of_blocks, scales = largest_of_blocks(window.of(codes), block), window.scales(scale, block)
            ordinary = (of_blocks != 0) & (scales < _MOST)
            off = ordinary & (of_blocks < largest / 2)
            found = of_blocks.flatten()[off.flatten().int().argmax()]
            self.add(LARGEST_CODE, module, what, off.any(), largest / 2, found, planned="{0:.6g} or more")
            off = torch.frexp(scales).mantissa != 0.5
            found = scales.flatten()[off.flatten().int().argmax()]
            what = f"scale of the {role_name(role)}"
            self.add(SCALE, module, what, off.any(), 0.0, found, planned="a power of two")
            return
        if amax is not None and not keeps_history:
            self._check_scales(module, role, format, amax, scale)
        if operand.is_gathered or (amax is None and keeps_history):
            return
        highest = count_codes(codes, 0)[2].to(torch.uint8).view(CODE_TYPES[format]).float()
        if amax is None:
            low = high = torch.full_like(highest, largest)
            # Zeros have the scale 1, and values so small that their scale would exceed fp32 have no full code.
            may_be_less = ((highest == 0) & (scale == 1.0)) | (scale > _MOST)
        else:
            low, high = rounded_between(amax, torch.zeros_like(amax), scale, format)
            may_be_less = torch.zeros_like(highest, dtype=torch.bool) if earlier is None else amax <= earlier
        is_off = ~(highest <= high) | (~may_be_less & ~(highest >= low))
        self.add(LARGEST_CODE, module, what, is_off, high, highest)

    def _check_scales(self, module: str, role: Role, format: str, amaxes: torch.Tensor, scale: torch.Tensor) -> None:
        """Checks each scale of a recipe without history against the amax of its values."""
        numerics = self._settings.recipe.numerics
        quotient = FORMAT_MAX[format] / amaxes.double().clamp(min=numerics.least_amax)
        ordinary = (quotient > _LEAST) & (quotient < _MOST)
        error: torch.Tensor | float = QUOTIENT_ERROR
        if numerics.takes_logarithm:
            error = QUOTIENT_ERROR * (1 + quotient.log2().abs())

        def rule(exact: torch.Tensor) -> torch.Tensor:
            if not numerics.powers_of_two:
                return exact
            # mantissa · 2^exponent, with a mantissa from 0.5 to 1
            return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)

        # A quotient near a power of two may have been rounded to it.
        low, high = rule(quotient * (1 - error)), rule(quotient * (1 + error))
        off = ordinary & ~((scale >= low) & (scale <= high))
        worst = off.flatten().int().argmax()
        expected, found = rule(quotient).flatten()[worst], scale.flatten()[worst]
        self.add(SCALE, module, f"scale of the {role_name(role)}", off.any(), expected, found)
