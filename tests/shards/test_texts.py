"""Files of other people are read within bounds: regular files up to a size, JSON arrays, pictures of a folder."""

from __future__ import annotations

import io
import os

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import BadFile, picture_files, read_foreign
from open_clip_zerovl.shards.texts import json_array


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"[1, 2", None),
        (b'{"a": 1}', None),
        (b"[" * 200_000, None),
        (b'{"a": [1], "b": 2}', "images"),
        (b'{"images": {"a": 1}}', "images"),
    ],
)
def test_json_that_holds_no_array_is_named(text, key):
    with pytest.raises(UserError, match="x.json"):
        json_array(io.BytesIO(text), "x.json", key=key)


@pytest.mark.timeout(20)
def test_only_regular_files_up_to_a_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_foreign(tmp_path / "file", 100) == b"x" * 100
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    faults = {
        "file": "file too large", "sparse": "file too large", "pipe": "file cannot be read", "../": "file cannot be read",
        "dangling": "file missing", "nul\0": "file missing", "x" * 300: "file cannot be read",
    }  # fmt: skip
    for name, reason in faults.items():
        with pytest.raises(BadFile) as raised:
            read_foreign(f"{tmp_path}/{name}", 99)
        assert raised.value.reason == reason and "\n" not in str(raised.value)
    with pytest.raises(BadFile, match="not a regular file"):
        read_foreign("/dev/zero")


def test_the_pictures_of_a_folder_are_found_once_and_links_in_a_circle_end(tmp_path):
    for file in ("a/1.jpg", "b/2.PNG", "b/notes.txt", ".hidden/3.jpg", "b/.4.jpg"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    for link, target in (("a/to-b", "b"), ("b/to-a", "a"), ("up", ".")):
        (tmp_path / link).symlink_to(tmp_path / target)
    found = [str(file.relative_to(tmp_path)) for file in picture_files(tmp_path)]
    assert found == ["a/1.jpg", "a/to-b/2.PNG", "b/2.PNG", "b/to-a/1.jpg"]
