"""Stored features: a file a part, by its content. A copy is known, a change or damage is made again, and nothing else is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of
from open_clip_zerovl.data.sources import contents_of_shards, parse_sources
from open_clip_zerovl.features.embed import FeatureStore, Pictures, embed
from open_clip_zerovl.features.encoder import FrozenModel
from support.pairs import picture
from support.tars import write_tar

CONTENTS, COUNTS = ["aa", "bb", "cc"], [2, 0, 3]
ROWS = torch.arange(20.0).reshape(5, 4)
IDS = torch.tensor([7, 0, 8, 9, 7])


def filled(folder: Path | None, dtype=torch.float32) -> FeatureStore:
    store = FeatureStore(folder, CONTENTS, COUNTS)
    for number, rows in enumerate(ROWS.to(dtype).split(COUNTS)):
        store.write(number, rows, IDS.split(COUNTS)[number])
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stored", [True, False])
def test_rows_come_back_as_written(tmp_path, dtype, stored):
    store = filled(tmp_path / "features" if stored else None, dtype)
    if stored:
        store = FeatureStore(tmp_path / "features", CONTENTS, COUNTS)
    assert store.missing == [] and store.ids.tolist() == IDS.tolist()
    assert torch.equal(torch.cat([*store.blocks()]), ROWS.to(dtype))
    for wanted in ([0], [4], [1, 2], [0, 1, 3, 3, 4]):
        assert torch.equal(store.take(np.array(wanted)), ROWS.to(dtype)[wanted])
    assert (store.width, store.size_bytes) == (4, 20 * dtype.itemsize)


def test_parts_are_known_in_any_order_and_of_another_collection(tmp_path):
    filled(tmp_path)
    other = FeatureStore(tmp_path, ["dd", "cc", "aa", "dd"], [1, 3, 2, 1])
    assert other.missing == [0]  # the fourth part has the content of the first
    assert FeatureStore(tmp_path, CONTENTS, [5, 0, 3]).missing == [0]  # other rows than expected
    other.write(0, torch.ones(1, 4), torch.ones(1, dtype=torch.int64))
    assert other.missing == [] and other.ids.tolist() == [
        1,
        *IDS[2:].tolist(),
        *IDS[:2].tolist(),
        1,
    ]


@pytest.mark.parametrize("place", ["header", "rows", "identities", "digest", "end", "cut", "empty"])
def test_a_flipped_bit_is_never_read_as_features(tmp_path, place, caplog):
    """A changed byte gave a score of 1.4e35; zeroed and negated rows gave another accuracy without a word."""
    filled(tmp_path)
    file = tmp_path / "cc.safetensors"
    content = bytearray(file.read_bytes())
    names = {"header": 9, "digest": content.index(b"digest") + 12, "end": len(content) - 1}
    rows = content.index(ROWS[2:].numpy().tobytes())
    places = {**names, "rows": rows + 5, "identities": content.index(IDS[2:].numpy().tobytes())}
    if place in places:
        content[places[place]] ^= 0x04
    file.write_bytes(content[: {"cut": 100, "empty": 0}.get(place)])
    damaged = FeatureStore(tmp_path, CONTENTS, COUNTS)
    assert damaged.missing == [2] and "is damaged" in caplog.text
    damaged.write(2, ROWS[2:], IDS[2:])
    assert torch.equal(torch.cat([*damaged.blocks()]), ROWS)
    assert FeatureStore(tmp_path, CONTENTS, COUNTS).missing == []


# ---------------------------------------------------------------------------------------------------------------------
# What is made
# ---------------------------------------------------------------------------------------------------------------------


class Listed:
    """Parts of numbers, with the parts that were read."""

    def __init__(self, contents: list[str], counts: list[int]) -> None:
        self.contents, self.counts, self.were_read = contents, counts, []

    def read(self, part):
        self.were_read.append(part)
        yield from ((row, torch.full((1,), 10.0 * part + row)) for row in range(self.counts[part]))


def model(**more) -> FrozenModel:
    given = {"picture_transform": lambda thing: thing, "image_tower": lambda x: x * 2}
    return FrozenModel("m", unit_length=False, **given | more)


def test_a_stopped_call_goes_on_with_the_parts_that_it_left(tmp_path):
    contents, counts = ["a", "b", "c", "d"], [3, 1, 0, 4]
    done = []

    def stops(x):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(x))
        return x * 2

    with pytest.raises(KeyboardInterrupt):
        embed(FeatureStore(tmp_path, contents, counts), model(image_tower=stops),
              Listed(contents, counts), width=1, batch_size=2)  # fmt: skip
    store, listed = FeatureStore(tmp_path, contents, counts), Listed(contents, counts)
    assert store.missing == [1, 2, 3]
    assert embed(store, model(), listed, width=1, batch_size=2) == sum(counts[1:])
    assert listed.were_read == [1, 2, 3]
    assert torch.cat([*store.blocks()])[:, 0].tolist() == [0, 2, 4, 20, 60, 62, 64, 66]
    assert embed(store, model(), listed, width=1, batch_size=2) == 0


def test_a_part_that_could_not_be_read_to_its_end_is_read_again_by_the_next_call(tmp_path):
    """As a shard whose server is away for a while: its zeros stood as its features from then on."""
    contents, counts = ["a", "b"], [3, 3]
    torn, whole = Listed(contents, counts), Listed(contents, counts)
    torn.read = lambda part: [*whole.read(part)][: 3 - part] + ["a fault"] * part
    store = FeatureStore(tmp_path, contents, counts)
    embed(store, model(), torn, width=1, batch_size=2)
    assert store.missing == [] and torch.cat([*store.blocks()])[:, 0].tolist() == [
        0,
        2,
        4,
        20,
        22,
        0,
    ]
    store = FeatureStore(tmp_path, contents, counts)
    assert store.missing == [1] and embed(store, model(), whole, width=1, batch_size=2) == 3
    assert torch.cat([*store.blocks()])[:, 0].tolist() == [0, 2, 4, 20, 22, 24]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_processes_share_the_parts(tmp_path, order):
    """Also where one begins after the other has ended, and lists fewer missing parts."""
    contents, counts = [*"abcde"], [1] * 5
    for number in order:
        store = FeatureStore(tmp_path, contents, counts)
        embed(store, model(), Listed(contents, counts), width=1, batch_size=2, share=(number, 2))
    assert FeatureStore(tmp_path, contents, counts).missing == []


@pytest.mark.parametrize(
    ("tower", "sentence"),
    [
        (lambda x: x * torch.nan, "makes NaN or infinite features"),
        (lambda x: x + 1e6, "makes features up to .*, too large for torch.float16; store them in"),
    ],
)
def test_features_that_are_no_numbers_are_refused(tmp_path, tower, sentence):
    store = FeatureStore(tmp_path, ["a"], [2])
    with pytest.raises(UserError, match=sentence):
        embed(store, model(image_tower=tower), Listed(["a"], [2]),
              width=1, dtype=torch.float16, batch_size=2)  # fmt: skip
    assert store.missing == [0] and not [*tmp_path.iterdir()]


def test_a_new_picture_changes_one_run():
    pictures = [digest_of(number) for number in range(3000)]
    known = {*Pictures(pictures, lambda _: None).contents}
    assert 8 <= len(known) <= 16  # of 256 in the mean
    for place in (0, 1500, 3000):
        changed = Pictures([*pictures[:place], digest_of("new"), *pictures[place:]], lambda _: None)
        assert sum(changed.counts) == 3001 and len({*changed.contents} - known) <= 2
    assert max(Pictures(["0" * 7 + "1"] * 3000, lambda _: None).counts) == 1024


# ---------------------------------------------------------------------------------------------------------------------
# The content of shards
# ---------------------------------------------------------------------------------------------------------------------


def test_a_copy_or_a_touch_changes_no_content_and_a_changed_byte_does(tmp_path):
    for shard in range(2):
        members = [("a.png", picture(shard)), ("a.txt", b"a caption")]
        write_tar(tmp_path / "data" / f"{shard}.tar", members)

    def contents(folder: str) -> list[str]:
        (source,) = parse_sources(f"x={tmp_path / folder}")
        return contents_of_shards(source)

    before = contents("data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    place = tmp_path / "data" / "1.tar"
    os.utime(place, ns=(5, 5))
    assert contents("data") == contents("copy") == before
    status, content = place.stat(), place.read_bytes()
    place.write_bytes(content.replace(b"caption", b"Caption", 1))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = contents("data")
    assert after[1] != before[1] and after[0] == before[0]
