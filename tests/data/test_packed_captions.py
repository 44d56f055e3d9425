"""Which captions of a picture are shown: one an epoch of packed data, the whole text of other shards, others by name."""

from __future__ import annotations

import csv
from contextlib import closing

import pytest

from open_clip_zerovl.cli.program import main
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.sources import parse_sources
from support.tars import png, write_tar

LINES = [f"caption {letter}" for letter in "abc"]
ONE, JOINED, FIRST = set(LINES), {" ".join(LINES)}, {LINES[0]}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A table of six pictures with three captions each, packed alone and as one of two sources; a foreign shard of the same."""
    folder = tmp_path_factory.mktemp("captions")
    with open(folder / "t.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for number in range(6):
            (folder / f"{number}.png").write_bytes(png((number, 0, 0), 16))
            writer.writerows([f"{number}.png", line] for line in LINES)
    table = f"{folder}/t.csv"
    assert main(["data", "pack", table, "--out", f"{folder}/alone"]) == 0
    assert main(["data", "pack", f"a={table}", f"b={table}", "--out", f"{folder}/two"]) == 0
    members = []
    for number in range(6):
        members += [(f"{number}.png", png((number, 0, 0), 16))]
        members += [(f"{number}.txt", "\n".join(LINES).encode())]
    write_tar(folder / "foreign" / "train" / "00000.tar", members)
    return folder


def shown(data: str, captions: str | None) -> tuple[int, set[str]]:
    """The samples of the first source, and the captions that three epochs show of its second sample."""
    source = parse_sources(data, captions=captions)[0]
    found = set()
    for lap in range(3):
        with closing(Reading(source, 0).samples(0, 1, lap * source.num_samples + 1)) as samples:
            found.add(next(samples).caption)
    return source.num_samples, found


@pytest.mark.parametrize(
    ("captions", "packed", "foreign", "table"),
    [
        (None, (6, ONE), (6, JOINED), (18, {LINES[1]})),
        ("one-per-epoch", (6, ONE), (6, ONE), (6, ONE)),
        ("first", (6, FIRST), (6, FIRST), (6, FIRST)),
        ("joined", (6, JOINED), (6, JOINED), (18, {LINES[1]})),
        ("all", (18, {LINES[1]}), (18, {LINES[1]}), (18, {LINES[1]})),
    ],
)
def test_captions_by_form_and_name(home, captions, packed, foreign, table):
    for place in ("alone", "alone/train", "alone/train/*.tar", "two", "two/a/train"):
        assert shown(f"x={home}/{place}", captions) == packed, place
    assert shown(f"x={home}/foreign/train", captions) == foreign
    assert shown(f"x={home}/t.csv", captions) == table
