"""Schedules and cuts: pure, balanced, covering (invariants 2 and 3), as properties and at the size of a cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.data.schedule import (
    MIXED,
    STRATEGIES,
    Batching,
    cut,
    epoch_pieces,
    micro_batch_counts,
    owed,
    source_schedule,
)
from open_clip_zerovl.errors import UserError

batchings = st.builds(
    Batching,
    micro_batch=st.integers(1, 8),
    dga_steps=st.integers(1, 4),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 5),
)


def shards_of(rng: np.random.Generator, total: int) -> list[int]:
    """Random shard sizes (some empty) that sum to total."""
    cuts = np.sort(rng.integers(0, total + 1, size=int(rng.integers(0, 7))))
    return np.diff([0, *cuts.tolist(), total]).tolist()


@settings(max_examples=60, deadline=None)
@given(
    batching=batchings,
    extra=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
def test_every_sample_once_but_for_the_stated_remainder(batching, extra, strategy, seed, epoch):
    n = batching.effective_batch
    sizes = [n + more for more in extra]
    schedule = source_schedule(sizes, n, strategy=strategy, seed=seed, epoch=epoch)
    counts = micro_batch_counts(schedule, batching)
    assert counts.shape == (schedule.steps * batching.dga_steps, batching.world_size, len(sizes))
    assert (counts.sum(axis=2) == batching.micro_batch).all()
    assert (counts.sum(axis=(0, 1)) == schedule.taken).all()
    if strategy != "random":
        assert (np.array(sizes) - schedule.taken < n).all()  # the remainder is less than one effective batch a source
        per_step = counts.reshape(schedule.steps, -1, len(sizes)).sum(axis=1)
        assert ((per_step > 0).sum(axis=1) == 1).all()  # pure over ranks and micro-batches
    else:
        assert sum(sizes) - schedule.taken.sum() < n
        assert (schedule.taken <= sizes).all()
        assert (schedule.source_of_step == MIXED).all()
    quotas = owed(counts, batching.workers)
    rng = np.random.default_rng(seed)
    for source, size in enumerate(sizes):
        shards = shards_of(rng, size)
        pieces = epoch_pieces(shards, schedule, source)
        readers = quotas[:, :, source].ravel().tolist()
        seen: list[int] = []
        for reader, quota in enumerate(readers):
            mine = cut(pieces, readers, reader)
            assert sum(map(len, mine)) == quota
            for piece in mine:
                offset = sum(shards[: piece.shard])
                assert (piece.position - offset - piece.start) % size == 0  # the position is the sample's own
                seen.extend(offset + index for index in range(piece.start, piece.stop))
        assert len(seen) == len(set(seen)) == schedule.taken[source]


def test_the_remainder_is_the_first_of_the_next_epoch():
    sizes, n = [70], 32
    left_out = None
    for epoch in range(4):
        schedule = source_schedule(sizes, n, strategy="debiased", seed=1, epoch=epoch)
        pieces = epoch_pieces([30, 40], schedule, 0)
        seen = {[0, 30][piece.shard] + index for piece in pieces for index in range(piece.start, piece.stop)}
        if left_out is not None:
            assert left_out <= seen
        left_out = set(range(70)) - seen
        assert len(left_out) == 6


@pytest.mark.parametrize("weight, passes", [(2.0, (2, 2)), (0.5, (0, 1)), (1.5, (1, 2))])
def test_a_weight_means_passes(weight, passes):
    """Weight w shows a sample floor(w) or ceil(w) times an epoch, and over the epochs every sample equally often."""
    size, n = 64, 16
    total = np.zeros(size, dtype=int)
    for epoch in range(2):
        schedule = source_schedule([size], n, strategy="debiased", seed=0, epoch=epoch, weights=[weight])
        seen = np.zeros(size, dtype=int)
        for piece in epoch_pieces([20, 44], schedule, 0):
            seen[[0, 20][piece.shard] + np.arange(piece.start, piece.stop)] += 1
        assert set(seen) <= set(passes)
        total += seen
    assert set(total) == {int(2 * weight)}


def test_schedules_repeat_and_differ_by_seed_and_epoch():
    def order(seed, epoch):
        return source_schedule([640, 320], 16, strategy="debiased", seed=seed, epoch=epoch).source_of_step.tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)


def test_random_sampling_mixes_sources_in_proportion():
    """Composition of a batch as without replacement: mean in proportion, variance hypergeometric (negative control)."""
    batching = Batching(64)
    schedule = source_schedule([64_000, 32_000], 64, strategy="random", seed=0, epoch=0)
    first = micro_batch_counts(schedule, batching)[:, 0, 0]
    assert abs(first.mean() - 64 * 2 / 3) < 1e-9
    assert abs(first.var() - 64 * 2 / 9) < 2.0
    assert source_schedule([64_000, 32_000], 64, strategy="debiased", seed=0, epoch=0).source_of_step.max() == 1


def test_at_the_size_of_a_cluster():
    """1,024 ranks x 8 workers x K=16 on 14.23 M pairs: pure, balanced, covering, by arithmetic alone."""
    batching = Batching(2, 16, 1024, 8)
    sizes = [860_000, 500_000, 2_810_000, 10_060_000]
    schedule = source_schedule(sizes, batching.effective_batch, strategy="debiased", seed=0, epoch=3)
    quotas = owed(micro_batch_counts(schedule, batching), batching.workers)
    assert (quotas == quotas[:1]).all()  # every rank owes the same
    assert (quotas.sum(axis=(0, 1)) == schedule.taken).all()
    emitted = quotas.sum(axis=2)
    assert (emitted.max(axis=1) - emitted.min(axis=1) <= batching.micro_batch).all()
    shards = [10_000] * 1006
    readers = quotas[:, :, 3].ravel().tolist()
    pieces = epoch_pieces(shards, schedule, 3)
    for reader in (0, 1, 4095, 8191):
        mine = cut(pieces, readers, reader)
        assert sum(map(len, mine)) == readers[reader]
        assert len(mine) <= 2  # a boundary shard is read by its neighbours, nothing else twice


def test_epoch_length_can_be_set():
    schedule = source_schedule([900, 100], 50, strategy="debiased", seed=0, epoch=0, epoch_samples=500)
    assert schedule.steps == 10 and schedule.taken.tolist() == [450, 50]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(sizes=[100, 10], effective_batch=16, strategy="debiased"), "less than one effective batch of 16"),
        (dict(sizes=[5, 5], effective_batch=16, strategy="random"), "zero steps"),
        (dict(sizes=[100], effective_batch=16, strategy="sorted"), "unknown sampling strategy 'sorted'"),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        source_schedule(seed=0, epoch=0, **arguments)


def test_cut_refuses_quotas_that_do_not_add_up():
    with pytest.raises(ValueError, match="add up"):
        cut(epoch_pieces([10], source_schedule([10], 10, strategy="random", seed=0, epoch=0), 0), [4, 4], 0)


def test_sequential_takes_one_source_after_the_other():
    schedule = source_schedule([64, 32, 48], 16, strategy="sequential", seed=0, epoch=1, source_order=[2, 0, 1])
    assert schedule.source_of_step.tolist() == [2] * 3 + [0] * 4 + [1] * 2
    with pytest.raises(UserError, match="must name each of the 3 sources once"):
        source_schedule([64, 32, 48], 16, strategy="sequential", seed=0, epoch=1, source_order=[2, 0])


def test_iid_draw_is_proportional_in_the_mean_and_covers_without_gaps():
    """The released code's draw: counts vary by epoch, and each epoch goes on where the last one stopped."""
    sizes, n = [640, 1280], 16
    taken, next_begin = [], np.zeros(2, dtype=int)
    for epoch in range(50):
        schedule = source_schedule(sizes, n, strategy="debiased", draw="iid", seed=3, epoch=epoch)
        assert schedule.steps == 120 and (schedule.begin == next_begin).all()
        next_begin = schedule.begin + schedule.taken
        taken.append(schedule.taken[0])
    assert abs(np.mean(taken) - 640) < 4 * np.sqrt(120 * 2 / 9 / 50) * n
    assert np.std(taken) > 0  # negative control: the exact draw never varies


def test_resampling_draws_with_replacement_in_proportion_to_shard_sizes():
    schedule = source_schedule([300], 30, strategy="debiased", seed=0, epoch=0, weights=[100])
    pieces = epoch_pieces([100, 200], schedule, 0, resampled=True)
    assert sum(map(len, pieces)) == 30_000
    drawn = np.array([piece.shard for piece in pieces])
    assert abs((drawn == 1).mean() - 2 / 3) < 0.12 and len({piece.position for piece in pieces}) == len(pieces)
    assert all(piece.position % 300 == [0, 100][piece.shard] + piece.start for piece in pieces)
