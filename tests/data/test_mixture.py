"""The data engine on real tars: pure, exactly once, repeatable, for any shards, ranks and workers; and never a hang."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from torchvision import transforms

from open_clip_zerovl.data.mixture import content_numbers
from open_clip_zerovl.data.sample_stream import Placed, Shown, reordered
from open_clip_zerovl.sampling import STRATEGIES
from open_clip_zerovl.sampling.assignment import LocalOrder
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.shards.tar import Sample
from support import ROOT
from support.loading import epoch_of, steps_of
from support.tars import ids_of, write_source

COUNTS = {"a": 83, "b": 40, "c": 21}
FIRST = {"a": 0, "b": 1000, "c": 2000}  # disjoint ID ranges: an ID shows its source


@pytest.fixture(scope="module")
def train_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    shards = {"a": 17, "b": 40, "c": 4}
    return "::".join(
        f"{name}={write_source(folder / name, FIRST[name], count, shards[name])}"
        for name, count in COUNTS.items()
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "workers, world_size, dga_steps", [(0, 1, 1), (2, 2, 2), (3, 4, 1), (2, 1, 3)]
)
def test_exactly_once_and_pure(train_data, strategy, workers, world_size, dga_steps):
    """Each sample once but for the remainder; all steps of one source, or mixed."""
    batching = Batching(3, dga_steps, world_size, max(1, workers))
    ranks = epoch_of(train_data, batching, workers=workers, strategy=strategy)
    for images, ids in itertools.chain(*ranks):  # a picture has the caption of its own sample
        assert (images[:, 0, 0, 0] == ids % 256).all() and (images[:, 1, 0, 0] == ids // 256).all()
    steps = steps_of(ranks, dga_steps)
    n = batching.effective_batch
    seen = [number for ids in steps for number in ids]
    sources = [{number // 1000 for number in ids} for ids in steps]
    mixed = sum(len(step) > 1 for step in sources)
    assert len(seen) == len(set(seen))
    if strategy in ("debiased", "sequential"):
        for name, count in COUNTS.items():
            taken = [number for number in seen if FIRST[name] <= number < FIRST[name] + count]
            assert len(taken) == count // n * n
        assert mixed == 0 and set.union(*sources) == {0, 1, 2}
        return
    assert len(seen) == sum(COUNTS.values()) // n * n
    assert mixed >= 2 or n < 6  # negative control


def test_same_seed_same_batches_other_seed_and_epoch_other_batches(train_data):
    """With random augmentation and two workers, whatever the process's own generators do meanwhile."""
    batching = Batching(4, 1, 1, 2)
    crop = transforms.Compose(
        [transforms.RandomCrop(5), transforms.ColorJitter(0.5), transforms.PILToTensor()]
    )

    def run(epoch=0, **options):
        torch.manual_seed(random.randrange(1000))
        (batches,) = epoch_of(train_data, batching, epoch, workers=2, transform=crop, **options)
        return [torch.cat(part) for part in zip(*batches, strict=True)]

    images, ids = run()
    assert all(map(torch.equal, run(), (images, ids)))
    for other in ({"seed": 1}, {"epoch": 1}):
        assert not torch.equal(ids, run(**other)[1])


def test_a_sample_is_augmented_alike_wherever_it_is_read(train_data):
    """Augmentation is seeded by the sample, so another number of ranks and workers shows the same pixels in an epoch."""
    noise = transforms.Compose([transforms.PILToTensor(), lambda image: torch.rand(3)])
    by_id = []
    for batching in (Batching(4), Batching(2, 1, 2, 2)):
        ranks = epoch_of(
            train_data, batching, workers=0 if batching.workers == 1 else 2, transform=noise
        )
        by_id.append(
            {
                int(i): image
                for rank in ranks
                for images, ids in rank
                for image, i in zip(images, ids, strict=True)
            }
        )
    common = by_id[0].keys() & by_id[1].keys()
    assert len(common) > 100
    assert all(torch.equal(by_id[0][i], by_id[1][i]) for i in common)
    assert len({tuple(image.tolist()) for image in by_id[0].values()}) == len(
        by_id[0]
    )  # no two samples share a draw


def test_items_are_reordered_without_reading_further_ahead_than_the_window():
    def chunks(window):
        return LocalOrder(2000, window, lambda block: np.random.default_rng([0, block])).chunks()

    order = np.concatenate([*chunks(50)])
    assert (
        abs(np.corrcoef(order[:-1] % 50, order[1:] % 50)[0, 1]) < 0.07
    )  # neighbours are torn apart
    read: list[int] = []
    for place, item in enumerate(reordered(chunks(50), (read.append(i) or i for i in range(2000)))):
        assert item == order[place] and len(read) <= place + 2 * 50


def test_content_numbers_tell_same_captions_and_same_files():
    def sample(image, caption):
        return Shown(Placed(Sample("key", {"png": image}), 0), None, caption)

    one, other = (
        content_numbers(sample(b"jpeg", "A  dog\n")),
        content_numbers(sample(b"png", "a Dog")),
    )
    assert one[0] == other[0] and one[1] != other[1]
    assert (
        content_numbers(sample(b"jpeg", "a cat"))[0] != one[0]
        and content_numbers(sample(b"jpeg", "x"))[1] == one[1]
    )
    assert one != content_numbers(sample(b"a dog", "jpeg"))
    assert all(-(2**63) <= number < 2**63 for number in (*one, *other))


def test_ranks_shuffle_their_parts_in_other_orders(tmp_path):
    """Two ranks with a shard each: the same order in both would make the same neighbours of samples with equal numbers."""
    data = f"a={write_source(tmp_path / 'a', 0, 80, 40)}"
    ids = [torch.cat([ids for _, ids in rank]) for rank in epoch_of(data, Batching(4, 1, 2))]
    orders = [(of_rank - of_rank.min()).tolist() for of_rank in ids]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1]


def test_the_example_of_the_page_on_python_runs(tmp_path):
    """`docs/api.md`, with sources that are here and two epochs."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    code = re.search(r"## Sources\n\n```python\n(.*?)```", page, re.DOTALL)[1]
    for name in ("sbu", "cc3m"):
        write_source(tmp_path / name, 0, 600, 300, px=4)
    names = {"preprocess_train": transforms.PILToTensor(), "tokenizer": ids_of}
    exec(code.replace("/data", str(tmp_path)).replace("range(20)", "range(2)"), names)
    assert (
        len(names["step"]) == 4
        and names["step"][0][0].shape == (64, 3, 4, 4)
        and names["epoch"] == 1
    )
