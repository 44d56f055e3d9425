"""Captions drawn between several fields of a sample: shares, draws that a resume repeats, and refusals."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import flags_of, out_of_range
from open_clip_zerovl.data.names import caption_fields
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.features.sources import caption_counts
from open_clip_zerovl.recipe.flags import AllFlags
from support import loading
from support.tars import png, write_tar

CAPTIONS = "txt=0.5,syn=0.2,other.json:long=0.3"


def tokens_of(captions: list[str]) -> torch.Tensor:
    return torch.tensor([list(caption.encode()[:24].ljust(24)) for caption in captions])


def text_of(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode().strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """12 samples in two shards: 3 lacks other.json, 5 has a txt alone, 7 no caption, 8 broken JSON."""
    place = tmp_path_factory.mktemp("fields")
    for shard in range(2):
        members = []
        for number in range(6 * shard, 6 * shard + 6):
            members.append((f"{number:03d}.png", png((20 * number, 0, 0))))
            if number != 7:
                members.append((f"{number:03d}.txt", f"txt {number}".encode()))
            if number not in (5, 7):
                content = json.dumps({"syn": [f"syn {number} a", f"syn {number} b"], "width": 3})
                members.append((f"{number:03d}.json", b"{" if number == 8 else content.encode()))
            if number not in (3, 5, 7):
                members.append(
                    (f"{number:03d}.other.json", json.dumps({"long": f"long {number}"}).encode())
                )
        write_tar(place / f"{shard:05d}.tar", members)
    return place


def loader_of(folder, captions, batching=2, **options):
    wanted = {"tokenizer": tokens_of, "preprocessing": {"with_origin": True}}
    return loading.loader_of(
        f"a={folder}", batching, captions=captions, strategy="random", seed=3, **wanted | options
    )


def shown(folder, *, epoch=0, start=0, workers=0, captions=CAPTIONS):
    """(sample, caption) in the order of the epoch."""
    loader = loader_of(folder, captions, workers=workers)
    loader.set_epoch(epoch, start)
    return [
        (int(position) % 12, text_of(tokens))
        for _, texts, origin in loader
        for position, tokens in zip(origin[:, 1], texts, strict=True)
    ]


def test_each_field_is_shown_as_often_as_asked_and_a_missing_one_gives_its_share_to_the_others(
    folder,
):
    seen = Counter()
    for epoch in range(300):
        seen.update(
            (sample, caption)
            for sample, caption in shown(folder, epoch=epoch)
            if sample in (0, 3, 5)
        )

    def share(sample, word):
        of_sample = {
            caption: count for (number, caption), count in seen.items() if number == sample
        }
        return sum(count for caption, count in of_sample.items() if caption.startswith(word)) / sum(
            of_sample.values()
        )

    # 300 draws: a standard deviation of 0.029 at most
    assert [share(0, word) for word in ("txt", "syn", "long")] == pytest.approx(
        [0.5, 0.2, 0.3], abs=0.11
    )
    assert share(0, "syn 0 a") == pytest.approx(0.1, abs=0.08) and seen[0, "syn 0 b"] > 0
    assert [share(3, word) for word in ("txt", "syn")] == pytest.approx(
        [0.5 / 0.7, 0.2 / 0.7], abs=0.11
    )
    assert share(5, "txt") == 1.0
    assert not {sample for sample, _ in shown(folder)} & {7, 8}  # replaced by other samples


def test_draws_are_of_the_seed_epoch_and_sample_alone(folder):
    whole = shown(folder, epoch=1)
    assert whole == shown(folder, epoch=1) and whole[4:] == shown(folder, epoch=1, start=2)
    by_sample = dict(whole)
    assert all(
        by_sample.get(sample, caption) == caption
        for sample, caption in shown(folder, epoch=1, workers=2)
    )
    assert dict(shown(folder, epoch=2)) != by_sample


def test_captions_are_counted(folder):
    (source,) = parse_sources(f"a={folder}", captions=CAPTIONS)
    assert caption_counts(source).tolist() == [4, 4, 4, 3, 4, 1, 4, 1, 1, 4, 4, 4]


@pytest.mark.parametrize(
    "text", ["txt=0.5,syn=0.4", "txt=0.5,txt=0.5", "txt=x,syn=1", "=1", "txt=-1,syn=2"]
)
def test_bad_shares_are_refused(text):
    with pytest.raises(UserError, match="--captions"):
        caption_fields(text)


def test_other_words_are_refused(tmp_path):
    assert next(out_of_range(flags_of(AllFlags), AllFlags(captions="some"))).startswith(
        "--captions some is out of range; give one-per-epoch, all, first, joined or FIELD=SHARE,..."
    )
    with pytest.raises(UserError, match="unknown --captions 'some'; use one of one-per-epoch, all"):
        parse_sources(f"a={tmp_path}", captions="some")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"syn": ["whole", "cut \\ud83d"]}', "caption not UTF-8"),
        (b'{"syn": ' + b"[" * 100_000, "bad json"),
    ],
)
def test_json_that_no_caption_can_be_made_of_is_a_bad_sample(tmp_path, content, reason):
    """Half of a character, where somebody has cut a caption behind a number of units, and brackets without end."""
    members = []
    for number in range(8):
        syn = content if number == 3 else json.dumps({"syn": [f"syn {number}"] * 2}).encode()
        members += [(f"{number}.png", png((number, 0, 0))), (f"{number}.json", syn)]
    write_tar(tmp_path / "00000.tar", members)
    loader = loader_of(tmp_path, "syn=1", 4)
    lost = set()
    for epoch in range(4):  # until the half caption is drawn
        loader.set_epoch(epoch)
        for _, texts, _ in loader:
            assert all(text_of(row) == "whole" or text_of(row).startswith("syn ") for row in texts)
        lost |= set(loader.lost.get("a", {}))
    assert lost == {reason}
