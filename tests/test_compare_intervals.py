"""The statistics of a comparison against tables and calculations by hand."""

import math
import statistics

import numpy as np
import pytest

from gpt_pretrain.compare.intervals import Smoothed, difference, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, math.tan(0.95 * math.pi / 2)),
        (2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        # Abramowitz & Stegun, table 26.10.
        (3, 3.18245),
        (10, 2.22814),
        (120, 1.97993),
        (1e7, statistics.NormalDist().inv_cdf(0.975)),
    ],
)
def test_quantiles_are_those_of_tables_and_closed_forms(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, rel=2e-6)
    # Degrees of freedom of Welch's interval are not whole.
    assert t_quantile(freedom) > t_quantile(1.2 * freedom)


def test_a_paired_interval_takes_the_seeds_own_spread_out():
    # Differences 1, 2, 3: mean 2, variance 1; 4.303 · 1/√3 = 2.484.
    estimate = difference([11, 22, 33], [10, 20, 30], paired=True)
    assert (estimate.value, estimate.half_width) == (pytest.approx(2), pytest.approx(2.484, abs=1e-3))


def test_further_variants_of_the_same_seeds_tell_the_noise_too():
    # Rows 1 2 3, 1 2 6 and 4 5 6 less their means 2, 3, 5, the seeds' 2, 3, 5 and twice 10/3: residuals in thirds
    # 1 1 -2, -2 -2 4, 1 1 -2. Their squares sum up to 4, with 4 degrees of freedom: 2.776 · √(2 · 1 / 3) = 2.267.
    estimate = difference([1, 2, 6], [1, 2, 3], paired=True, beside=[[4, 5, 6]])
    assert (estimate.value, estimate.half_width) == (pytest.approx(1), pytest.approx(2.267, abs=1e-3))
    # A variant that lies elsewhere with every seed adds no noise.
    again = difference([1, 2, 6], [1, 2, 3], paired=True, beside=[[14, 15, 16]])
    assert again.half_width == pytest.approx(estimate.half_width)


def test_welchs_interval_lets_sides_vary_differently():
    # Variances 1 and 16 of three each: (1/3 + 16/3)² ÷ ((1/3)²/2 + (16/3)²/2) = 2.2490 degrees of freedom.
    estimate = difference([1, 2, 3], [6, 10, 14], paired=False)
    freedom = (17 / 3) ** 2 / ((1 / 9 + 256 / 9) / 2)
    assert freedom == pytest.approx(2.249, abs=1e-3)
    assert estimate.value == pytest.approx(-8)
    assert estimate.half_width == pytest.approx(t_quantile(freedom) * math.sqrt(17 / 3))


def test_one_side_lends_the_other_its_variance():
    # Variance 1 of three: 4.303 · √(1 + 1/3) = 4.969.
    for sides, sign in (([[5], [1, 2, 3]], 1), ([[1, 2, 3], [5]], -1)):
        estimate = difference(*sides, paired=False)
        assert (estimate.value, estimate.half_width) == (3 * sign, pytest.approx(4.969, abs=1e-3))


def test_a_smoothed_loss_is_the_mean_over_its_window():
    # From 0 to 1: 8, to 2: 6, to 4: 2 (logged late), to 5: 4.
    smoothed = Smoothed([(1, 8), (2, 6), (4, 2), (5, 4)], 2)
    assert (smoothed.start, smoothed.end) == (1, 4)
    assert [smoothed.at(x) for x in (1, 2, 3, 4)] == pytest.approx([7, 4, 2, 3])
    assert smoothed.at(1.5) == pytest.approx((8 / 2 + 6 + 2 / 2) / 2)


def test_curves_logged_at_other_intervals_smooth_to_the_same():
    fine = [(x, 10 - x / 100) for x in range(1, 1001)]
    coarse = [(x, sum(loss for at, loss in fine if x - 50 < at <= x) / 50) for x in range(50, 1001, 50)]
    for x in (100, 500, 950):
        assert Smoothed(coarse, 100).at(x) == pytest.approx(Smoothed(fine, 100).at(x))


def test_a_level_is_reached_once_between_two_points():
    falling = Smoothed([(x, 10.0 - x) for x in range(1, 10)], 1)
    grid = np.linspace(falling.start, falling.end, 50)
    # A point's loss counts for the unit before it: at x, the smoothed loss is that of x + 1/2.
    assert falling.first_at(5.0, grid) == pytest.approx(4.5)
    assert falling.first_at(0.5, grid) is None
    assert falling.first_at(20.0, grid) is None
