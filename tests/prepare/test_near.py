"""Near-duplicates: planted copies are found at the distances that the page states, distinct pictures are kept."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from open_clip_zerovl import cli
from open_clip_zerovl.prepare.near import (
    BITS,
    NEAR,
    nearest,
    picture_hashes,
)
from open_clip_zerovl.shards.files import write_retrieval_set
from open_clip_zerovl.shards.tar import Sample
from support.pairs import Pair, as_csv, samples_of
from support.tars import encoded, write_tar

pytest.importorskip("imagehash")
pytestmark = pytest.mark.skipif(
    not hasattr(np, "bitwise_count"), reason="near-duplicates need numpy 2 (the extra `near`)"
)


def fractal(seed: int, width: int, height: int) -> Image.Image:
    """Noise with a photograph's spectrum: an amplitude of frequency to the power of -1.2, in colours that go together."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = (
        rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))
    ) / frequency**1.2
    spectrum[:, 0, 0] = 0
    pixels = np.fft.irfft2(spectrum, (height, width))
    pixels = pixels[:1] + 0.3 * pixels
    return Image.fromarray(
        (128 + 45 * pixels / pixels.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    )


def jpeg(image: Image.Image, quality: int = 90, **options: Any) -> bytes:
    return encoded(image, "JPEG", quality=quality, **options)


def resized(image: Image.Image, factor: float) -> Image.Image:
    return image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC
    )


def cropped(image: Image.Image, share: float) -> Image.Image:
    """Without a share of the width and height, half of it on each side."""
    x, y = image.width * share / 2, image.height * share / 2
    return image.crop((round(x), round(y), round(image.width - x), round(image.height - y)))


def bordered(image: Image.Image, colour: str) -> Image.Image:
    """In a border of 3 % of the longer side."""
    return ImageOps.expand(image, round(0.03 * max(image.size)), colour)


# A copy of a picture, and how far from the picture it may be.
COPIES: dict[str, tuple[Callable[[Image.Image], bytes], int]] = {
    "JPEG, quality 30": (lambda image: jpeg(image, 30), 10),
    "PNG": (encoded, 10),
    "half size": (lambda image: jpeg(resized(image, 0.5), 75), 12),
    "double size": (lambda image: jpeg(resized(image, 2)), 10),
    "squashed to 224 x 224": (
        lambda image: jpeg(image.resize((224, 224), Image.Resampling.BICUBIC)),
        10,
    ),
    "grey": (lambda image: jpeg(image.convert("L")), 10),
    "cropped by 2 %": (lambda image: jpeg(cropped(image, 0.02)), 36),
}


@pytest.fixture(scope="module")
def originals() -> list[Image.Image]:
    return [fractal(seed, 320, 240) for seed in range(21)]


def test_copies_are_as_near_as_stated_and_distinct_pictures_far(originals):
    hashes = np.stack([picture_hashes(jpeg(image))[0] for image in originals])
    for name, (copy, most) in COPIES.items():
        copies = np.stack([picture_hashes(copy(image))[0] for image in originals])
        numbers, distances = nearest(hashes, copies)
        assert numbers.tolist() == list(range(21)), name
        assert distances.max() <= most, (name, distances)
    others = np.stack(
        [picture_hashes(jpeg(fractal(seed, 160, 120)))[0] for seed in range(100, 160)]
    )
    assert nearest(others, hashes, BITS // 4)[0].tolist() == [-1] * 21
    far = np.bitwise_count(hashes[:, None] ^ others).sum(axis=-1)
    assert far.min() > 85 and far.mean() == pytest.approx(BITS / 2, abs=3)


def test_a_transparent_picture_is_compared_as_it_is_shown_on_white():
    alpha = (np.random.default_rng(0).random((8, 8)) < 0.4).astype(np.uint8) * 255
    glyph = Image.new("RGBA", (128, 128), "black")
    glyph.putalpha(Image.fromarray(alpha).resize(glyph.size, Image.Resampling.NEAREST))
    shown = Image.alpha_composite(Image.new("RGBA", glyph.size, "white"), glyph).convert("RGB")
    index = picture_hashes(jpeg(shown))[:1]
    assert nearest(index, picture_hashes(encoded(glyph))[:1], 10)[0].tolist() == [0]
    assert nearest(index, picture_hashes(jpeg(Image.new("RGB", (64, 64))))[:1])[0].tolist() == [-1]


def test_mirrored_copies_and_uniform_borders_are_found(originals):
    index = np.stack([picture_hashes(jpeg(image))[0] for image in originals])
    copies_of: list[tuple[Callable[[Image.Image], Image.Image], int]] = [
        (ImageOps.mirror, 1),
        (lambda image: resized(ImageOps.mirror(image), 0.5), 1),
        (lambda image: bordered(image, "white"), 2),
        (lambda image: resized(bordered(image, "black"), 0.5), 2),
    ]
    for copy, side in copies_of:
        copies = [picture_hashes(jpeg(copy(image), 75)) for image in originals]
        near_side = np.stack([hashes[side] for hashes in copies])
        # The other side of a picture is as far as another picture.
        far_side = np.stack([hashes[1 if side == 2 else 0] for hashes in copies])
        assert nearest(index, near_side)[0].tolist() == list(range(21)), side
        assert nearest(index, far_side)[0].tolist() == [-1] * 21, side
    assert picture_hashes(jpeg(Image.new("RGB", (64, 64), "white"))).shape == (2, 4)


def test_the_nearest_is_found_at_every_distance_as_by_comparing_all():
    rng = np.random.default_rng(0)
    tests = rng.integers(0, 2**63, (300, 4), dtype=np.uint64)
    bits = np.unpackbits(tests[:100].view(np.uint8), axis=1)
    flips = rng.permutation(BITS)
    for row in range(100):  # row bits, scattered over a test picture's words or all in one
        bits[row, flips[:row] if row % 2 else slice(row)] ^= 1
    others = rng.integers(0, 2**63, (100, 4), dtype=np.uint64)
    asked = np.concatenate([np.packbits(bits, axis=1).view(np.uint64), others])
    tests[200] = tests[3]  # of equally near ones the first is named
    every = np.unpackbits((asked[:, None] ^ tests).view(np.uint8), axis=-1).sum(axis=-1)
    for within in (0, 1, 5, NEAR, 64):
        numbers, distances = nearest(tests, asked, within)
        near = every.min(axis=1) <= within
        assert numbers.tolist() == np.where(near, every.argmin(axis=1), -1).tolist()
        assert distances.tolist() == np.where(near, every.min(axis=1), BITS + 1).tolist()
        assert near.sum() == within + 1


def test_the_command_lists_planted_copies_and_no_others(tmp_path: Path, originals, capsys):
    tests = [Sample(f"t{i}", {"jpg": jpeg(originals[i]), "txt": b"a cat"}) for i in range(6)]
    write_retrieval_set(tmp_path / "coco", tests)
    members = []
    for i in range(12):  # pictures 4 to 15, of which 4 and 5 are copies of test pictures
        content = jpeg(resized(originals[4 + i], 0.6), 60)
        members += [(f"{i:03d}.jpg", content), (f"{i:03d}.txt", b"a dog")]
    members += [("099.jpg", b"no picture"), ("099.txt", b"x"), ("100.txt", b"no picture at all")]
    write_tar(tmp_path / "a" / "00007.tar", members)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.jpg").write_bytes(jpeg(cropped(originals[20], 0.02)))
    (tmp_path / "b" / "pairs.csv").write_text("filepath,title\nx.jpg,a bird\nx.jpg,the same bird\n")
    (tmp_path / "val" / "n01").mkdir(parents=True)
    (tmp_path / "val" / "n01" / "bird.jpg").write_bytes(jpeg(originals[20]))
    data, sets = f"a={tmp_path}/a::b={tmp_path}/b", f"coco={tmp_path}/coco::val={tmp_path}/val"
    command = ["data", "near", data, "--test", sets, "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "a: 2 of 13 pictures are copies of 2 test pictures. 1 could not be decoded." in printed
    assert "b: 1 of 1 pictures are copies of 1 test pictures." in printed
    listed = json.loads((tmp_path / "out" / "near.json").read_text())
    assert listed["within"] == NEAR and listed["tests"] == {"coco": 6, "val": 1}
    pairs = [(p["source"], p["shard"], p["test"], p["test_key"]) for p in listed["pairs"]]
    # Two rows of a table with one picture are one sample of the shards that it becomes.
    assert pairs == [
        ("a", "00007.tar", "coco", "t4"),
        ("a", "00007.tar", "coco", "t5"),
        ("b", "00000.tar", "val", "n01/bird.jpg"),
    ]
    assert [pair["key"] for pair in listed["pairs"]][:2] == ["000", "001"]
    page = (tmp_path / "out" / "near.html").read_text(encoding="utf-8")
    assert page.count('class="example"') == 3 and page.count("data:image/jpeg") == 6
    # A smaller distance keeps the cropped copies.
    assert cli.main([*command, "--distance", "8"]) == 0
    assert "b: 0 of 1 pictures are copies" in capsys.readouterr().out


def test_what_is_packed_leaves_out_copies_of_test_pictures(tmp_path: Path, originals, capsys):
    tests = [Sample(f"t{i}", {"jpg": jpeg(originals[i]), "txt": b"a cat"}) for i in range(3)]
    write_retrieval_set(tmp_path / "coco", tests)
    pairs = [  # of which 1 and 2 are copies, and 2 comes twice
        Pair(f"{i}.jpg", jpeg(resized(originals[1 + i], 0.5), 70), [f"caption {i}"], "")
        for i in range(8)
    ]
    table = as_csv(tmp_path / "mine", [*pairs, pairs[1]._replace(captions=["caption again"])])
    command = f"data pack {table} --out {tmp_path / 'out'} --threads 2".split()
    drop = ["--drop-near", f"coco={tmp_path}/coco"]
    assert cli.main([*command, *drop]) == 0
    assert "near coco" in capsys.readouterr().out
    listed = json.loads((tmp_path / "out" / "near.json").read_text())["pairs"]
    assert sorted(pair["test_key"] for pair in listed) == ["t1", "t2"]
    packed = samples_of(tmp_path / "out" / "train")
    assert sorted(text for sample in packed for text in sample.captions) == [
        f"caption {i}" for i in range(2, 8)
    ]
    assert not {pair["key"] for pair in listed} & {sample.key for sample in packed}
    with open(tmp_path / "out" / "refused.csv", newline="") as file:
        assert {(row["line"], row["reason"]) for row in csv.DictReader(file)} == {
            (line, "near coco") for line in ("2", "3", "10")
        }
    assert cli.main([*command, *drop]) == 0 and "is complete" in capsys.readouterr().out
    assert cli.main(command) == 2  # another setting in the same folder
    assert "left_out" in capsys.readouterr().err
