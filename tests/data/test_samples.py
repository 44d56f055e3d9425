"""Sources as evaluation reads them, and which forms are refused by name."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import origin_of
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.files import write_retrieval_set
from open_clip_zerovl.shards.tar import Sample
from support.tars import png, write_source


@pytest.mark.parametrize(
    ("content", "origin"),
    [
        (b'{"width": 3, "url": "https://h/a.jpg"}', "https://h/a.jpg"), (b'{"file": "", "filename": "a b.jpg"}', "a b.jpg"),
        (b'{"url": 3}', ""), (b"[]", ""), (b"{", ""), (b"\xff", ""), (b"[" * 100_000, ""), (None, ""),
    ],
)  # fmt: skip
def test_a_sample_is_named_by_what_its_json_says_of_its_picture(content, origin):
    """`zerovl search` prints it beside the key, which is a hash or a number."""
    assert origin_of(Sample("000", {} if content is None else {"json": content})) == origin


def test_a_retrieval_set_is_a_source_of_evaluation_alone(tmp_path):
    samples = [Sample(f"{i}", {"png": png((i, 0, 0)), "txt": b"a cat"}) for i in range(3)]
    write_retrieval_set(tmp_path / "coco", samples)
    (source,) = parse_sources(f"{tmp_path}/coco", evaluation=True)
    assert (source.name, source.num_samples) == ("coco", 3)
    with pytest.raises(
        UserError, match=r"coco is a retrieval set, .* name the shards to read: .*coco/test$"
    ):
        parse_sources(f"a={tmp_path}/coco")
    write_source(tmp_path / "coco" / "val", 0, 2, 2)
    (tmp_path / "coco" / "test" / "nshards.txt").unlink()
    with pytest.raises(UserError, match="is a retrieval set"):
        parse_sources(f"a={tmp_path}/coco", evaluation=True)
    for form in ("dataset_coco.json", f"dataset_coco.json@{tmp_path}"):
        with pytest.raises(UserError, match="is not shards: make them with `zerovl data pack"):
            parse_sources(f"a={tmp_path}/{form}", evaluation=True)
