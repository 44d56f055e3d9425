"""Schedules and cuts: pure, balanced, covering (invariants 2 and 3), as properties and at the size of a cluster."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import stream
from open_clip_zerovl.data.sample_stream import SliceReader
from open_clip_zerovl.sampling import STRATEGIES
from open_clip_zerovl.sampling.assignment import (
    Assignment,
    LocalOrder,
    draw_without_replacement,
    hypergeometric,
)
from open_clip_zerovl.sampling.schedule import (
    MIXED,
    Batching,
    ShardSlice,
    epoch_slices,
    few_steps,
    slice_range,
    source_schedule,
)

batchings = st.builds(
    Batching,
    micro_batch=st.integers(1, 8),
    dga_steps=st.integers(1, 4),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 5),
)


def counts_of(dealt: Assignment) -> np.ndarray:
    """(T*K, W, S) samples of each source in every micro-batch, put together from all readers' own."""
    workers, ranks = dealt.batching.workers, dealt.batching.world_size
    counts = np.full((dealt.micro_batches, ranks, len(dealt.schedule.taken)), -1)
    for rank in range(ranks):
        for worker in range(workers):
            rows = list(dealt.counts(rank, worker))
            counts[worker::workers, rank] = np.reshape(rows, (-1, counts.shape[2]))
    return counts


def shards_of(rng: np.random.Generator, total: int) -> list[int]:
    """Random shard sizes (some empty) that sum to total."""
    cuts = np.sort(rng.integers(0, total + 1, size=int(rng.integers(0, 7))))
    return np.diff([0, *cuts.tolist(), total]).tolist()


def check_readers(
    dealt: Assignment, counts: np.ndarray, sizes: list[int], seed: int, *, step: int
) -> None:
    """The samples that readers deliver, from any step; their slices are each source's stretch of its endless cycle."""
    schedule, batching = dealt.schedule, dealt.batching
    readers = [
        (rank, worker) for rank in range(batching.world_size) for worker in range(batching.workers)
    ]
    quotas, before = [], np.zeros(len(sizes), dtype=int)
    for rank, worker in readers:
        assert (dealt.before(rank, worker) == before).all()
        mine = counts[worker :: batching.workers, rank]
        assert (dealt.quota(rank, worker) == mine.sum(axis=0)).all()
        done = counts[worker : step * batching.dga_steps : batching.workers, rank]
        assert (dealt.quota(rank, worker, step) == done.sum(axis=0)).all()
        assert np.array_equal(
            [*dealt.counts(rank, worker, step)], [*mine[len(done) :]]
        )  # any step, without those before
        assert dealt.of_reader(worker) == len(mine)
        quotas.append(mine.sum(axis=0))
        before = before + quotas[-1]
    rng = np.random.default_rng(seed)
    for source, size in enumerate(sizes):
        shards = shards_of(rng, size)
        slices = epoch_slices(shards, schedule, source)
        positions: list[int] = []
        low = 0
        for quota in (int(quota[source]) for quota in quotas):
            for piece in slice_range(slices, low, quota):
                # the number of the sample in the source, and of the pass over it
                assert piece.position % size == sum(shards[: piece.shard]) + piece.start
                positions += range(piece.position, piece.position + len(piece))
            low += quota
            assert len(positions) == low
        begin = schedule.epoch * int(schedule.taken[source])
        assert sorted(positions) == [*range(begin, begin + int(schedule.taken[source]))]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    batching=batchings,
    sizes=st.lists(st.integers(3, 300), min_size=1, max_size=4),
    strategy=st.sampled_from(STRATEGIES),
    weights=st.none()
    | st.lists(st.sampled_from([0.5, 0.6, 1.0, 1.5, 2.0]), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
    leaf=st.sampled_from([1, 16, 100_000]),
    at_once=st.sampled_from([7, 1_000_000]),
    share=st.floats(0, 1),
)
def test_every_sample_once_but_for_the_stated_remainder(
    batching, sizes, strategy, weights, seed, epoch, leaf, at_once, share
):
    """For each strategy: pure over ranks and micro-batches, any step entered; a weight means passes."""
    n, mixed = batching.effective_batch, strategy in ("random", "proportional")
    sizes = [*sizes, 2 * n + 30] if mixed else [2 * n + size for size in sizes]
    weights = np.array(weights or [1.0] * 5)[: len(sizes)]
    order = np.random.default_rng(seed).permutation(len(sizes))
    schedule = source_schedule(
        sizes, n, seed=seed, epoch=epoch, strategy=strategy, weights=weights, source_order=order
    )
    wanted = weights * sizes
    steps = np.bincount(
        schedule.source_of_step[schedule.source_of_step != MIXED], minlength=len(sizes)
    )
    whole = np.floor(wanted / n + 1e-9)
    assert (steps == (0 if mixed else whole)).all()
    assert schedule.steps == (int(wanted.sum() / n + 1e-9) if mixed else whole.sum())
    assert schedule.taken.sum() == schedule.steps * n and (schedule.taken < wanted + 1).all()
    if strategy == "sequential":
        assert [*dict.fromkeys(schedule.source_of_step.tolist())] == order.tolist()
    dealt = Assignment(schedule, batching, leaf_samples=leaf)
    counts = counts_of(dealt)
    assert counts.shape == (schedule.steps * batching.dga_steps, batching.world_size, len(sizes))
    assert (counts.sum(axis=2) == batching.micro_batch).all()
    assert (counts.sum(axis=(0, 1)) == schedule.taken).all()
    per_step = counts.reshape(schedule.steps, -1, len(sizes)).sum(axis=1)
    for source, row in zip(schedule.source_of_step.tolist(), per_step, strict=True):
        assert source == MIXED or (row[source] == n and row.sum() == n)
    if strategy == "proportional":
        shares = schedule.taken / schedule.taken.sum()
        off = np.abs(counts - batching.micro_batch * shares)
        assert (off <= 1 + len(sizes) * shares).all()
    with mock.patch("open_clip_zerovl.sampling.assignment._STEPS_AT_ONCE", at_once):
        check_readers(dealt, counts, sizes, seed, step=int(share * schedule.steps))


def test_a_sentence_names_sources_that_fill_few_steps():
    def sentence(sizes, strategy="debiased"):
        schedule = source_schedule(sizes, 64, strategy=strategy, seed=0, epoch=0)
        return few_steps(schedule, ["large", "small", "tiny"][: len(sizes)])

    assert sentence([6400, 640, 64]).startswith(
        "2 of 3 sources fill fewer than 20 steps of 64 an epoch: tiny (1), small (10). Debiased sampling may then cost"
    )
    quiet = sentence([6400, 1280]), sentence([6400, 640, 64], "random"), sentence([64])
    assert quiet == (None,) * 3


@pytest.mark.parametrize("leaf", [4, 24])
def test_random_batches_are_distributed_as_a_shuffled_deck(leaf):
    """Joint counts of two micro-batches, of different readers and of one, against a real deck; in small leaves and in one."""
    sizes, rounds, batching = [12, 8, 4], 2000, Batching(4, workers=2)
    rng = np.random.default_rng(0)

    def table(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.bincount(first * 5 + second, minlength=25).astype(float)

    decks = np.stack(
        [rng.permutation(np.repeat(np.arange(3), sizes)).reshape(6, 4) for _ in range(rounds)]
    )
    expected = (decks == 0).sum(axis=2)
    drawn = np.empty((rounds, 6), dtype=int)
    for seed in range(rounds):
        schedule = source_schedule(sizes, 4, strategy="random", seed=seed, epoch=0)
        drawn[seed] = counts_of(Assignment(schedule, batching, leaf_samples=leaf))[:, 0, 0]
    for one, other in ((0, 2), (0, 1), (4, 5)):  # numbers 0, 2 and 4 are one reader's
        theirs, ours = (
            table(expected[:, one], expected[:, other]),
            table(drawn[:, one], drawn[:, other]),
        )
        cells = theirs + ours > 10
        assert cells.sum() >= 10
        independent = table(expected[:, one], rng.permutation(expected[:, other]))  # the control
        found, control = (
            ((theirs - drawn_table)[cells] ** 2 / (theirs + drawn_table)[cells]).sum()
            for drawn_table in (ours, independent)
        )
        # chi square: mean = cells, variance = 2 cells
        bound = cells.sum() + 3 * np.sqrt(2 * cells.sum())
        assert found < bound < control


def test_hypergeometric_draws_beyond_numpy(monkeypatch):
    """Inversion has numpy's distribution where both draw, and the right mean and variance at 12.8 billion things."""
    rng = np.random.default_rng(1)
    theirs = np.bincount(rng.hypergeometric(30, 50, 20, size=5_000), minlength=21).astype(float)
    good, bad, draws = 4_000_000_000, 8_800_000_000, 6_400_000_000
    values = np.array([hypergeometric(rng, good, bad, draws) for _ in range(200)], dtype=float)
    total = good + bad
    deviation = np.sqrt(draws * (good / total) * (bad / total) * ((total - draws) / (total - 1)))
    scaled = (values - draws * (good / total)) / deviation
    assert abs(scaled.mean()) < 4 / np.sqrt(200) and 0.75 < scaled.var() < 1.3
    assert draw_without_replacement(rng, np.array([good, 0, bad]), draws).sum() == draws
    monkeypatch.setattr("open_clip_zerovl.sampling.assignment._EXACT_BELOW", 0)
    ours = np.bincount(
        [hypergeometric(rng, 30, 50, 20) for _ in range(5_000)], minlength=21
    ).astype(float)
    cells = theirs + ours > 10
    assert ((theirs - ours)[cells] ** 2 / (theirs + ours)[cells]).sum() < cells.sum() + 5 * np.sqrt(
        2 * cells.sum()
    )
    assert [
        hypergeometric(rng, *case) for case in ((5, 0, 3), (0, 5, 3), (5, 5, 10), (5, 5, 0))
    ] == [3, 0, 5, 0]


def test_a_billion_pairs_take_no_array_of_them():
    """`--sampling random` at 12.8 billion pairs, 1,024 ranks x 8 workers: the middle of an epoch in megabytes."""
    sizes = [800_000_000, 4_000_000_000, 8_000_000_000]
    batching = Batching(64, 1, 1024, 8)
    schedule = source_schedule(sizes, batching.effective_batch, strategy="random", seed=0, epoch=1)
    dealt = Assignment(schedule, batching)
    step = schedule.steps // 2
    tracemalloc.start()
    row = next(dealt.counts(511, 3, step))
    before, quota, done = dealt.before(511, 3), dealt.quota(511, 3), dealt.quota(511, 3, step)
    slices = epoch_slices([50_000] * 160_000, schedule, 2)
    mine = slice_range(slices, int(before[2]), int(quota[2]))
    order = LocalOrder(mine.samples, 3000, lambda block: np.random.default_rng([1, block]))
    next(order.chunks(int(done[2])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        row.sum() == 64
        and abs(done.sum() / quota.sum() - 0.5) < 1e-3
        and quota.sum() == 64 * dealt.of_reader(3)
    )
    assert len(mine) <= quota[2] // 50_000 + 2  # whole shards but for the first and the last
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "count, window", [(40, 60), (9_000, 50), (20_000, 6_000), (4_096, 4_095), (1, 1), (0, 5)]
)
def test_a_local_order_is_a_bounded_permutation_entered_anywhere(count, window):
    order = LocalOrder(count, window, lambda block: np.random.default_rng([7, block]))
    whole = np.concatenate([*order.chunks(), np.zeros(0, dtype=int)])
    assert sorted(whole.tolist()) == list(range(count)) and len(order) == count
    if count > window:
        moved = np.abs(whole - np.arange(count))
        assert moved.max() <= window and moved.mean() > window / 9
    for begin in {0, 1, count // 3, count // 2, count - 1} & set(range(count)):
        assert np.array_equal(np.concatenate([*order.chunks(begin)]), whole[begin:])
        lowest = order.lowest(begin)
        assert lowest == whole[begin:].min()
        assert order.passed(begin, lowest) == {
            item for item in whole[:begin].tolist() if item >= lowest
        }


@pytest.mark.parametrize(
    ("sizes", "arguments", "words"),
    [
        (
            [100, 10],
            {"strategy": "debiased", "names": ["a", "tiny"]},
            r"'tiny' gives 10 samples .* less than one effective batch of 16; lower --batch-size",
        ),
        (
            [5, 5],
            {"strategy": "random"},
            "an epoch has 10 samples, fewer than one effective batch of 16",
        ),
        ([100], {"strategy": "sorted"}, "unknown sampling strategy 'sorted'"),
        (
            [64, 32, 48],
            {"strategy": "sequential", "source_order": [2, 0]},
            "must name each of the 3 sources once",
        ),
    ],
)
def test_impossible_schedules_are_refused(sizes, arguments, words):
    with pytest.raises(UserError, match=words):
        source_schedule(sizes, 16, seed=0, epoch=0, **arguments)


def test_cut_refuses_what_does_not_add_up():
    slices = epoch_slices([10], source_schedule([10], 10, strategy="random", seed=0, epoch=0), 0)
    for low, length in ((4, 8), (-1, 4), (2, -1)):
        with pytest.raises(ValueError, match="add up"):
            slice_range(slices, low, length)


def test_resampling_draws_with_replacement_in_proportion_to_shard_sizes():
    """No position, which decides a sample's augmentation, comes again, and a part of a shard may begin anywhere."""
    pieces, drawn = [], 0
    for epoch in range(4):
        schedule = source_schedule(
            [300], 30, strategy="debiased", seed=0, epoch=epoch, weights=[30.1]
        )
        pieces += epoch_slices([30, 270], schedule, 0, resampled=True)
        drawn += schedule.taken.sum()
    positions = {piece.position + sample for piece in pieces for sample in range(len(piece))}
    assert len(positions) == drawn == sum(map(len, pieces)) == 4 * 9030
    assert all(piece.position % 300 == [0, 30][piece.shard] + piece.start for piece in pieces)
    assert abs(np.mean([piece.shard for piece in pieces]) - 0.9) < 0.1
    assert len({piece.start for piece in pieces}) > 1  # also those of each epoch's last part


def test_steps_and_shards_come_in_another_order_in_each_epoch_and_source_and_with_each_seed():
    """Otherwise only the shuffle window would distinguish epochs, and neighbours in a set stay neighbours."""
    steps, shards, decks = [], [], []
    for seed, epoch, source in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
        schedule = source_schedule([600, 600], 30, strategy="debiased", seed=seed, epoch=epoch)
        steps.append(tuple(schedule.source_of_step.tolist()))
        shards.append(tuple(piece.shard for piece in epoch_slices([10] * 60, schedule, source)))
        mixed = source_schedule([600, 600], 30, strategy="random", seed=seed, epoch=epoch)
        decks.append(counts_of(Assignment(mixed, Batching(30))).tobytes())
    for orders in (steps, decks):
        assert len(set(orders[:3])) == 3 and orders[0] == orders[3] == orders[4]
    assert len(set(shards[:4])) == 4 and shards[0] == shards[4]
    assert all(sorted(order) == list(range(60)) for order in shards)


def test_no_stream_is_drawn_from_twice_on_the_way_to_a_leaf(monkeypatch):
    """A node of the tree and its first half would else draw the same numbers, and their counts would go together."""
    keys = []
    monkeypatch.setattr(
        "open_clip_zerovl.sampling.assignment.stream", lambda *key: keys.append(key) or stream(*key)
    )
    schedule = source_schedule([64, 32], 4, strategy="random", seed=0, epoch=0)
    next(Assignment(schedule, Batching(4), leaf_samples=4).counts(0, 0))
    assert len(keys) >= 5 and len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("sizes", "effective_batch", "options", "taken"),
    [
        # 0.29 * 100 is 28.999999999999996, 0.1 * 4 + 0.6 * 6 is 3.9999999999999996: no step is lost
        ([100, 290], 29, {"weights": [0.29, 1]}, [29, 290]),
        ([4, 6], 4, {"weights": [0.1, 0.6], "strategy": "random"}, [0, 4]),
        ([900, 100], 50, {"epoch_samples": 500}, [450, 50]),
        ([640, 360], 50, {"epoch_samples": 500}, [300, 200]),  # 6.4 and 3.6 steps
    ],
)
def test_weights_and_the_length_of_an_epoch(sizes, effective_batch, options, taken):
    options = {"strategy": "debiased", **options}
    schedule = source_schedule(sizes, effective_batch, seed=0, epoch=0, **options)
    assert schedule.taken.tolist() == taken and schedule.steps == sum(taken) // effective_batch


def test_every_lost_sample_of_every_source_draws_its_own_replacement():
    """The shards that replace 40 lost samples, of 100: different ones for another source or seed, and the same ones again."""
    slices = [ShardSlice(shard, 0, 1, shard) for shard in range(100)]

    def drawn(seed: int, index: int) -> list[int]:
        def samples(shard: int, offset: int):
            yield shard

        reader = SliceReader(SimpleNamespace(samples=samples), (), slices, index, seed)
        return [reader.substitute(slices[position], 0, 0).sample for position in range(40)]

    one = drawn(0, 0)
    assert len(set(one)) > 20 and drawn(0, 0) == one
    for another in (drawn(0, 1), drawn(1, 0)):
        assert sum(a == b for a, b in zip(one, another, strict=True)) < 8
