"""A folder of embeddings: rows of unchanged files are taken over, other embeddings refused, each array checked."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.embeddings.store import Manifest, Store

MARKS = [
    ["a.csv", 9, 1, "x"],
    ["a.csv", 9, 1, "x"],
    ["b.tar", 5, 2, "y"],
]  # a table of two blocks of rows, a shard


def manifest(marks=MARKS, sizes=(2, 1, 3), dtype="float16", **facts) -> Manifest:
    sources = [
        {"name": "s", "marks": [list(mark) for mark in marks], "sizes": list(sizes), "picked": None}
    ]
    return Manifest({"seed": 0, **facts}, sources, {"rows": (dtype, (sum(sizes), 4))})


def filled(folder, about) -> Store:
    store = Store.create(folder, about)
    store.rows["rows"][:] = torch.arange(1.0, 7).repeat(4, 1).T
    store.finish(slice(0, 6))
    store.flush()
    return store


@pytest.mark.parametrize(
    ("marks", "sizes", "expected"),
    [
        ([MARKS[2], *MARKS[:2]], (3, 2, 1), [4, 5, 6, 1, 2, 3]),  # another order
        (
            [MARKS[0], MARKS[1], ["b.tar", 5, 3, "y"]],
            (2, 1, 3),
            [1, 2, 3, 0, 0, 0],
        ),  # written again
        ([MARKS[0], MARKS[1]], (1, 2), [0, 0, 0]),  # other blocks
        ([["n.tar", 5, 2, "y"], MARKS[2]], (1, 3), [0, 4, 5, 6]),  # a file more, one less
    ],
)
def test_a_cache_keeps_the_rows_of_unchanged_files(tmp_path, marks, sizes, expected):
    filled(tmp_path, manifest())
    found = Store.create(tmp_path, manifest(marks, sizes), cache=True)
    assert found.rows["rows"][:][:, 0].tolist() == expected and found.done.tolist() == [
        value > 0 for value in expected
    ]
    assert (
        Store.create(tmp_path, manifest(marks, sizes), cache=True).done.tolist()
        == found.done.tolist()
    )


@pytest.mark.parametrize("other", [{"seed": 1}, {"dtype": "float32"}])
def test_other_facts_or_numbers_make_a_cache_anew_and_are_refused_elsewhere(tmp_path, other):
    filled(tmp_path, manifest())
    with pytest.raises(
        UserError, match="holds embeddings with (seed 0 and not 1|rows of another width)"
    ):
        Store.create(tmp_path, manifest(**other))
    assert not Store.create(tmp_path, manifest(**other), cache=True).done.any()


def test_a_copy_of_the_data_is_the_same_for_a_store_and_not_for_a_cache(tmp_path):
    copied = manifest([[*mark[:2], 77, mark[3]] for mark in MARKS])
    filled(tmp_path, manifest())
    assert Store.create(tmp_path, copied).done.all()
    assert not Store.create(tmp_path, copied, cache=True).done.any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_rows_come_back_as_written_and_never_with_nan(tmp_path, dtype, value):
    rows = filled(tmp_path, manifest(dtype=dtype)).rows["rows"]
    assert rows[[5, 0]].tolist() == [[6.0] * 4, [1.0] * 4] and rows[0].dtype == getattr(
        torch, dtype
    )
    assert torch.equal(torch.cat(list(rows.blocks())), rows[:])
    rows[3] = torch.tensor([1.0, 2, value, 4])
    for read in (
        lambda: rows[3],
        lambda: list(rows.blocks()),
        lambda: Store.open(tmp_path, remedy="make"),
    ):
        with pytest.raises(UserError, match=r"rows\.npy holds rows with NaN or infinite numbers"):
            read()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_cut_short_of_another_shape_or_gone_gets_a_sentence(tmp_path, mode):
    filled(tmp_path, about := manifest())
    file = tmp_path / "rows.npy"
    file.write_bytes(content := file.read_bytes()[:-6])
    with pytest.raises(UserError, match=r"rows\.npy cannot be read, it is cut short or damaged"):
        Store(tmp_path, about, mode=mode)
    assert file.read_bytes() == content  # numpy makes a file longer that it may write to
    np.save(file, np.zeros((6, 5), np.float16))
    with pytest.raises(
        UserError,
        match=r"holds float16 of shape \(6, 5\), and embeddings\.json says float16 of \(6, 4\)",
    ):
        Store(tmp_path, about, mode=mode)
    file.unlink()
    with pytest.raises(UserError, match=r"rows\.npy is gone"):
        Store(tmp_path, about, mode=mode)


@pytest.mark.parametrize(
    "damage",
    [
        lambda one: one["marks"].pop(),
        lambda one: one.update(marks=[None] * 3),
        dict.popitem,
    ],
)
def test_a_manifest_with_damaged_marks_gets_a_sentence(tmp_path, damage):
    filled(tmp_path, manifest())
    file = tmp_path / "embeddings.json"
    content = json.loads(file.read_text())
    damage(content["sources"][0])
    file.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"embeddings\.json cannot be read .*make the embeddings anew"
    ):
        Store.open(tmp_path, remedy="zerovl teacher")
    assert not Store.create(tmp_path, manifest(), cache=True).done.any()  # a cache is made anew
