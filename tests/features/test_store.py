"""A folder of embeddings: rows of unchanged files are taken over, other embeddings refused, each array checked."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.features.store import Manifest, Store

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


def test_a_cache_that_is_not_finished_keeps_what_it_has(tmp_path):
    store = Store.create(tmp_path, manifest())
    store.rows["rows"][3:] = torch.ones(3, 4)
    store.finish(slice(3, 6))  # the shard
    store.flush()
    moved = Store.create(tmp_path, manifest([MARKS[2], *MARKS[:2]], (3, 2, 1)), cache=True)
    assert moved.done.tolist() == 3 * [True] + 3 * [False]


@pytest.mark.parametrize("other", [{"seed": 1}, {"dtype": "float32"}])
def test_other_facts_or_numbers_make_a_cache_anew_and_are_refused_elsewhere(tmp_path, other):
    filled(tmp_path, manifest())
    with pytest.raises(
        UserError, match="was begun with (seed 0, and this call has seed 1|rows float16)"
    ):
        Store.create(tmp_path, manifest(**other))
    assert not Store.create(tmp_path, manifest(**other), cache=True).done.any()


def test_a_copy_of_the_data_is_the_same_for_a_store_and_not_for_a_cache(tmp_path):
    copied = manifest([[*mark[:2], 77, mark[3]] for mark in MARKS])
    filled(tmp_path, manifest())
    assert Store.create(tmp_path, copied).done.all()
    assert not Store.create(tmp_path, copied, cache=True).done.any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_come_back_as_written(tmp_path, dtype):
    rows = filled(tmp_path, manifest(dtype=dtype)).rows["rows"]
    assert rows[[5, 0]].tolist() == [[6.0] * 4, [1.0] * 4] and rows[0].dtype == getattr(
        torch, dtype
    )
    assert torch.equal(torch.cat(list(rows.blocks())), rows[:])


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_cut_short_of_another_shape_or_gone_gets_a_sentence(tmp_path, mode):
    filled(tmp_path, about := manifest())
    file = tmp_path / "rows.npy"
    file.write_bytes(content := file.read_bytes()[:-6])
    with pytest.raises(UserError, match=r"rows\.npy is gone, cut short or damaged"):
        Store(tmp_path, about, mode=mode)
    assert file.read_bytes() == content  # numpy makes a file longer that it may write to
    np.save(file, np.zeros((6, 5), np.float16))
    with pytest.raises(UserError, match=r"float16 of shape \(6, 5\) in place of float16 of"):
        Store(tmp_path, about, mode=mode)
    file.unlink()
    with pytest.raises(UserError, match=r"rows\.npy is gone"):
        Store(tmp_path, about, mode=mode)


def test_a_changed_manifest_gets_a_sentence(tmp_path):
    filled(tmp_path, manifest())
    file = tmp_path / "embeddings.json"
    content = json.loads(file.read_text())
    content["sources"][0]["sizes"][0] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"embeddings\.json cannot be read .*make the embeddings anew"
    ):
        Store.open(tmp_path, remedy="zerovl align")
    assert not Store.create(tmp_path, manifest(), cache=True).done.any()  # a cache is made anew


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("damage", ["a byte", "zeros", "negated"])
def test_damaged_rows_are_made_anew_by_a_cache_and_refused_elsewhere(tmp_path, dtype, damage):
    """A changed byte gave a score of 1.4e35; zeroed and negated rows gave another accuracy without a word."""
    filled(tmp_path, about := manifest(dtype=dtype))
    with open(tmp_path / "rows.npy", "r+b") as file:
        width = torch.empty(0, dtype=getattr(torch, dtype)).element_size() * 4
        file.seek(-2 * width, 2)
        row = bytearray(file.read(width))
        for place in range(width):
            if damage == "zeros":
                row[place] = 0
            elif damage == "negated" and place % (width // 4) == width // 4 - 1:
                row[place] ^= 0x80
        row[1] ^= 0x04 if damage == "a byte" else 0
        file.seek(-2 * width, 2)
        file.write(row)
    opened = Store(tmp_path, about)
    assert opened.rows["rows"][[0, 5]].tolist() == [[1.0] * 4, [6.0] * 4]  # negative control
    for read in (
        lambda: opened.rows["rows"][4],
        lambda: list(opened.rows["rows"].blocks()),
        lambda: Store.open(tmp_path, remedy="make"),
    ):
        with pytest.raises(UserError, match=r"rows\.npy holds rows that were damaged"):
            read()
    found = Store.create(tmp_path, about, cache=True)
    assert found.done.tolist() == [True] * 4 + [False, True]
    found.rows["rows"][4:5] = torch.full((1, 4), 5.0)
    found.finish(slice(4, 5))
    found.flush()
    assert Store.open(tmp_path, remedy="make").rows["rows"][4].tolist() == [5.0] * 4
