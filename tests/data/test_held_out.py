"""A picture is held out by itself, whatever other pictures there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import draw_held_out


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**31), st.floats(0.05, 0.5), st.lists(st.booleans(), min_size=400, max_size=400)
)
def test_other_pictures_and_their_order_decide_nothing(seed, share, chosen):
    pictures = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 400)
    held_out = set(draw_held_out(pictures, seed=seed, share=share).tolist())
    assert abs(len(held_out) - 400 * share) < 5 * np.sqrt(400 * share) + 10
    part = pictures[np.array(chosen)][::-1]
    if len(part) < 40:
        return
    of_part = set(draw_held_out(part, seed=seed, share=share).tolist())
    among = held_out & set(part.tolist())
    # Of few pictures the next ones in the order are held out, too, and of many the first ones.
    assert of_part == among if len(among) >= 10 else len(of_part) == 10 and among < of_part


def test_ten_to_a_thousand_are_held_out_in_one_order():
    pictures = np.arange(1, 30_001)
    sizes = {
        count: draw_held_out(pictures[:count], seed=3, share=0.1) for count in (50, 8_000, 30_000)
    }
    assert [len(drawn) for drawn in sizes.values()] == [10, 820, 1_000]
    with pytest.raises(UserError, match="the data has 39 pictures, too few"):
        draw_held_out(pictures[:39], seed=3, share=0.1)
