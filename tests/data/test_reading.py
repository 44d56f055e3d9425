"""An epoch entered at a step yields the same samples, bit for bit, as the uninterrupted epoch from that step on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchvision import transforms

from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.sample_stream import Placed, SampleStream
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.sampling.assignment import LocalOrder
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.shards.tar import Sample
from support import loading
from support.tars import noise_jpeg, png, write_tar

SHARDS = {"a": (90, 30), "b": (41, 41), "c": (25, 4)}


@pytest.fixture(scope="module")
def rotten(tmp_path_factory):
    """Three sources with every fifth or so sample bad, one shard truncated, one too short and one gone."""
    folder = tmp_path_factory.mktemp("rotten")
    for s, (name, (count, per_shard)) in enumerate(SHARDS.items()):
        table = {}
        for begin in range(0, count, per_shard):
            members = []
            for number in range(begin, min(begin + per_shard, count)):
                image = b"rotten" if number % 7 == 3 else noise_jpeg(number, 12, 10)
                text = b"\xff" if number % 11 == 5 else f"sample {1000 * s + number}".encode()
                members += [
                    (f"{number:04d}.jpg", image),
                    *([] if number % 13 == 7 else [(f"{number:04d}.txt", text)]),
                ]
            shard = write_tar(folder / name / f"{begin // per_shard:02d}.tar", members)
            table[shard.name] = min(per_shard, count - begin)
        (folder / name / "sizes.json").write_text(json.dumps(table))
    torn = folder / "a" / "01.tar"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size * 2 // 3])
    write_tar(folder / "c" / "02.tar", [("x.jpg", png((1, 2, 3))), ("x.txt", b"sample 2099")])
    (folder / "c" / "04.tar").unlink()
    return parse_sources(
        f"a={folder}/a/{{00..02}}.tar::b={folder}/b::c={folder}/c/{{00..06}}.tar", "a=1::b=1.5::c=2"
    )


def loader_of(sources, batching, rank=0, *, window=40, arrays=True, **options) -> MixtureLoader:
    own = [] if arrays else [lambda image: image]  # a step that takes PIL images only
    crop = transforms.Compose([transforms.RandomResizedCrop(6), *own, transforms.PILToTensor()])
    return loading.loader_of(
        sources,
        batching,
        rank=rank,
        seed=3,
        shuffle_window_samples=window,
        transform=crop,
        preprocessing={"with_origin": True},
        **options,
    )


def same(left, right) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_step_any_shape(rotten, data):
    draw = data.draw
    batching = Batching(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    strategy = draw(st.sampled_from(["debiased", "random", "sequential"]))
    loader = loader_of(
        rotten,
        batching,
        draw(st.integers(0, batching.world_size - 1)),
        window=draw(st.integers(1, 200)),
        strategy=strategy,
        arrays=draw(st.booleans()),
    )
    epoch, step = draw(st.integers(0, 3)), draw(st.integers(0, loader.num_batches))
    loader.set_epoch(epoch)
    whole = list(loader)
    lost = loader.lost
    assert sum(sum(reasons.values()) for reasons in lost.values()) > 0
    loader.set_epoch(epoch, step)
    assert same(list(loader), whole[step * batching.dga_steps :])


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_two_persistent_workers(rotten, world_size):
    """The micro-batch at which an epoch is entered falls on either worker; a half-read epoch before leaves no trace."""
    batching = Batching(2, 3, world_size, 2)
    for rank in range(world_size):
        loader = loader_of(rotten, batching, rank, workers=2)
        loader.set_epoch(1)
        whole = list(loader)
        for step in (1, 2, loader.num_batches - 1, loader.num_batches):
            loader.set_epoch(0)
            next(iter(loader))
            loader.set_epoch(1, step)
            assert same(list(loader), whole[step * 3 :])
        loader.set_epoch(2)
        assert not same(list(loader), whole)  # negative control


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({3, 4, 5, 8, 9}, [0, 1, 2, 2, 6, 6, 6, 7, 7, 7]),
        (
            {1, 2},
            [0, 0, 3, 3, 4, 5, 6, 7, 8, 9],
        ),  # the first sample is as far back as there are any
    ],
)
def test_the_nearest_good_place_replaces_a_bad_one_wherever_the_share_is_entered(bad, expected):
    raw = [
        Placed(Sample(str(i), {"txt": b"a dog", **({} if i in bad else {"png": b""})}), i)
        for i in range(10)
    ]
    slices = SimpleNamespace(
        samples=lambda first: iter(raw[first:]),
        reader=SimpleNamespace(source=Source("s", ("0.tar",), (10,))),
        epoch_slices=(),
        fail=False,
        index=0,
        seed=0,
    )
    in_turn = LocalOrder(10, 1, np.random.default_rng)
    for begin in range(10):
        share = SampleStream(slices, in_turn, begin)
        shown = [share.take(len).placed.position for _ in range(begin, 10)]
        assert shown == expected[begin:]


def test_a_sample_that_replaces_another_is_augmented_for_that_place(rotten):
    """Shown a second time in an epoch, it is another picture than at its own place."""
    shown: dict[tuple[int, int], list[torch.Tensor]] = {}
    for images, _, origin in loader_of(rotten, Batching(4)):
        for image, place in zip(images, origin.tolist(), strict=True):
            shown.setdefault(tuple(place), []).append(image)
    twice = [images for images in shown.values() if len(images) > 1]
    assert len(twice) > 10
    equal = sum(torch.equal(one, other) for one, other, *_ in twice)
    assert (
        equal <= len(twice) / 5
    )  # a picture of 12 x 10 has few crops, and two may be the same by chance
