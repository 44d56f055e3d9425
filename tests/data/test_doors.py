"""Every door reads the same data: tables by one rule of columns, and what `zerovl data pack` has written."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.align.rows import open_sources as open_aligned
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sets import open_probe_set, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.finetune.data import find_data, open_sources
from open_clip_zerovl.prepare.door import as_shards, sets_as_shards
from open_clip_zerovl.prepare.inputs import open_input
from open_clip_zerovl.prepare.near import find_overlap, open_test_sets
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.settings import Columns, PackSettings, Work
from support.pairs import picture

PAIRS = 5
HEADERS = [
    "image_path,text",
    "file_name,caption",
    "filepath,caption",
    "image,title",
    "path,caption",
]


def captions_of(sources) -> list[str]:
    return sorted(
        sample.files["txt"].decode()
        for source in sources
        for shard in range(len(source.shards))
        for sample in samples_of(source, shard)
    )


def retrieved(data: str) -> list[str]:
    (place,) = parse_retrieval_data(sets_as_shards(data)).values()
    return sorted(text for texts in open_retrieval_set(place).captions() for text in texts)


def packed_rows(data: str) -> list[str]:
    return sorted(row.captions[0] for row in open_input(Path(data), Columns()).rows())


def seen_pictures(data: str) -> int:
    collection = open_collection(data if Path(data).is_dir() else as_shards(data))
    return sum(len(list(collection.pictures(number))) for number in range(len(collection.files)))


DOORS = {
    "train": lambda data: captions_of(parse_sources(as_shards(f"x={data}"))),
    "retrieval": retrieved,
    "finetune": lambda data: captions_of(open_sources(find_data(data).train_data)),
    "align": lambda data: captions_of(
        open_aligned(as_shards(f"x={data}"), sets_as_shards(f"h={data}")).opened[:1]
    ),
    "pack": packed_rows,
}


@pytest.mark.parametrize("header", HEADERS)
def test_every_door_reads_a_table_that_pack_reads(tmp_path, header):
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in/pairs.csv", "w") as file:
        rows = csv.writer(file)
        rows.writerow(header.split(","))
        for number in range(PAIRS):
            (tmp_path / f"in/{number}.png").write_bytes(picture(number))
            rows.writerow([f"{number}.png", f"caption {number}"])
    table = str(tmp_path / "in/pairs.csv")
    wanted = [f"caption {number}" for number in range(PAIRS)]
    assert {name: read(table) for name, read in DOORS.items()} == dict.fromkeys(DOORS, wanted)
    assert seen_pictures(table) == PAIRS  # search
    if hasattr(np, "bitwise_count"):  # numpy 2, of the extra `near`
        tests = open_test_sets(f"t={table}", progress=False)
        near = find_overlap(f"x={table}", tests, progress=False)
        assert near.samples == {"x": PAIRS} and len(near.pairs) >= PAIRS


@pytest.fixture
def packed(tmp_path) -> Path:
    """Pack two sources of two classes, 12 pictures each, of which a share of 0.3 holds out 4 and 3."""
    for number in range(24):
        file = tmp_path / "in" / ("shop", "web")[number % 2] / ("hat", "shoe")[number // 2 % 2]
        file.mkdir(parents=True, exist_ok=True)
        (file / f"{number}.png").write_bytes(picture(number))
    settings = PackSettings(columns=Columns(source="folder"), test_share=0.3)
    pack([str(tmp_path / "in")], tmp_path / "packed", settings, work=Work(progress=False))
    return tmp_path / "packed"


def test_every_door_takes_a_packed_folder(packed):
    sources = parse_sources(f"x={packed}")
    assert [(source.name, source.num_samples) for source in sources] == [
        ("x-shop", 8),
        ("x-web", 9),
    ]
    (one,) = (
        parse_sources(f"x={packed}/shop")[:1]
        if (packed / "shop/pack.json").exists()
        else sources[:1]
    )
    assert one.classes
    held_out = parse_sources(f"x={packed}", split="test", evaluation=True)
    assert [source.num_samples for source in held_out] == [4, 3]
    assert parse_retrieval_data(str(packed)) == {"shop": packed / "shop", "web": packed / "web"}
    sets = parse_retrieval_data(f"Öl-Bilder={packed}")
    assert list(sets) == ["Öl-Bilder-shop", "Öl-Bilder-web"]
    assert [len(open_retrieval_set(place)) for place in sets.values()] == [4, 3]
    assert [len(open_labelled_set(str(place)).images) for place in sets.values()] == [4, 3]
    assert find_data(str(packed)).train_data == f"shop={packed}/shop/train::web={packed}/web/train"
    opened = open_aligned(f"x={packed}", f"h={packed}")
    assert [source.num_samples for source in opened.opened] == [8, 9, 4, 3]
    assert seen_pictures(str(packed)) == 24


def test_a_packed_folder_of_one_source(packed, tmp_path):
    pack([str(tmp_path / "in/shop")], tmp_path / "one", PackSettings(), work=Work(progress=False))
    (source,) = parse_sources(f"x={tmp_path}/one")
    assert (source.name, source.num_samples) == ("x", 12)
    with pytest.raises(UserError, match="was packed without pictures of the split 'test'"):
        parse_sources(f"x={tmp_path}/one", split="test", evaluation=True)
    assert seen_pictures(str(tmp_path / "one")) == 12
    assert len(open_probe_set(tmp_path / "one", "train")) == 12
