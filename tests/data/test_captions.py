"""Which caption of a sample is shown: one an epoch of packed data, the whole text of other shards, fields by their shares."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from open_clip_zerovl.cli import main
from open_clip_zerovl.data.reader import ShardReader, draw, samples_of, texts_of
from open_clip_zerovl.data.sample_stream import SampleStream, SliceReader
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.features.sources import caption_counts
from open_clip_zerovl.prepare.door import as_shards
from open_clip_zerovl.sampling.assignment import LocalOrder
from open_clip_zerovl.sampling.schedule import ShardSlice
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
    shutil.copytree(home / "alone/train", home / "copied", dirs_exist_ok=True)  # on a fast disk
    for place in ("alone", "alone/train", "alone/train/*.tar", "two", "two/a/train", "copied"):
        assert shown(f"x={home}/{place}", captions) == packed, place
    assert shown(f"x={home}/foreign/train", captions) == foreign
    assert shown(as_shards(f"x={home}/t.csv"), captions) == packed


def tokens_of(captions: list[str]) -> torch.Tensor:
    return torch.tensor([list(caption.encode()[:24].ljust(24)) for caption in captions])


def text_of(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode().strip()


def test_one_caption_of_an_image_an_epoch_and_all_in_turn(home):
    sources = parse_sources(as_shards(f"t={home}/t.csv"), captions="one-per-epoch")
    loader = loader_of(sources, 1, tokenizer=tokens_of)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([text_of(row) for _, texts in loader for row in texts])
    assert all(len(shown) == 6 for shown in epochs)
    counts = Counter(text for shown in epochs for text in shown)
    assert counts == dict.fromkeys(LINES, 6)  # three epochs show all 18
    assert len(set(epochs[0])) > 1  # not the first caption of every image in the first


CAPTIONS = "txt=0.5,syn=0.2,other.json:long=0.3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """12 samples in two shards: 3 lacks other.json, 5 has a txt alone, 7 half of a character, 8 brackets without end."""
    place = tmp_path_factory.mktemp("fields")
    for shard in range(2):
        members = []
        for number in range(6 * shard, 6 * shard + 6):
            members.append((f"{number:03d}.png", png((20 * number, 0, 0))))
            if number != 7:
                members.append((f"{number:03d}.txt", f"txt {number}".encode()))
            if number != 5:
                content = json.dumps({"syn": [f"syn {number} a", f"syn {number} b"], "width": 3})
                content = {7: '{"syn": "\\ud83d"}', 8: '{"syn": ' + "[" * 100_000}.get(
                    number, content
                )
                members.append((f"{number:03d}.json", content.encode()))
            if number not in (3, 5, 7):
                members.append(
                    (f"{number:03d}.other.json", json.dumps({"long": f"long {number}"}).encode())
                )
        write_tar(place / f"{shard:05d}.tar", members)
    return place


def fields_loader_of(folder, captions, batching=2, **options):
    wanted = {"tokenizer": tokens_of, "preprocessing": {"with_origin": True}}
    return loader_of(
        f"a={folder}", batching, captions=captions, strategy="random", seed=3, **wanted | options
    )


def shown_fields(folder, *, epoch=0, start=0, workers=0, captions=CAPTIONS):
    """(sample, caption) in the order of the epoch."""
    loader = fields_loader_of(folder, captions, workers=workers)
    loader.set_epoch(epoch, start)
    return [
        (int(position) % 12, text_of(tokens))
        for _, texts, origin in loader
        for position, tokens in zip(origin[:, 1], texts, strict=True)
    ]


def test_each_field_is_shown_as_often_as_asked_and_a_missing_one_gives_its_share_to_the_others(
    folder,
):
    (source,) = parse_sources(f"a={folder}", captions=CAPTIONS)
    samples = list(samples_of(source, 0))
    expected = {
        0: {"txt 0": 0.5, "syn 0 a": 0.1, "syn 0 b": 0.1, "long 0": 0.3},
        3: {"txt 3": 0.5 / 0.7, "syn 3 a": 0.1 / 0.7, "syn 3 b": 0.1 / 0.7},
        5: {"txt 5": 1.0},
    }
    for number, shares in expected.items():
        given = texts_of(samples[number].files, CAPTIONS)
        places = range(number, 36_000, 12)
        drawn = Counter(draw(*given, seed=3, source=0, position=p, samples=12) for p in places)
        # 3,000 draws: a standard deviation of 0.009 at most
        shown = {text.decode(): count / 3_000 for text, count in drawn.items()}
        assert shown == pytest.approx(shares, abs=0.04)
    loader = fields_loader_of(folder, CAPTIONS)
    places = {int(position) % 12 for _, _, origin in loader for position in origin[:, 1]}
    assert places == set(range(12)) - {7, 8}  # replaced by other samples
    assert loader.lost == {"a": {"caption not UTF-8": 1, "bad json": 1}}


def test_draws_are_of_the_seed_epoch_and_sample_alone(folder):
    whole = shown_fields(folder, epoch=1)
    assert whole == shown_fields(folder, epoch=1) and whole[4:] == shown_fields(
        folder, epoch=1, start=2
    )
    by_sample = dict(whole)
    assert all(
        by_sample.get(sample, caption) == caption
        for sample, caption in shown_fields(folder, epoch=1, workers=2)
    )
    assert dict(shown_fields(folder, epoch=2)) != by_sample


def test_captions_are_counted(folder):
    (source,) = parse_sources(f"a={folder}", captions=CAPTIONS)
    assert caption_counts(source).tolist() == [4, 4, 4, 3, 4, 1, 4, 1, 1, 4, 4, 4]
