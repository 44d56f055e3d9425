"""`zerovl data pack --drop-near`: copies of test pictures are left out of training pairs, and of those alone."""

from __future__ import annotations

import csv
import io

import pytest
from PIL import Image

from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.dedup.left_out import near_exclusion
from support.pairs import samples_of
from support.tars import noise_jpeg

pytest.importorskip("imagehash")


def test_copies_of_a_test_set_are_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "tests").mkdir()
    for number in range(12):
        content = noise_jpeg(number, 96, 64)
        (tmp_path / f"in/{number:02d}.jpg").write_bytes(content)
        (tmp_path / f"in/{number:02d}.txt").write_text(f"picture {number}")
        if number < 3:  # smaller, and encoded anew
            copy = Image.open(io.BytesIO(content)).resize((48, 32))
            copy.save(tmp_path / f"tests/copy-{number}.png")
    command = ["data", "pack", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*command, "--drop-near", f"web={tmp_path / 'tests'}"]) == 0
    captions = {sample.files["txt"].decode() for sample in samples_of(tmp_path / "out/train")}
    assert captions == {f"picture {number}" for number in range(3, 12)}
    with open(tmp_path / "out/refused.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["reason"]) for row in rows] == [(f"{number:02d}.jpg", "near web") for number in range(3)]
    # Without it, or with another test set, the folder is another one.
    assert main(command) == 2
    (tmp_path / "tests/copy-0.png").unlink()
    assert main([*command, "--drop-near", f"web={tmp_path / 'tests'}"]) == 2


def test_a_distance_of_distinct_pictures_is_refused(tmp_path):
    with pytest.raises(UserError, match="a distance of 100 is out of range"):
        near_exclusion(f"web={tmp_path}", tmp_path, within=100)
