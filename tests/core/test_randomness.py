"""Random streams: the numbers of a seed, and that no two purposes draw the same numbers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from open_clip_zerovl.core.randomness import Purpose, seed_step, seeded, stream, stream_seed


def test_no_two_purposes_and_no_two_keys_share_a_stream():
    keys = [
        (),
        *((a,) for a in range(30)),
        *itertools.product(range(12), repeat=2),
        (1, 2, 3),
        (12, 3, 0),
        (0, 0, 0),
    ]
    keys += [(2**32,), (2**32, 0), (0, 1, 0), (1, 23), (12, 3)]
    names = {(seed, purpose, *key) for seed in (0, 1, 2**40) for purpose in Purpose for key in keys}
    assert len({stream_seed(*name) for name in names}) == len(names) > 5000
    assert all(0 <= stream_seed(*name) < 2**64 for name in names)


def test_a_seed_means_the_same_in_every_release():
    """These numbers change with STREAMS_VERSION only, since a run resumed in mid-epoch counts on them."""
    assert stream_seed(0, Purpose.IMAGE, 3, 1_000_000_007) == 4203890110358812737
    assert stream(7, Purpose.MIXUP, 5).integers(0, 1000, 4).tolist() == [697, 598, 80, 127]


def test_a_steps_randomness_depends_on_seed_step_and_rank_alone():
    def draw(*key):
        seed_step(*key)
        return torch.rand(3)

    assert torch.equal(draw(0, 5, 1), draw(0, 5, 1))
    assert (
        len({tuple(draw(*key).tolist()) for key in ((0, 5, 1), (0, 5, 0), (0, 6, 1), (1, 5, 1))})
        == 4
    )


def test_seeded_leaves_the_process_as_it_was():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with seeded(5):
        first = (torch.rand(1).item(), random.random(), np.random.rand())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    with seeded(5):
        assert first == (torch.rand(1).item(), random.random(), np.random.rand())
