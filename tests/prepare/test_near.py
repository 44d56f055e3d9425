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
from open_clip_zerovl.prepare import near
from open_clip_zerovl.prepare.near import (
    BITS,
    NEAR,
    SHOWN,
    NearPair,
    Overlap,
    nearest,
    picture_hashes,
    write_overlap,
)
from open_clip_zerovl.shards.files import write_retrieval_set
from open_clip_zerovl.shards.tar import Sample, read_samples
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
    shown, transparent = [], []
    for seed in range(2):
        alpha = Image.fromarray(
            (np.random.default_rng(seed).random((8, 8)) < 0.4).astype(np.uint8) * 255
        )
        glyph = Image.new("RGBA", (128, 128), "black")
        glyph.putalpha(alpha.resize((128, 128), Image.Resampling.NEAREST))
        transparent.append(encoded(glyph))
        shown.append(
            jpeg(
                Image.composite(glyph, Image.new("RGBA", glyph.size, "white"), glyph).convert("RGB")
            )
        )
    index = np.stack([picture_hashes(content)[0] for content in shown])
    hashes = np.stack([picture_hashes(content)[0] for content in transparent])
    numbers, distances = nearest(index, hashes, BITS)
    assert numbers.tolist() == [0, 1] and distances.max() <= 10
    assert nearest(hashes[:1], hashes[1:])[0].tolist() == [-1]


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


def test_the_nearest_is_found_at_every_distance_as_by_comparing_all(monkeypatch):
    rng = np.random.default_rng(0)
    tests = rng.integers(0, 2**63, (300, 4), dtype=np.uint64)
    asked = rng.integers(0, 2**63, (200, 4), dtype=np.uint64)
    flips = rng.permutation(BITS)
    for row in range(
        100
    ):  # row flips of a test picture's bits, scattered over its words or all in one
        bits = np.unpackbits(tests[row].view(np.uint8))
        chosen = flips[:row] if row % 2 else np.arange(row)
        bits[chosen] ^= 1
        asked[row] = np.packbits(bits).view(np.uint64)
    tests[200] = tests[3]  # of equally near ones the first is named
    every = np.bitwise_count(asked[:, None] ^ tests).sum(axis=-1)
    monkeypatch.setattr(near, "_BLOCK_PAIRS", 300 * 7)
    for within in (0, 1, 5, NEAR, 64):
        numbers, distances = nearest(tests, asked, within)
        expected = np.where(every.min(axis=1) <= within, every.argmin(axis=1), -1)
        assert numbers.tolist() == expected.tolist()
        found = numbers >= 0
        assert (
            distances[found].tolist() == every.min(axis=1)[found].tolist()
            and (distances[~found] == BITS + 1).all()
        )
        assert found.sum() == within + 1


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
    (tmp_path / "rotten").mkdir()
    (tmp_path / "rotten/x.jpg").write_bytes(b"no picture")
    (tmp_path / "val" / "n01").mkdir(parents=True)
    (tmp_path / "val" / "n01" / "bird.jpg").write_bytes(jpeg(originals[20]))
    command = [
        "data",
        "near",
        f"a={tmp_path}/a::b={tmp_path}/b",
        "--test",
        f"coco={tmp_path}/coco::val={tmp_path}/val",
    ]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "a: 2 of 13 pictures are copies of 2 test pictures. 1 could not be decoded." in printed
    assert "b: 1 of 1 pictures are copies of 1 test pictures." in printed
    listed = json.loads((tmp_path / "out" / "near.json").read_text())
    assert listed["within"] == NEAR and listed["tests"] == {"coco": 6, "val": 1}
    pairs = [(p["source"], p["shard"], p["key"], p["test"], p["test_key"]) for p in listed["pairs"]]
    assert pairs[:2] == [
        ("a", "00007.tar", "000", "coco", "t4"),
        ("a", "00007.tar", "001", "coco", "t5"),
    ]
    # Two rows of a table with one picture are one sample of the shards that it becomes.
    assert [(*p[:2], *p[3:]) for p in pairs[2:]] == [("b", "00000.tar", "val", "n01/bird.jpg")]
    page = (tmp_path / "out" / "near.html").read_text(encoding="utf-8")
    assert page.count('class="example"') == 3 and page.count("data:image/jpeg") == 6
    # A smaller distance keeps the cropped copies.
    assert cli.main([*command, "--out", str(tmp_path / "less"), "--distance", "8"]) == 0
    assert "b: 0 of 1 pictures are copies" in capsys.readouterr().out
    for more, sentence in (
        (["--distance", "90"], "--distance 90 is out of range; give 0 to 64 of 256 bits"),
        (["--test", f"x={tmp_path}/none"], "does not exist"),
        (["--test", f"x={tmp_path}/rotten"], "holds no picture that can be compared"),
    ):
        assert cli.main([*command, *more, "--out", str(tmp_path / "no")]) == 2
        assert sentence in capsys.readouterr().err


def test_what_is_packed_leaves_out_copies_of_test_pictures(tmp_path: Path, originals, capsys):
    tests = [Sample(f"t{i}", {"jpg": jpeg(originals[i]), "txt": b"a cat"}) for i in range(3)]
    write_retrieval_set(tmp_path / "coco", tests)
    (tmp_path / "mine").mkdir()
    rows = ["picture,caption"]
    for i in range(8):  # of which 1 and 2 are copies, and 2 comes twice
        (tmp_path / "mine" / f"{i}.jpg").write_bytes(jpeg(resized(originals[1 + i], 0.5), 70))
        rows.append(f"{i}.jpg,caption {i}")
    (tmp_path / "mine" / "pairs.csv").write_text("\n".join([*rows, "1.jpg,caption again"]) + "\n")
    command = (
        f"data pack {tmp_path / 'mine' / 'pairs.csv'} --out {tmp_path / 'out'} --threads 2".split()
    )
    drop = ["--drop-near", f"coco={tmp_path}/coco"]
    assert cli.main([*command, *drop]) == 0
    assert "near coco" in capsys.readouterr().out
    listed = json.loads((tmp_path / "out" / "near.json").read_text())["pairs"]
    assert sorted(pair["test_key"] for pair in listed) == ["t1", "t2"]
    packed = [
        sample
        for shard in sorted((tmp_path / "out" / "train").glob("*.tar"))
        for sample in read_samples(shard)
    ]
    assert sorted(sample.files["txt"] for sample in packed) == [
        f"caption {i}".encode() for i in range(2, 8)
    ]
    assert not {pair["key"] for pair in listed} & {sample.key for sample in packed}
    with open(tmp_path / "out" / "refused.csv", newline="") as file:
        assert {(row["line"], row["reason"]) for row in csv.DictReader(file)} == {
            (line, "near coco") for line in ("2", "3", "10")
        }
    assert (tmp_path / "out" / "near.html").read_text().count('class="example"') == 2
    assert cli.main([*command, *drop]) == 0 and "is complete" in capsys.readouterr().out
    assert cli.main(command) == 2  # another setting in the same folder
    assert "left_out" in capsys.readouterr().err
    assert cli.main([*command, "--drop-near", f"coco={tmp_path}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_of_many_pairs_the_page_shows_some_up_to_the_farthest(tmp_path: Path):
    small = Image.new("RGB", (8, 8))
    pairs = [NearPair("a", "0.tar", f"{i}", "t", f"<{i}>", i % 57) for i in range(400)]
    write_overlap(
        Overlap(
            {"t": 3}, NEAR, {"a": 900}, {"a": 0}, pairs, dict.fromkeys(range(400), (small, small))
        ),
        tmp_path,
    )
    page = (tmp_path / "near.html").read_text()
    assert (
        page.count('class="example"') == SHOWN and "distance 0:" in page and "distance 56:" in page
    )
    assert "&lt;" in page and "<399>" not in page
    assert len(json.loads((tmp_path / "near.json").read_text())["pairs"]) == 400
