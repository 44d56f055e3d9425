"""Stored features: resumed to the same bits, read again by a second call; pairs without copies of held-out pictures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.align.rows import (
    Features,
    Sources,
    caption_identity,
    embed_tower,
    epoch_captions,
    epoch_order,
    make_pairs,
    open_sources,
    shared_ids,
    unit_scale,
)
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.features.sources import SourceSamples, cut_captions
from support.tars import write_tar

CPU = torch.device("cpu")


@pytest.fixture
def sources(home):
    return open_sources(f"a={home / 'a'}::b={home / 'b'}", f"held={home / 'held'}")


@pytest.fixture
def towers(home):
    return [open_tower(f"timm:{home / 'timm'}", "image"), open_tower(f"hf:{home / 'bert'}", "text")]


def contents(store):
    return torch.cat([*store.blocks()]).numpy().tobytes(), store.ids.tobytes()


def test_rows_of_captions_stay_with_their_samples_when_the_data_change(home, towers, tmp_path):
    """A sample has two captions, so that its place among the samples is not that of its captions."""
    a, b = (f"{name}={home / name}" for name in "ab")
    for data, held in ((a, ""), (f"{b}::{a}", f"held={home / 'held'}"), (f"{a}::{b}", "")):
        opened = open_sources(data, held)
        for tower in towers:
            again = embed_tower(tower, opened, tmp_path / "rows", device=CPU)
            anew = embed_tower(tower, opened, tmp_path / data[:1] / str(len(data)), device=CPU)
            assert again.missing == [] and contents(again) == contents(anew)


def test_a_sample_is_read_by_its_number(sources, tmp_path):
    for side, each in (("image", 1), ("text", 2)):
        samples = SourceSamples(sources.opened, side)
        begins = np.cumsum([0, *samples.counts])
        every = [
            (begins[part] + row, shown)
            for part in range(len(samples.counts))
            for row, shown in samples.read(part)
        ]
        assert [row for row, _ in every] == [*range(140 * each)]
        for number in (0, 29, 30, 65, 139):
            assert samples.sample(number) == every[each * number : each * (number + 1)]
    write_tar(tmp_path / "bad" / "0.tar", [("0.png", b"no picture"), ("0.txt", b"a red house")])
    with pytest.raises(UserError, match=r"sample '0' in .*remove the sample"):
        SourceSamples(open_sources(f"bad={tmp_path / 'bad'}", "").opened, "image").sample(0)


def test_other_weights_of_the_same_name_get_rows_of_their_own(sources, towers, tmp_path):
    first = embed_tower(towers[1], sources, tmp_path, device=CPU)
    with torch.no_grad():
        next(towers[1].module.parameters()).mul_(2.0)
    second = embed_tower(towers[1], sources, tmp_path, device=CPU)
    assert first.folder != second.folder and contents(first) != contents(second)


def counted_sources(counts, captions, training):
    """Sources of these numbers of samples, each sample with this number of captions."""
    made = [Source(f"s{i}", (f"{i}.tar",), (count,)) for i, count in enumerate(counts)]
    opened = Sources(tuple(made), training)
    opened.__dict__["starts"] = np.cumsum([0, *captions])
    return opened


def test_pairs_leave_out_lost_samples_and_copies_of_held_out_pictures():
    """Six samples trained on, three held out; caption rows: sample 1 has two."""
    sources = counted_sources([4, 2, 3], [1, 2, 1, 1, 1, 1, 1, 1, 1], training=2)
    pictures = np.array(
        [10, 11, 0, 13, 14, 20, 20, 21, 20]
    )  # 5 is a copy of held-out ones, 2 is lost, 6 and 8 are one picture
    captions = np.array(
        [1, 2, 0, 4, 0, 5, 6, 7, 8, 9]
    )  # the second caption of 1 is lost, the only one of 3, too
    pairs = make_pairs(sources, pictures, captions, seed=0)
    assert (
        pairs.images.tolist() == [0, 1, 4] and pairs.sizes == [2, 1] and pairs.names == ["s0", "s1"]
    )
    assert pairs.texts.tolist() == [0, 1, 5] and pairs.first.tolist() == [0, 1, 2, 3]
    assert (pairs.lost, pairs.copies) == (2, 1)
    held = pairs.held_out
    assert held.images.tolist() == [6, 7] and held.texts.tolist() == [7, 9, 8]
    assert held.text_to_image.tolist() == [0, 0, 1]
    assert pairs.words().endswith(
        "2 without picture or caption left out; 1 whose picture is held out left out"
    )


def test_a_share_of_the_pictures_is_held_out_by_seed_and_not_by_place():
    generator = np.random.default_rng(0)
    ids = np.array([caption_identity(str(n)) for n in range(300)])
    captions = generator.integers(1, 1 << 60, 300)
    sources = counted_sources([200, 100], [1] * 300, training=2)
    first, again = (make_pairs(sources, ids, captions, seed=0, share=0.2) for _ in range(2))
    held = ids[first.held_out.images]
    assert 45 < len(held) < 75  # each picture by itself, at a share of 0.2
    assert again.held_out.images.tolist() == first.held_out.images.tolist()
    assert not np.isin(ids[first.images], held).any() and len(first.images) == 300 - len(held)
    order = generator.permutation(300)
    assert set(
        ids[order][make_pairs(sources, ids[order], captions, seed=0, share=0.2).held_out.images]
    ) == set(held)
    assert (
        len(
            set(held)
            & set(ids[make_pairs(sources, ids, captions, seed=1, share=0.2).held_out.images])
        )
        < len(held) // 2
    )
    with pytest.raises(UserError, match="the data has 30 pictures, too few to hold some out"):
        make_pairs(sources, ids % 30 + 1, captions, seed=0)


def test_features_are_scaled_to_a_mean_square_of_one_and_read_from_memory_or_the_map(
    sources, towers, tmp_path
):
    store = embed_tower(towers[0], sources, tmp_path, device=CPU)
    wanted = np.arange(100)
    scale = unit_scale(store, wanted)
    held, mapped = (Features(store, scale, CPU, room) for room in (None, 0))
    index = torch.tensor([7, 3, 7, 99])
    assert torch.equal(held[index], mapped[index])
    assert held[torch.from_numpy(wanted)].square().mean().sqrt().item() == pytest.approx(
        1.0, abs=1e-5
    )
    expected = torch.cat([*store.blocks()])[index].float() * held.scale
    assert torch.equal(held[index], expected)


def test_identities_are_those_that_every_tower_has():
    stores = [SimpleNamespace(ids=np.array(ids)) for ids in ([5, 6, 0, 8, 9], [5, 0, 7, 8, 9])]
    assert shared_ids(stores[:1]).tolist() == [5, 6, 0, 8, 9]
    assert shared_ids(stores).tolist() == [5, 0, 0, 8, 9]


def test_captions_that_the_context_cuts_are_counted(home, sources):
    tokenizer = open_tower(f"hf:{home / 'bert'}", "text", context_length=8).tokenizer
    # The second caption of each picture is nine tokens long, the first eight.
    assert cut_captions(tokenizer, 9, sources.opened[:2]) == (240, 0, 9)
    assert cut_captions(tokenizer, 8, sources.opened[:2]) == (240, 120, 9)
    clips = open_clip.get_tokenizer("ViT-B-32")
    assert cut_captions(clips, 8, sources.opened[:2]) == (240, 120, 9)
    tokenizer.tokenizer.pad_token = tokenizer.tokenizer.sep_token  # a text ends as it is padded
    assert cut_captions(tokenizer, 8, sources.opened[:2])[:2] == (240, 120)


def test_a_picture_that_cannot_be_read_is_left_out(home, towers, tmp_path):
    members = [("0.png", b"no picture"), ("0.txt", b"a red house"), ("1.txt", b"no picture at all")]
    write_tar(tmp_path / "bad" / "0.tar", members)
    sources = open_sources(f"a={home / 'a'}::bad={tmp_path / 'bad'}", f"held={home / 'held'}")
    ids = [embed_tower(tower, sources, tmp_path / "rows", device=CPU).ids for tower in towers]
    pairs = make_pairs(sources, *ids, seed=0)
    assert pairs.names == ["a"] and pairs.lost == sources.opened[1].num_samples > 0


# ---------------------------------------------------------------------------------------------------------------------
# The order
# ---------------------------------------------------------------------------------------------------------------------


def test_an_epoch_shows_each_sample_once_at_most_and_mixes_the_sources():
    sizes, batch = [50, 23, 31], 8
    source_of = np.repeat([0, 1, 2], sizes)
    seen = np.zeros((6, 104), int)
    for epoch in range(6):
        order = epoch_order(sizes, batch, seed=3, epoch=epoch)
        again = epoch_order(sizes, batch, seed=3, epoch=epoch)
        assert np.array_equal(order, again) and order.shape[1] == batch
        np.add.at(seen[epoch], order.ravel(), 1)
        assert all(len(set(source_of[step])) > 1 for step in order)
    assert seen.max() == 1
    # The remainder comes first in the next epoch: over epochs all samples of a source are shown equally often.
    totals = seen.sum(axis=0)
    assert all(np.ptp(totals[source_of == source]) <= 1 for source in range(3))
    orders = [epoch_order(sizes, batch, seed=seed, epoch=0) for seed in (3, 4)]
    assert not np.array_equal(*orders)


def test_captions_come_in_turn():
    first = np.array([0, 1, 4, 6])
    shown = np.array([epoch_captions(first, seed=1, epoch=epoch) for epoch in range(6)])
    assert (shown[:, 0] == 0).all()
    assert all(sorted(shown[begin : begin + 3, 1]) == [1, 2, 3] for begin in range(4))
    assert all(sorted(shown[begin : begin + 2, 2]) == [4, 5] for begin in range(5))
