"""Which captions of a picture are shown: one an epoch of packed data, the whole text of other shards, others by name."""

from __future__ import annotations

import csv
from collections import Counter

import numpy as np
import pytest
import torch

from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.reader import ShardReader
from open_clip_zerovl.data.sample_stream import SampleStream, SliceReader
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.prepare.door import as_shards
from open_clip_zerovl.sampling.order import LocalOrder
from open_clip_zerovl.sampling.slices import ShardSlice
from support.loading import loader_of
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
        second = [ShardSlice(0, 1, 2, lap * source.num_samples + 1)]
        slices = SliceReader(ShardReader.of_pairs(source), second, second)
        stream = SampleStream(slices, LocalOrder(1, 1, np.random.default_rng))
        found.add(stream.take(lambda picture: picture).caption)
    return source.num_samples, found


@pytest.mark.parametrize(
    ("captions", "packed", "foreign"),
    [
        (None, (6, ONE), (6, JOINED)),
        ("one-per-epoch", (6, ONE), (6, ONE)),
        ("first", (6, FIRST), (6, FIRST)),
        ("joined", (6, JOINED), (6, JOINED)),
        ("all", (18, {LINES[1]}), (18, {LINES[1]})),
    ],
)
def test_captions_by_form_and_name(home, captions, packed, foreign):
    for place in ("alone", "alone/train", "alone/train/*.tar", "two", "two/a/train"):
        assert shown(f"x={home}/{place}", captions) == packed, place
    assert shown(f"x={home}/foreign/train", captions) == foreign
    assert shown(as_shards(f"x={home}/t.csv"), captions) == packed


def captions_of_epochs(sources: tuple[Source, ...], epochs: int, **options) -> list[list[str]]:
    """Captions shown in each epoch; a tokenizer of bytes brings them through the loader."""

    def tokenizer(texts):
        return torch.tensor([list(text.encode().ljust(200, b"\0")[:200]) for text in texts])

    loader = loader_of(sources, options.pop("batch", 1), tokenizer=tokenizer, **options)
    shown = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        shown.append(
            [bytes(row.tolist()).rstrip(b"\0").decode() for _, texts in loader for row in texts]
        )
    captions_of_epochs.lost = loader.lost
    return shown


def test_one_caption_of_an_image_an_epoch_and_all_in_turn(home):
    sources = parse_sources(as_shards(f"t={home}/t.csv"), captions="one-per-epoch")
    epochs = captions_of_epochs(sources, 3)
    assert all(len(shown) == 6 for shown in epochs)
    counts = Counter(text for shown in epochs for text in shown)
    assert counts == dict.fromkeys(LINES, 6)  # three epochs show all 18
    assert len(set(epochs[0])) > 1  # not the first caption of every image in the first
    assert captions_of_epochs(sources, 3) == epochs


def test_captions_in_the_lines_of_a_tar(tmp_path):
    members = []
    for i in range(7):
        lines = "\n".join(f"image {i} line {line}" for line in range(i % 3 + 1))
        members += [(f"{i}.png", png((i, 0, 0))), (f"{i}.txt", (lines + "\n\n").encode())]
    write_tar(tmp_path / "s" / "0.tar", members)
    whole, one, every = (
        parse_sources(f"s={tmp_path}/s", captions=c) for c in (None, "one-per-epoch", "all")
    )
    assert [source.num_samples for (source,) in (whole, one, every)] == [7, 7, 13]
    assert "image 1 line 0 image 1 line 1" in captions_of_epochs(whole, 1)[0]
    epochs = captions_of_epochs(one, 6)
    assert all(len({text.split(" line")[0] for text in shown}) == 7 for shown in epochs)
    assert {text for shown in epochs for text in shown} == set(
        captions_of_epochs(every, 1)[0]
    ) and len(set(captions_of_epochs(every, 1)[0])) == 13
    assert (
        sorted(captions_of_epochs(every, 1, workers=2, batch=2)[0])[:5]
        == sorted(captions_of_epochs(every, 1)[0])[:5]
    )
    with pytest.raises(
        UserError,
        match="cannot count the captions of remote shards .*, first pipe:cat .*; copy or pack them here",
    ):
        parse_sources(f"s=pipe:cat {tmp_path}/s/0.tar", captions="all")
