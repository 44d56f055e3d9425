"""Samples of named sources, and their embeddings."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.evaluate.compare.measures import source_probe_guesses
from open_clip_zerovl.evaluate.compare.samples import ComparedPair, encode, read_samples
from support import tiny_clip
from support.tars import png, write_tar


def pictures(count: int, *, seed: int, frame: bool) -> list[bytes]:
    """Blurred random pictures; framed ones have a red border (the mark of appendix A.5)."""
    rng = np.random.default_rng(seed)
    encoded = []
    for _ in range(count):
        image = Image.fromarray(rng.integers(0, 256, size=(5, 5, 3), dtype=np.uint8)).resize(
            (32, 32)
        )
        pixels = np.array(image)
        if frame:
            for border in (pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]):
                border[:] = (255, 0, 0)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    return encoded


def two_sources(*, frame: bool, count: int = 60) -> list[ComparedPair]:
    """Sources "a" and "b" with pictures and captions of one distribution, but for a's red frame."""
    rng = np.random.default_rng(5)
    samples = []
    for seed, name in enumerate("ab"):
        own = zip(
            pictures(count, seed=seed, frame=frame and name == "a"),
            tiny_clip.captions(rng, count),
            strict=True,
        )
        samples += [ComparedPair(name, image, caption) for image, caption in own]
    return samples


def test_a_red_frame_is_found_and_its_absence_too(clip_runs, tmp_path: Path):
    """A random tower keeps enough of its input: the frame shows in image embeddings, not in those of texts."""
    for framed in (True, False):
        samples = two_sources(frame=framed)
        owners = [sample.source for sample in samples]
        images, texts, _ = encode(Encoder(clip_runs[0], device="cpu"), samples, "run", tmp_path)
        # Chance is 0.5; over 120 guesses its standard deviation is 0.05.
        assert 0.3 < source_probe_guesses(texts, owners).mean() < 0.7
        accuracy = source_probe_guesses(images, owners).mean()
        assert accuracy > 0.95 if framed else 0.3 < accuracy < 0.7


def test_samples_are_spread_over_shards_and_bad_ones_counted(tmp_path: Path):
    for shard in range(3):
        members = []
        for i in range(6):
            content = b"no picture" if (shard, i) == (1, 0) else png((shard, i, 0))
            members += [(f"{i}.png", content), (f"{i}.txt", f"caption {shard} {i}".encode())]
            members.append((f"{i}.json", json.dumps({"concept": i}).encode()))
        write_tar(tmp_path / "a" / f"{shard}.tar", [*members, ("9.png", png((0, 0, 0)))])
    sources = parse_sources(f"a={tmp_path / 'a'}")
    samples, skipped = read_samples(sources, 6, concept_field="concept")
    places = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [sample.caption for sample in samples] == [f"caption {shard} {i}" for shard, i in places]
    assert skipped == {"a": 1} and samples[0].concept == "0" and samples[0].picture().size == (8, 8)
    # More than there are: all 17 usable ones.
    samples, skipped = read_samples(sources, 500)
    assert len(samples) == 17 and skipped == {"a": 4} and samples[0].concept is None
    with pytest.raises(UserError, match="no field 'group' in its json"):
        read_samples(sources, 6, concept_field="group")
    write_tar(tmp_path / "b" / "0.tar", [("1.png", b"broken"), ("1.txt", b"text")])
    with pytest.raises(UserError, match="source 'b' has no pair"):
        read_samples(parse_sources(f"b={tmp_path / 'b'}"), 6)
    with pytest.raises(UserError, match="is remote, and local shards are read here"):
        read_samples([Source("c", ("https://example.org/0.tar",), (3,))], 6)
    # A cluster's own samples, and those alone: numbers 1 and 5 of the first shard, 2 of the last.
    cluster = dataclasses.replace(
        sources[0],
        shards=sources[0].shards[::2],
        sizes=(2, 1),
        picked=np.array([1, 5, 2], dtype=np.int32),
    )
    samples, _ = read_samples([cluster], 6)
    assert [sample.caption for sample in samples] == ["caption 0 1", "caption 0 5", "caption 2 2"]


def test_of_several_captions_the_first_is_taken(tmp_path: Path):
    members = [
        ("0.png", png((0, 0, 0))),
        ("0.txt", b"\n a cat \nanother cat\nand a third"),
        ("1.png", png((9, 0, 0))),
    ]
    write_tar(
        tmp_path / "a" / "0.tar",
        [*members, ("1.txt", b"a dog\n"), ("2.png", png((0, 9, 0))), ("2.txt", b" \n")],
    )
    samples, skipped = read_samples(parse_sources(f"a={tmp_path / 'a'}"), 6)
    assert [sample.caption for sample in samples] == ["a cat", "a dog"] and skipped == {"a": 1}
