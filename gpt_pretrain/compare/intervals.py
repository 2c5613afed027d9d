"""The statistics of a comparison: smoothing and Student's t intervals.

Losses and times are compared as logarithms. Their difference is the logarithm of a ratio, so a gap of 1% means the same
at a loss of 3 and of 9, and the interval of a ratio never reaches zero. All intervals are two-sided and assume that the
logarithms of the runs' values are independent and normal. No p-value is computed.

    several seeds on both sides, the same seeds   Student's paired t (Student 1908): seeds share weights and data order;
                                                  with further variants of these seeds, randomized blocks (Fisher 1935)
    several seeds on both sides, different ones   Welch's t (Welch 1947), which lets both sides vary differently
    several seeds on one side                     Student's t with that side's variance for both
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


@cache
def t_quantile(freedom: float) -> float:
    """Half width of a two-sided Student interval in standard errors; `freedom` is at least 1 and need not be whole."""
    # With T = √ν·tan θ the density of θ is a power of its cosine (Abramowitz & Stegun 26.7):
    # P(|T| ≤ t) = 2Γ((ν+1)/2) / (√π·Γ(ν/2)) · ∫ cos^(ν−1) θ dθ, from 0 to atan(t/√ν). No quantile exceeds 12.8.
    front = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    theta, step = np.linspace(0, math.atan(12.8 / math.sqrt(freedom)), 100_001, retstep=True)
    density = front * np.cos(theta) ** (freedom - 1)
    shares = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * step)])
    return math.sqrt(freedom) * math.tan(np.interp(CONFIDENCE, shares, theta))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A difference of means and the half width of its confidence interval; None if the noise is unknown."""

    value: float
    half_width: float | None


def _residual_variance(variants: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The variance that neither variant nor seed explains, and its degrees of freedom (randomized blocks).

    Each variant has one value per seed, all with the same seeds; all count as equally noisy. For two variants it is
    half the variance of their differences, seed by seed.
    """
    seeds = list(map(fmean, zip(*variants, strict=True)))
    mean = fmean(seeds)
    squares = [
        (value - of_seed - fmean(values) + mean) ** 2
        for values in variants
        for value, of_seed in zip(values, seeds, strict=True)
    ]
    freedom = (len(variants) - 1) * (len(seeds) - 1)
    return math.fsum(squares) / freedom, freedom


def difference(
    ours: Sequence[float], theirs: Sequence[float], *, paired: bool, beside: Sequence[Sequence[float]] = ()
) -> Estimate:
    """The mean of `ours` minus that of `theirs`, one value per run, with the interval of the module's table.

    If `paired`, both have the same seeds in the same order, and so have the further variants in `beside`, which help
    to estimate the noise.
    """
    value = fmean(ours) - fmean(theirs)
    if paired:
        residual, num_free = _residual_variance([ours, theirs, *beside])
        return Estimate(value=value, half_width=t_quantile(num_free) * math.sqrt(2 * residual / len(ours)))
    sides = [side for side in (ours, theirs) if len(side) > 1]
    if not sides:
        return Estimate(value=value, half_width=None)
    if len(sides) == 1:
        (side,) = sides
        error = math.sqrt(variance(side) * (1 / len(ours) + 1 / len(theirs)))
        return Estimate(value=value, half_width=t_quantile(len(side) - 1) * error)
    shares = [variance(side) / len(side) for side in sides]
    if not sum(shares):
        return Estimate(value=value, half_width=0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = sum(shares) ** 2 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, sides, strict=True))
    return Estimate(value=value, half_width=t_quantile(freedom) * math.sqrt(sum(shares)))


class Smoothed:
    """A loss curve averaged over a window: at x, the mean of the loss from x − window/2 to x + window/2.

    A logged loss counts for everything since the previous point, so curves with different logging intervals average
    over the same tokens. `points` are two or more rising positions (tokens or steps) with their losses; `window` has
    the unit of the positions.
    """

    def __init__(self, points: Sequence[tuple[float, float]], window: float) -> None:
        where, losses = np.array(points, dtype=float).T
        self._edges = np.concatenate([[max(0.0, 2 * where[0] - where[1])], where])
        self._sums = np.concatenate([[0.0], np.cumsum(np.diff(self._edges) * losses)])
        self._half = window / 2
        # The positions with a whole window around them.
        self.start, self.end = float(self._edges[0]) + self._half, float(self._edges[-1]) - self._half

    def at(self, x: float) -> float:
        """The smoothed loss at a position from `start` to `end`."""
        before, after = np.interp([x - self._half, x + self._half], self._edges, self._sums)
        return float(after - before) / (2 * self._half)

    def first_at(self, level: float, grid: NDArray[np.float64]) -> float | None:
        """The first position at which the smoothed loss is down to a level, by linear interpolation on a rising grid.

        None if the loss stays above the level, or is not above it at the start.
        """
        losses = np.array([self.at(x) for x in grid])
        first = int(np.argmax(losses <= level))
        if first == 0:
            return None
        return float(np.interp(level, losses[[first, first - 1]], grid[[first, first - 1]]))
