"""Helpers of the charts."""

import numpy as np

from open_clip_zerovl.report.plot import moving_average


def test_a_moving_average_takes_fewer_neighbours_at_the_ends_and_leaves_out_what_diverged():
    assert moving_average(np.array([1.0, 2, 6]), 1).tolist() == [1.5, 3, 4]
    assert moving_average(np.array([1.0]), 3).tolist() == [1]
    found = moving_average(np.array([1.0, np.nan, 3, np.inf, np.nan, np.nan]), 1)
    np.testing.assert_array_equal(found, [1, 2, 3, 3, np.nan, np.nan])
