"""Durations as text."""

import pytest

from open_clip_zerovl.report.tables import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"), (0, "0 s"), (0.0858, "85.8 ms"), (0.1134, "0.113 s"), (41, "41 s"), (59.99, "60 s"), (200, "3 min 20 s"),
        (3600, "1 h"), (18_750, "5 h 12 min"), (190_000, "2 d 4 h"),
    ],
)  # fmt: skip
def test_duration(seconds, words):
    assert duration(seconds) == words
