"""Long JSON arrays are streamed from published files, and a broken one is named."""

from __future__ import annotations

import io
import json

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.archives import json_array

VALUE = [{"a": [1, 2.5e3, {"\u00fc": 'q"]}, \u20ac'}]}, 17, -3, "x", None, True, [], {}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii", [False, True])
def test_json_is_streamed(indent, ascii):
    text = json.dumps(VALUE, ensure_ascii=ascii, indent=indent).encode()
    for content in (text, b"\xef\xbb\xbf " + text + b"\n"):
        assert list(json_array(io.BytesIO(content), "x.json")) == VALUE
    document = json.dumps({"first": VALUE, "n": 3, "images": VALUE, "last": [1]}, indent=indent).encode()
    assert list(json_array(io.BytesIO(document), "x.json", key="images")) == VALUE
    assert next(json_array(io.BytesIO(b"[1, " + b" " * (1 << 17) + b"broken"), "x.json")) == 1  # before the end is read


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
