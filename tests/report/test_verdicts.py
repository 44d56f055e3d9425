"""The verdict rule over seeds: Student's interval, Holm, the words, and the seeds that would decide."""

import math

import pytest
from scipy import stats

from open_clip_zerovl.report.verdicts import (
    ABOVE,
    BELOW,
    HIGHER,
    LOWER,
    OPEN,
    Estimate,
    seeds_to_decide,
    student,
    verdict,
)


@pytest.mark.parametrize(
    ("low", "high", "sign", "size", "words"),
    [
        (0.2, 0.9, HIGHER, BELOW, "higher, below the margin"),  # neither fact hides the other
        (0.3, 1.1, HIGHER, OPEN, "higher, size open"),
        (1.1, 2.0, HIGHER, ABOVE, "higher, above the margin"),
        (-0.9, -0.2, LOWER, BELOW, "lower, below the margin"),
        (-1.1, -0.2, LOWER, OPEN, "lower, size open"),
        (-3.0, -1.1, LOWER, ABOVE, "lower, above the margin"),
        (-0.9, 0.9, OPEN, BELOW, "sign open, below the margin"),
        (-0.2, 1.1, OPEN, OPEN, "open"),
        (-math.inf, math.inf, OPEN, OPEN, "open"),
        (math.nan, math.nan, OPEN, OPEN, "open"),
    ],
)
def test_sign_and_size_with_a_margin_of_one(low, high, sign, size, words):
    decided = verdict(Estimate((low + high) / 2, low, high), 1.0)
    assert decided == (sign, size) and str(decided) == words


def test_more_seeds_of_the_same_mean_and_scatter_keep_the_sign():
    """+0.6 with five seeds: higher. With fifteen the interval lies within the margin as well."""
    five = [0.1, 0.9, 0.6, 0.9, 0.5]
    assert verdict(student(five), 1.0) == (HIGHER, OPEN)
    assert verdict(student(five * 3), 1.0) == (HIGHER, BELOW)


def test_students_interval_is_that_of_scipy():
    values = [1.0, -2.0, 3.0, 4.0, 5.0]
    test = stats.ttest_1samp(values, 0.0)
    for level in (0.95, 0.975):
        assert student(values, level) == pytest.approx(
            (2.2, *test.confidence_interval(level), test.pvalue), rel=1e-12
        )
    alone = student([7.0])
    assert (alone.mean, alone.interval) == (7.0, None) and math.isnan(alone.p)
    assert student([2.0, 2.0]).p == 0.0 and student([0.0, 0.0]).p == 1.0
    assert student([2.0, 2.0]).interval == (2.0, 2.0)


def test_the_seeds_that_would_decide():
    """Mean 2, scatter 2: t(0.975, n - 1) * 2 / sqrt(n) falls below 2 at n = 7, where t is 2.447 and sqrt(7) 2.646."""
    assert seeds_to_decide([0.0, 2.0, 4.0], margin=0.5) == 7
    assert seeds_to_decide([-2.0, 0.0, 2.0], margin=1.0) == 18  # within the margin, at last
    assert seeds_to_decide([-20.0, 0.0, 20.0], margin=0.1) is None
