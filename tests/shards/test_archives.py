"""Long JSON arrays are streamed from published files, and a broken one is named."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from open_clip_zerovl.core.errors import UserError
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
