"""The statistics of a comparison: smoothing, Student's t intervals, and the noise of a run against itself.

Losses and times are compared as logarithms: their difference is the logarithm of a ratio, so a gap of 1% means the same
at a loss of 3 and at one of 9, and an interval of a ratio never reaches zero. All intervals are two-sided and assume
that the logarithms of the runs' values are independent and normal; no p-value is computed.

    several seeds on both sides, the same seeds   Student's paired t (Student 1908): seeds share weights and data order;
                                                  with further variants of these seeds, randomized blocks (Fisher 1935)
    several seeds on both sides, others           Welch's t (Welch 1947), which lets both sides vary differently
    several seeds on one side                     Student's t with that side's variance for both
    one seed, and a repeat of the baseline        batch means (Conway 1963) of the repeat's loss over the baseline's
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

CONFIDENCE = 0.95
# Windows of a repeat's second half whose mean differences count as independent.
NUM_BATCHES = 10


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's algorithm."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0) or tiny)
    fraction = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return fraction


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function (DLMF 8.17.2)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges fast on this side of the mean; the other side is its mirror image (DLMF 8.17.4).
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


@cache
def t_quantile(confidence: float, freedom: float) -> float:
    """How many standard errors a two-sided Student interval reaches.

    Args:
        confidence: Between 0 and 1.
        freedom: Degrees of freedom, above 0, whole or not.
    """
    # P(|T| > t) = I_{ν/(ν+t²)}(ν/2, 1/2) (DLMF 8.17.11 and Abramowitz & Stegun 26.7.1), which falls with t.
    low, high = 0.0, 1.0
    while _beta(freedom / 2, 0.5, freedom / (freedom + high * high)) > 1 - confidence:
        high *= 2
    # Halves the bracket to the last digit of a float.
    for _ in range(53):
        middle = (low + high) / 2
        if _beta(freedom / 2, 0.5, freedom / (freedom + middle * middle)) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A difference of means, and the half width of its confidence interval; None where nothing tells the noise."""

    value: float
    half_width: float | None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Of the population, from a sample of two or more."""
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _residual_variance(variants: Sequence[Sequence[float]]) -> tuple[float, int]:
    """What neither the variant nor the seed explains, and its degrees of freedom: an analysis of variance in blocks.

    All variants count as equally noisy. Of two, the variance is half that of their differences, seed by seed.

    Args:
        variants: Two or more, each with one value for each of the same two or more seeds.
    """
    seeds = [_mean(values) for values in zip(*variants, strict=True)]
    mean = _mean(seeds)
    squares = [
        (value - of_seed - _mean(values) + mean) ** 2
        for values in variants
        for value, of_seed in zip(values, seeds, strict=True)
    ]
    freedom = (len(variants) - 1) * (len(seeds) - 1)
    return math.fsum(squares) / freedom, freedom


def difference(
    ours: Sequence[float], theirs: Sequence[float], *, paired: bool, beside: Sequence[Sequence[float]] = ()
) -> Estimate:
    """The mean of `ours` over that of `theirs`, with the interval of the module's table.

    Args:
        ours: One value a run, at least one.
        theirs: Likewise; in the same order of seeds where `paired`.
        paired: Whether each run of ours shares its seed with that of theirs.
        beside: Of further variants, likewise in this order; they tell the noise, too, where `paired`.
    """
    value = _mean(ours) - _mean(theirs)
    if paired:
        variance, num_free = _residual_variance([ours, theirs, *beside])
        return Estimate(value=value, half_width=t_quantile(CONFIDENCE, num_free) * math.sqrt(2 * variance / len(ours)))
    sides = [side for side in (ours, theirs) if len(side) > 1]
    if not sides:
        return Estimate(value=value, half_width=None)
    if len(sides) == 1:
        (side,) = sides
        error = math.sqrt(_variance(side) * (1 / len(ours) + 1 / len(theirs)))
        return Estimate(value=value, half_width=t_quantile(CONFIDENCE, len(side) - 1) * error)
    shares = [_variance(side) / len(side) for side in sides]
    if not sum(shares):
        return Estimate(value=value, half_width=0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = sum(shares) ** 2 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, sides, strict=True))
    return Estimate(value=value, half_width=t_quantile(CONFIDENCE, freedom) * math.sqrt(sum(shares)))


def noise_of(differences: Sequence[float]) -> float:
    """How far a run lies from itself: the half width for one difference whose true value is zero.

    Args:
        differences: Between a run and its repeat, one for each window; taken as independent, which differences that
            last longer than a window are not: the noise is then too small.
    """
    return t_quantile(CONFIDENCE, len(differences)) * math.sqrt(_mean([each * each for each in differences]))


class Smoothed:
    """A loss curve averaged over a window: at x, the mean of the loss from x − window/2 to x + window/2.

    A logged loss counts for everything since the point before, so curves that were logged at different intervals are
    averaged over the same tokens.

    Args:
        points: Two or more positions (tokens or steps), rising, with their losses.
        window: Width, in the unit of the positions.
    """

    def __init__(self, points: Sequence[tuple[float, float]], window: float) -> None:
        self._edges = [max(0.0, 2 * points[0][0] - points[1][0]), *(float(x) for x, _ in points)]
        self._sums = [0.0]
        for (before, x), (_, loss) in zip(pairwise(self._edges), points, strict=True):
            self._sums.append(self._sums[-1] + (x - before) * loss)
        self._half = window / 2

    @property
    def start(self) -> float:
        """The first position around which there is a whole window."""
        return self._edges[0] + self._half

    @property
    def end(self) -> float:
        """The last one."""
        return self._edges[-1] - self._half

    def at(self, x: float) -> float:
        """The smoothed loss at a position from `start` to `end`."""
        return (self._integral(x + self._half) - self._integral(x - self._half)) / (2 * self._half)

    def _integral(self, x: float) -> float:
        return interpolate(self._edges, self._sums, x)

    def first_at(self, level: float, grid: Sequence[float]) -> float | None:
        """The first position at which the smoothed loss has come down to a level.

        Args:
            level: A loss.
            grid: Rising positions at which to look; between two of them the loss is taken as a line.

        Returns:
            None where the loss stays above, or is below from the beginning.
        """
        above = self.at(grid[0])
        if above <= level:
            return None
        for before, x in pairwise(grid):
            below = self.at(x)
            if below <= level:
                return before + (x - before) * (above - level) / (above - below)
            above = below
        return None


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The line through the points at `x`, level beyond the first and the last; where xs repeat, the later counts."""
    if x <= xs[0]:
        return ys[0] if x < xs[0] else ys[bisect_right(xs, x) - 1]
    if x >= xs[-1]:
        return ys[-1]
    after = bisect_left(xs, x)
    share = (x - xs[after - 1]) / (xs[after] - xs[after - 1])
    return ys[after - 1] + share * (ys[after] - ys[after - 1])


def grid_between(first: float, last: float, num_points: int) -> list[float]:
    """Evenly spaced positions, both ends included."""
    return [first + (last - first) * index / (num_points - 1) for index in range(num_points - 1)] + [last]
