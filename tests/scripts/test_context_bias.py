"""A.5's halves of a source: by caption length, framed and not, once each, and again after an interruption."""

import io
import json

import pytest
from PIL import Image

from open_clip_zerovl.shards.tar import read_samples
from scripts.paper import context_bias
from scripts.paper.context_bias import threshold_of, write_halves
from support.tars import png, write_tar


def source(folder, captions: list[str], per_shard: int = 4):
    folder.mkdir(parents=True)
    for first in range(0, len(captions), per_shard):
        members = []
        for number, caption in enumerate(captions[first : first + per_shard], start=first):
            members += [
                (f"{number:03d}.png", png((0, 0, 200), 40)),
                (f"{number:03d}.txt", caption.encode()),
            ]
        write_tar(folder / f"{first // per_shard:05d}.tar", members)
    return folder


def halves_of(out):
    shards = {name: sorted((out / f"cc3m-{name}").glob("*.tar")) for name in ("long", "short")}
    return {
        name: [sample for shard in found for sample in read_samples(shard)]
        for name, found in shards.items()
    }


def test_longer_captions_get_the_frame_and_every_pair_is_in_one_half(tmp_path, monkeypatch):
    captions = [
        " ".join(["word"] * (1 + number % 5)) for number in range(20)
    ]  # one to five words, four of each
    cc3m = source(tmp_path / "cc3m", captions)
    broken = [
        ("900.png", b"no picture"),
        ("900.txt", b"a long caption of seven words or more"),
        ("901.txt", b"no picture here"),
    ]
    write_tar(cc3m / "00009.tar", broken)
    written = []
    real = context_bias.write_shard

    def power_cut(path, samples):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        return real(path, samples)

    monkeypatch.setattr(context_bias, "write_shard", power_cut)
    with pytest.raises(KeyboardInterrupt):
        write_halves(cc3m, tmp_path, progress=False)
    monkeypatch.setattr(context_bias, "write_shard", real)
    done = write_halves(cc3m, tmp_path, progress=False)
    assert done == {
        "long": 8,
        "short": 12,
        "bad": 1,
        "long_from": 4,
    }  # 21 captions: 8 and the broken one, or 12 and it
    halves = halves_of(tmp_path)
    assert sorted(sample.key for half in halves.values() for sample in half) == [
        f"{number:03d}" for number in range(20)
    ]
    for name, half in halves.items():
        for sample in half:
            assert (len(sample.files["txt"].split()) >= 4) == (name == "long")
            picture = Image.open(
                io.BytesIO(sample.files["jpg" if name == "long" else "png"])
            ).convert("RGB")
            red, _, blue = picture.getpixel((0, 20))
            assert (red > 200 and blue < 60) if name == "long" else (red, blue) == (0, 200)
            assert picture.getpixel((20, 20))[2] > 180
        sizes = json.loads((tmp_path / f"cc3m-{name}" / "sizes.json").read_text())
        assert sum(sizes.values()) == len(half)


def test_halves_are_as_equal_as_ties_allow():
    from collections import Counter

    assert threshold_of(Counter({(1, 3): 5, (2, 7): 4, (3, 9): 1})) == (2, 7)
    assert threshold_of(Counter({(1, 3): 1, (2, 7): 8, (3, 9): 2})) == (3, 9)
