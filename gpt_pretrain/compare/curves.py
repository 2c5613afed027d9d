"""Two variants compared: smoothed losses over the tokens that all runs have, gaps and times with their noise."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, geometric_mean

import numpy as np

from gpt_pretrain.compare.comparison import GapCurve, Interval, NoiseSource, RunRecord, TimeToLoss
from gpt_pretrain.compare.intervals import Estimate, Smoothed, difference

# Share of the compared tokens that a smoothed loss averages over.
WINDOW = 0.05
# One per window; fewer make no curve.
MIN_POINTS = 20
# In nats; far above any vocabulary's, and far from overflow.
_MAX_LOSS = 1e6
_NUM_GRID, _NUM_GAPS = 400, 101


class Incomparable(Exception):
    """Why two sets of runs cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Curve:
    """A run's smoothed loss over the positions that all compared runs have."""

    run: RunRecord
    positions: tuple[int, ...]
    smoothed: Smoothed

    def seed(self) -> str:
        return str(self.run.seed)

    def gpu_seconds_at(self, x: float) -> float:
        return float(np.interp(x, self.positions, self.run.training.gpu_seconds))


def diverged(run: RunRecord) -> bool:
    """Whether none of the last losses is finite; skipped steps are not in them."""
    last = run.training.losses[-max(1, len(run.training.losses) // 20) :]
    return not any(math.isfinite(loss) for loss in last)


def _seeds(runs: Sequence[RunRecord]) -> list[str]:
    return sorted(str(run.seed) for run in runs)


class Pair:
    """A variant's runs and the baseline's over the range that all of them cover; raises `Incomparable` without one.

    `beside` are the runs of further variants. Those with the same seeds and range help to estimate the noise.
    """

    def __init__(
        self,
        ours: Sequence[RunRecord],
        theirs: Sequence[RunRecord],
        beside: Sequence[Sequence[RunRecord]],
    ) -> None:
        everyone = [*ours, *theirs]
        with_tokens = all(run.training.tokens for run in everyone)

        def positions_of(run: RunRecord) -> tuple[int, ...]:
            return run.training.tokens if with_tokens else run.training.steps

        first = max(positions_of(run)[0] for run in everyone)
        last = min(positions_of(run)[-1] for run in everyone)
        if last <= first:
            raise Incomparable("the curves have one point in common" if last == first else "the curves do not overlap")

        def curve(run: RunRecord) -> _Curve:
            where = positions_of(run)
            points = [
                (x, loss)
                for x, loss in zip(where, run.training.losses, strict=True)
                if x <= last and math.isfinite(loss)
            ]
            if len(points) < MIN_POINTS:
                raise Incomparable(f"{run.name} has {len(points)} logged losses in common, fewer than {MIN_POINTS}")
            if any(not 0 < loss < _MAX_LOSS for _, loss in points):
                raise Incomparable(f"{run.name} has losses that no cross entropy has")
            if any(after <= before for before, after in pairwise(where)):
                raise Incomparable(f"{run.name} has tokens that do not rise from step to step")
            return _Curve(run=run, positions=where, smoothed=Smoothed(points, WINDOW * last))

        self.ours, self.theirs = [curve(run) for run in ours], [curve(run) for run in theirs]
        curves = [*self.ours, *self.theirs]
        self.start = max(each.smoothed.start for each in curves)
        self.end = min(each.smoothed.end for each in curves)
        if self.end <= self.start:
            raise Incomparable("the curves overlap in less than a window of smoothing")
        self.is_whole = last >= 0.98 * max(positions_of(run)[-1] for run in everyone)
        self.paired = len(ours) > 1 and all(run.seed is not None for run in ours) and _seeds(ours) == _seeds(theirs)
        if self.paired:
            self.ours.sort(key=_Curve.seed)
            self.theirs.sort(key=_Curve.seed)
        self.beside: list[list[_Curve]] = []
        for runs in beside if self.paired else ():
            spans = [positions_of(run) for run in runs]
            covers = all(span and span[0] <= first and span[-1] >= last for span in spans)
            if covers and _seeds(runs) == _seeds(ours) and not any(map(diverged, runs)):
                with suppress(Incomparable):
                    self.beside.append(sorted(map(curve, runs), key=_Curve.seed))

    @property
    def noise_from(self) -> NoiseSource:
        """What the intervals' widths come from."""
        if self.paired:
            return "paired seeds"
        if len(self.ours) > 1 or len(self.theirs) > 1:
            return "seeds"
        return "none"

    def gap_at(self, x: float) -> Estimate:
        """The logarithm of the ratio of losses at a position."""
        ours, theirs, *beside = (
            [math.log(each.smoothed.at(x)) for each in side] for side in (self.ours, self.theirs, *self.beside)
        )
        return difference(ours, theirs, paired=self.paired, beside=beside)

    def final_losses(self) -> tuple[float, float]:
        """Geometric means of ours and theirs at the end."""

        def final_loss(side: Sequence[_Curve]) -> float:
            return geometric_mean(each.smoothed.at(self.end) for each in side)

        return final_loss(self.ours), final_loss(self.theirs)

    def gap_curve(self) -> GapCurve:
        """The gap during training."""
        where = np.linspace(self.start, self.end, _NUM_GAPS)
        gaps = [relative(self.gap_at(x)) for x in where]
        run = self.theirs[0].run.training
        steps = np.interp(where, self.theirs[0].positions, run.steps)
        return GapCurve(
            steps=tuple(map(round, steps)),
            gaps=tuple(gap.value for gap in gaps),
            lows=tuple(gap.low for gap in gaps if gap.low is not None),
            highs=tuple(gap.high for gap in gaps if gap.high is not None),
        )

    def time_to_loss(self) -> TimeToLoss | None:
        """The times to the lowest loss that all runs reach; None if a run tells no times or starts below it."""
        loss = max(each.smoothed.at(self.end) for each in (*self.ours, *self.theirs))
        grid = np.linspace(self.start, self.end, _NUM_GRID)

        def times(side: Sequence[_Curve]) -> list[float] | None:
            """Logarithms; None if one is unknown."""
            known = [
                math.log(each.gpu_seconds_at(x))
                for each in side
                if each.run.training.gpu_seconds and (x := each.smoothed.first_at(loss, grid)) is not None
            ]
            return known if len(known) == len(side) else None

        ours, theirs = times(self.ours), times(self.theirs)
        if ours is None or theirs is None:
            return None
        beside = [known for side in self.beside if (known := times(side)) is not None]
        return TimeToLoss(
            loss=loss,
            baseline_gpu_s=math.exp(fmean(theirs)),
            gpu_s=math.exp(fmean(ours)),
            speedup=ratio(difference(theirs, ours, paired=self.paired, beside=beside)),
        )


def relative(gap: Estimate) -> Interval:
    """A difference of logarithms as a relative gap."""

    def expm1(log: float) -> float:
        # If a loss hardly falls, a little noise means any time at all: ratios above half a billion are infinite.
        return math.inf if log > 20 else math.expm1(log)

    if gap.half_width is None:
        return Interval(value=expm1(gap.value), low=None, high=None)
    return Interval(
        value=expm1(gap.value), low=expm1(gap.value - gap.half_width), high=expm1(gap.value + gap.half_width)
    )


def ratio(estimate: Estimate) -> Interval:
    """A difference of logarithms as a ratio."""
    gap = relative(estimate)
    if gap.low is None or gap.high is None:
        return replace(gap, value=1 + gap.value)
    return Interval(value=1 + gap.value, low=1 + gap.low, high=1 + gap.high)
