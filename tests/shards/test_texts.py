"""Files of other people are read within bounds: long JSON arrays as streams, texts of any encoding, pictures of a folder."""

from __future__ import annotations

import io
import json
import os
import zipfile

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import BadFile, picture_files, read_foreign
from open_clip_zerovl.shards.texts import json_array, members, open_member

VALUE = [{"a": [1, 2.5e3, {"\u00fc": 'q"]}, \u20ac'}]}, 17, -3, "x", None, True, [], {}]


class Dribble(io.BytesIO):
    """Gives few bytes at a time, so that every token is cut somewhere."""

    def __init__(self, content: bytes, step: int) -> None:
        super().__init__(content)
        self.step = step

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self.step)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_streamed_whatever_the_pieces(step, indent):
    text = json.dumps(VALUE, ensure_ascii=step % 2 == 0, indent=indent).encode()
    assert list(json_array(Dribble(text, step), "x.json")) == VALUE
    assert list(json_array(Dribble(b"\xef\xbb\xbf " + text + b"\n", step), "x.json")) == VALUE
    document = json.dumps(
        {"first": VALUE, "n": 3, "images": VALUE, "last": [1]}, indent=indent
    ).encode()
    assert list(json_array(Dribble(document, step), "x.json", key="images")) == VALUE


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"images":' * 200_000])
def test_brackets_within_brackets_end_in_a_sentence(tmp_path, content):
    (tmp_path / "x.json").write_bytes(b'{"images": ' + content)
    with (
        pytest.raises(UserError, match="x.json"),
        open_member(tmp_path / "x.json", "x.json") as stream,
    ):
        list(json_array(stream, "x.json", key="images"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"", None),
        (b"[1, 2", None),
        (b'[{"a": 1}, {"a"', None),
        (b"[1 2]", None),
        (b'{"a": 1}', None),
        (b"<html>", None),
        (b'["\xff"]', None),
        (b'{"a": [1], "b": 2}', "images"),
        (b'{"images": {"a": 1}}', "images"),
        (b'{"images": [1, 2', "images"),
    ],
)
def test_broken_json_is_named(text, key):
    with pytest.raises(UserError, match="x.json"):
        list(json_array(io.BytesIO(text), "x.json", key=key))


def test_a_zip_that_asks_for_a_later_reader_is_broken(tmp_path):
    """Found by the fuzzer: a flipped bit in the directory's version."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.json", "[]")
    content = bytearray((tmp_path / "x.zip").read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 84  # version needed: 8.4
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(
        UserError, match=r"x\.zip cannot be read \(zip file version 8\.4\); fetch it again"
    ):
        members(tmp_path / "x.zip")


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
