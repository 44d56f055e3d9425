"""Sentences that are shown: text from data is made safe for a terminal."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.prepare.public.index import check_shards
from open_clip_zerovl.shards.faults import check_report
from support.tars import png, write_tar

KEY = "a\x1b[2J\x1b]0;title\x07\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a caf\u00e9, \u4e2d, 1F697", "a caf\u00e9, \u4e2d, 1F697"),
        ("a\x1b[2J", r"a\x1b[2J"),
        ("\udcff.jpg", r"\udcff.jpg"),
        ("left\u202eright", r"left\u202eright"),
    ],
)
def test_control_characters_are_escaped_for_a_terminal(text, shown):
    assert printable(text) == shown == str(UserError(text))
    shown.encode()  # bytes that are not text have become printable


def test_keys_of_tars_are_printed_escaped(tmp_path):
    write_tar(
        tmp_path / "s/0.tar",
        [(f"{KEY}.png", png((1, 2, 3))), (f"{KEY}.txt", b" "), ("b\udcff.txt", b"")],
    )
    report = check_report(check_shards(tmp_path / "s", progress=False))
    assert r"caption is empty: 2 (a\x1b[2J\x1b]0;title\x07\u202e, b\udcff)" in report
    assert all(line.isprintable() for line in report.splitlines())
    (tmp_path / "set" / "test").mkdir(parents=True)
    (tmp_path / "set" / "dataset_type.txt").write_text("retrieval")
    (tmp_path / "set" / "test" / "nshards.txt").write_text("1")
    write_tar(tmp_path / "set/test/0.tar", [(f"{KEY}.png", png((1, 2, 3)))])
    with pytest.raises(UserError) as raised:
        open_retrieval_set(tmp_path / "set")
    assert str(raised.value).isprintable() and "title" in str(raised.value)
