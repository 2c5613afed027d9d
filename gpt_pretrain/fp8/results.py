"""Whether a matrix product is the product of its codes, and not of what they were rounded from.

128 rows and 128 columns of a result, spread evenly over it, are multiplied again in fp64: from the codes, and with one
operand or the other as it was before its cast. Three facts follow.

The result may differ from the product of its codes by rounding and by what its sums lose (`gemms.Sums`). That bound is
proven, but loose on tensor cores, where unsplit sums of terms of one sign lose up to a seventh, and sums that nearly
cancel much of their rest. So a second bound, of what is usual, warns: on average over its lines, a result is not larger
or smaller than the product of its codes.

Whether an operand was rounded at all shows in a direction. Let d be the change of the product if the operand were not
rounded. A result made of codes lies near 0 along d, one made of values near 1. Other errors do not follow d. So it does
not matter how the operand's rounding errors add up: where rows are alike over the tokens, they do so coherently, to
√tokens times what independent errors would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpt_pretrain.fp8.cast_checks import Checks
from gpt_pretrain.fp8.comparisons import CHANGED_VALUES, RESULT, ROUNDING, USUAL_RESULT
from gpt_pretrain.fp8.gemms import CAST_IN, QUOTIENT_ERROR, TERMS, Fp8Operand, Phase, Product, Sums, role_name

# Rows and columns of a result that are multiplied again.
SIDE = 128
# The dimension of each operand that the product does not sum over.
_OWN_DIMENSION = {Phase.forward: (0, 0), Phase.dgrad: (0, 1), Phase.wgrad: (1, 1)}
# The relative error of products on tensor cores that is usual, beside what coherent terms lose, and beside so many
# standard errors of its estimate.
_USUAL_ERROR, _DEVIATIONS = 1e-2, 4.0
# The relative error of adding a product to an fp32 gradient.
_FP32_ROUNDING = 2.0**-23
# Of fp32 and BF16.
_SMALLEST_NORMAL = 2.0**-126
# The least share of values that rounding changes. One in sixteen of BF16's values fits E4M3, one in 32 E5M2.
_LEAST_CHANGED = 0.5
# Fewer different magnitudes say nothing.
_LEAST_DIFFERENT = 16


def spread(size: int, turn: int, device: torch.device) -> torch.Tensor:
    """At most `SIDE` indices, evenly spread over a dimension; each index has its turn. int64 [n]."""
    stride = -(-size // SIDE)
    return torch.arange(turn % stride, size, stride, device=device)


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows and columns of a matrix, int64 [n] each."""

    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of_turn(cls, shape: torch.Size, turn: int, device: torch.device) -> "Sample":
        """Rows and columns whose turn it is; rows move on fastest."""
        height, width = shape
        return cls(spread(height, turn, device), spread(width, turn // -(-height // SIDE), device))

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The values at the crossings."""
        return matrix[self.rows[:, None], self.columns]

    def factors(self, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
        """The scale of each crossing, or the one scale."""
        if block is None:
            return scale
        return scale[(self.rows // block[0])[:, None], self.columns // block[1]]


def _lines(matrix: torch.Tensor, own: int, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix (`own` 0) or its columns (1), as rows: [lines, terms]."""
    lines = matrix.view(torch.uint8) if matrix.dtype.itemsize == 1 else matrix
    lines = lines.index_select(own, indices).view(matrix.dtype)
    return lines if own == 0 else lines.t()


def _factors(operand: Fp8Operand, block: tuple[int, int] | None, own: int, indices: torch.Tensor) -> torch.Tensor:
    """The scales of these lines' values, [lines, terms] or [1]."""
    if block is None:
        return operand.scale
    along = block[1 - own]
    of_blocks = operand.scale.index_select(own, indices // block[own])
    scales = of_blocks if own == 0 else of_blocks.t()
    return scales.repeat_interleave(along, 1)[:, : operand.codes.shape[1 - own]]


def _product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first @ second.t()


def check_result(checks: Checks, module: str, product: Product, output: torch.Tensor, turn: int) -> None:
    """Compares a product with what its operands give, as they are or as what their codes stand for."""
    phase = product.phase
    sample = Sample.of_turn(output.shape, turn, output.device)
    # What is multiplied, and what its casts were given, [lines, terms] in fp64; None if there was no cast, or unknown.
    lines, unrounded = [], []
    for operand, own, indices in zip(
        product.operands, _OWN_DIMENSION[phase], (sample.rows, sample.columns), strict=True
    ):
        values = None if operand.values is None else _lines(operand.values, own, indices).double()
        if isinstance(operand, Fp8Operand):
            factors = _factors(operand, checks.block(phase, operand), own, indices)
            lines.append(_lines(operand.codes, own, indices).double() / factors.double())
            unrounded.append(values)
            if values is not None and phase is CAST_IN[operand.role]:
                _check_changed(checks, module, f"{role_name(operand.role)} in {phase.value}", values, lines[-1])
        else:
            assert values is not None
            lines.append(values)
            unrounded.append(None)
    again = _product(*lines)
    result = sample.of(output).double()
    found = result
    if product.added is not None:
        found = result - (product.added[sample.columns] if product.added.dim() == 1 else sample.of(product.added))
    # What was added to the product was rounded with it. A result of zeros has no size of its own.
    size = torch.maximum((found if output.dtype is torch.float32 else result).norm(), again.norm())
    magnitudes = _product(*map(torch.abs, lines)).norm()
    lost = product.sums.most_lost(lines[0].shape[1])
    usually_lost = lost * _coherence(lines, again).square() * again.norm().square() / _positive(magnitudes)
    rounding = product.result_error * size + _FP32_ROUNDING * result.norm()
    # Each term, and the result, may be flushed to zero.
    rounding += (lines[0].shape[1] + 1) * _SMALLEST_NORMAL * result.numel() ** 0.5
    away, limit, what = (found - again).norm(), rounding + lost * magnitudes, f"result of {phase.value}"
    factor = "codes" if isinstance(product.operands[0], Fp8Operand) else "values"
    planned = f"within {{0:.3g}} of the product of its {factor}"
    checks.add(RESULT, module, what, away > limit, limit / size, away / size, planned=planned, live="{1:.3g} away")
    if product.sums is not Sums.fp32:
        share, noise = _gain(found, again)
        usual = _USUAL_ERROR + usually_lost / size + _DEVIATIONS * noise
        off = ((share - 1).abs() > usual) & (again.norm() > rounding)
        planned, live = f"usually the product of its {factor} within {{0:.3g}}", "{1:.4g} times that"
        checks.add(USUAL_RESULT, module, what, off, usual, share, planned=planned, live=live)
    for place, (operand, values) in enumerate(zip(product.operands, unrounded, strict=True)):
        if values is not None:
            direction = _product(*(values if place == each else lines[each] for each in (0, 1))) - again
            along = ((found - again) * direction).sum() / direction.square().sum()
            off = (direction.norm() > rounding + usually_lost) & (along > 0.5)
            what = f"rounding of the {role_name(operand.role)} in {phase.value}"
            live = "{1:.0%} of the way to the product without it"
            checks.add(ROUNDING, module, what, off, 0.0, along, planned="in the result", live=live)


def _positive(divisor: torch.Tensor) -> torch.Tensor:
    return divisor.clamp(min=torch.finfo(divisor.dtype).tiny)


def _coherence(lines: Sequence[torch.Tensor], product: torch.Tensor) -> torch.Tensor:
    """What the terms of a product's elements add up to, before those that all elements share cancel each other, [].

    In multiples of the product: 1 if terms have one sign, and nearly so if they are random, because each element then
    has signs of its own; m if all elements lose all but 1/m of their terms' magnitudes in the same way, as where the
    rows of a batch are alike and their gradients add up to almost nothing. Sums lose a share of what they add up, so
    elements are then off by m times that share, all alike.
    """
    first, second = lines
    along = (first * (product @ second)).sum(0)
    of_instructions = torch.nn.functional.pad(along, (0, -len(along) % TERMS)).view(-1, TERMS).sum(1)
    return of_instructions.abs().sum() / _positive(product.square().sum())


def _gain(found: torch.Tensor, again: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many times a matrix another one is, by least squares, and the standard error of that.

    A row or column may be far off where its terms nearly cancel each other; all of them, in the same way, are unusual.
    So the error comes from how rows, or columns, differ.
    """
    together, size = found * again, again.square()
    whole = _positive(size.sum())
    gain = together.sum() / whole
    off = together - gain * size
    return gain, torch.maximum(off.sum(0).norm(), off.sum(1).norm()) / whole


def _check_changed(checks: Checks, module: str, what: str, values: torch.Tensor, rounded: torch.Tensor) -> None:
    """Looks for values that were rounded before their cast, as a cast that does nothing would leave them.

    Different magnitudes count once each: a tensor may hold one number many times, and FP8 may hold that. It always
    holds one number times powers of two.
    """
    stride = -(-values.shape[1] // SIDE)
    values, rounded = (each[:, ::stride].abs().flatten() for each in (values, rounded))
    values, order = values.sort()
    changed = (values - rounded[order]).abs() > QUOTIENT_ERROR * values
    is_new = torch.diff(values, prepend=torch.zeros(1, dtype=values.dtype, device=values.device)) > 0
    num, num_changed = is_new.sum(), (is_new & changed).sum()
    mantissas = torch.frexp(values).mantissa
    are_alike = mantissas.amax() == torch.where(values == 0, 1.0, mantissas).amin()
    off = (num >= _LEAST_DIFFERENT) & (num_changed < _LEAST_CHANGED * num) & ~are_alike
    planned = "at least {0:.0%} of its different values changed by rounding"
    checks.add(CHANGED_VALUES, module, what, off, _LEAST_CHANGED, num_changed / num, planned=planned, live="{1:.1%}")
