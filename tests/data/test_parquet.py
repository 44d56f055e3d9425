"""Parquet files as shards: the batches of the tars that hold the same samples, from a disk, a server, a cache and the hub."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import expand_shards
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.table import CsvFormat
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.members import ShardError
from support.loading import loader_of
from support.loopback import Handler, Server, serving
from support.shard_server import shard_server
from support.tars import as_parquet, png, write_source

PICTURE = png((1, 2, 3))


@pytest.fixture
def folder(tmp_path):
    """Tars and parquet files with the same two times ten samples."""
    write_source(tmp_path / "cc", 0, 20, 10)
    as_parquet(tmp_path / "cc")
    return tmp_path / "cc"


def batches_of(data: str, **options) -> list[list[torch.Tensor]]:
    """The pictures and captions of two epochs, and those of a run that goes on in the middle of the second."""
    loader = loader_of(data, 5, shuffle_window_samples=12, **options)
    found = []
    for start in ((0, 0), (1, 0), (1, 2)):
        loader.set_epoch(*start)
        found.append([part for batch in loader for part in batch])
    assert loader.lost == {}
    return found


@pytest.mark.parametrize(("where", "workers"), [("disk", 0), ("server", 2)])
def test_the_batches_are_those_of_tars_and_go_on_where_a_run_stopped(
    folder, tmp_path, where, workers
):
    tars = batches_of(f"cc={folder}/{{00000..00001}}.tar", workers=workers)
    with shard_server(folder) as server:
        server.faults["00000.parquet"] = ["cut:900"]
        data = (
            f"cc={folder}/*.parquet"
            if where == "disk"
            else f"cc={server.url('{00000..00001}.parquet')}"
        )
        cache = ShardCache(str(tmp_path / "cache"), 1 << 30)
        found = batches_of(parse_sources(data, cache=cache), workers=workers, cache=cache)
    assert [len(part) for part in found] == [8, 8, 4] and all(
        map(torch.equal, found[1][4:], found[2])
    )
    assert all(map(torch.equal, chain(*tars), chain(*found)))
    if where == "server":  # fetched once, to be counted
        assert [len(server.requests[f"0000{number}.parquet"]) for number in (0, 1)] == [2, 1]


@pytest.mark.parametrize("start", [0, 5, 6, 9, 10])
def test_a_reader_begins_at_any_row(folder, start):
    tars, rows = (
        parse_sources(f"cc={folder}/{{00000..00001}}.{kind}")[0] for kind in ("tar", "parquet")
    )
    found = [
        [(one.image, one.caption) for one in Reading(each, 0).samples(1, start, start)]
        for each in (tars, rows)
    ]
    assert found[0] == found[1] and len(found[0]) == 10 - start


def test_row_groups_larger_than_a_batch_are_skipped_into(tmp_path):
    """Batches have 64 rows: a reader that begins in the third batch of a row group drops the first two."""
    rows = [{"image": PICTURE, "text": f"row {number}"} for number in range(300)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "0.parquet")
    (source,) = parse_sources(f"a={tmp_path}")
    shown = [sample.caption for sample in Reading(source, 0).samples(0, 150, 150)]
    assert shown == [f"row {number}" for number in range(150, 300)]


def write(path: Path, *rows: dict) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=8)


def test_bad_rows_are_counted_and_other_columns_are_fields(tmp_path):
    rows = [
        {"jpg": PICTURE, "captions": [f"sample {number}", ""], "syn": "x"} for number in range(20)
    ]
    rows[3]["jpg"], rows[4]["captions"], rows[5]["jpg"], rows[6]["captions"] = (
        None,
        None,
        b"GIF",
        ["", " "],
    )
    latin = pyarrow.array([b"x"] * 19 + [b"\xe9"]).buffers()
    table = pyarrow.Table.from_pylist(rows).append_column(
        "raw", pyarrow.Array.from_buffers(pyarrow.string(), 20, latin)
    )
    pyarrow.parquet.write_table(table, tmp_path / "0.parquet")
    style, data = CsvFormat(None, "captions"), f"a={tmp_path}"
    (source,) = parse_sources(data, table_format=style)
    loader = loader_of((source,), 4)
    assert len(list(loader)) == 5
    assert loader.lost == {"a": {"no image": 1, "empty caption": 2, "undecodable image": 1}}
    (raw,) = parse_sources(data, table_format=CsvFormat("jpg", "raw"))
    assert [one.fault and one.fault.reason for one in Reading(raw, 0).samples(0, 18, 18)] == [
        None,
        "caption not UTF-8",
    ]
    about = {"captions": ["sample 0", ""], "syn": "x", "raw": "x"}
    assert json.loads(next(samples_of(source, 0)).files["json"]) == about
    (field,) = parse_sources(data, captions="syn=1", table_format=style)
    assert next(Reading(field, 0).samples(0, 9, 9)).caption == "x"


def test_a_file_that_changes_after_it_was_counted_is_noticed(folder, tmp_path):
    with shard_server(folder) as server:
        data = f"cc={server.url('{00000..00001}.parquet')}"
        cache = ShardCache(str(tmp_path / "cache"), 1 << 30)
        (source,) = parse_sources(data, cache=cache)
        for number in (7, 8):  # each run fetches it again
            cache = ShardCache(str(tmp_path / "cache"), 1 << 30)
            write(
                folder / "00000.parquet", *[{"image": PICTURE, "text": f"sample {number}"}] * number
            )
            samples = Reading(source, 0, cache=cache).samples(0, 0, 0)
            assert [next(samples).caption for _ in range(number)] == [f"sample {number}"] * number
            with pytest.raises(ShardError, match=f"it holds {number} of 10 samples"):
                next(samples)
    (folder / "00001.parquet").write_bytes((folder / "00001.parquet").read_bytes()[:-90])
    with pytest.raises(
        UserError, match=r"1\.parquet is not a parquet file, or a broken one \(.*\): write or fetch"
    ):
        parse_sources(f"cc={folder}/*.parquet")


class Hub(Handler):
    """The hub's answers: the files of a repository's folder `data`, and their content."""

    def do_GET(self) -> None:
        folder = self.server.folder
        if "/api/" not in self.path:
            assert self.path.startswith("/datasets/me/cc/resolve/v1/data/")
            self.answer(200, (folder / self.path.rpartition("/")[2]).read_bytes())
            return
        answer = [
            {"type": "file", "path": f"data/{path.name}", "size": 4, "oid": "0"}
            for path in folder.iterdir()
        ]
        if "/data?" not in self.path:
            answer = (
                [{"type": "directory", "path": "data", "oid": "0"}]
                if "/tree/" in self.path
                else {"id": "me/cc"}
            )
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET


def test_a_star_of_a_query_or_beside_brackets_is_read_as_it_stands(folder, tmp_path):
    signed = "https://h/{00000..00001}.tar?token=exp=1~acl=/*~hmac=a"
    assert expand_shards(signed) == tuple(
        f"https://h/0000{n}.tar?token=exp=1~acl=/*~hmac=a" for n in range(2)
    )
    folder.rename(tmp_path / "x[2023]")
    assert [Path(shard).name for shard in expand_shards(f"{tmp_path}/x[2023]/*.tar")] == [
        "00000.tar",
        "00001.tar",
    ]
    for shard in (tmp_path / "x[2023]").glob("*.tar"):
        shard.unlink()
    (tmp_path / "x[2023]" / "._0.parquet").write_bytes(b"of a Mac")
    assert len(expand_shards(f"{tmp_path}/x[2023]")) == 2


def test_a_star_names_the_files_of_a_data_set_on_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving(Server(Hub)) as hub:
        hub.folder = folder
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        (source,) = parse_sources("cc=hf://datasets/me/cc@v1/data/0000*.parquet")
        assert (
            source.sizes == (10, 10)
            and source.shards[1] == "hf://datasets/me/cc@v1/data/00001.parquet"
        )
        assert [one.caption for one in Reading(source, 0).samples(1, 8, 18)] == [
            "sample 18",
            "sample 19",
        ]
        with pytest.raises(
            UserError, match=r"no file is named like hf://datasets/me/cc@v1/data/\*\.pq"
        ):
            parse_sources("cc=hf://datasets/me/cc@v1/data/*.pq")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match=r"files of hf://.* cannot be listed \(.*\); check the address"
    ):
        parse_sources("cc=hf://datasets/me/dd/*.parquet")


PAIR = {"image": PICTURE, "text": "a dog"}
MISTAKES = {  # row, columns that are given, words
    "no bytes": (
        {"url": "h/1.jpg", "text": "x"},
        {},
        r"no pictures' bytes in 'url', 'text': .* pack .*1\.parquet",
    ),
    "no picture": (
        PAIR,
        {"image_key": "text"},
        r"no column of .* is named like a caption",
    ),
    "no caption": (
        {"image": PICTURE, "label": 3},
        {},
        r"no column of .* a caption .*'label': name it with --csv-caption-key",
    ),
    "numbers": ({"image": PICTURE, "text": 3}, {}, r"no captions in 'text': name a column of text"),
    "misspelt": (
        PAIR,
        {"caption_key": "txet"},
        r"no column 'txet', .*; did you mean --csv-caption-key 'text'",
    ),
    "another file": (PAIR, {}, r"2\.parquet has no column 'image'"),
    "repeated": (PAIR, {}, "has 2 columns named 'text': give each column its own name"),
    "every caption": (PAIR, {}, "'--captions all' cannot count .*; copy or pack them here"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_before_training(mistake, tmp_path):
    row, given, sentence = MISTAKES[mistake]
    write(tmp_path / "1.parquet", row)
    if mistake == "another file":
        write(tmp_path / "2.parquet", {"jpg": PICTURE, "text": "x"})
    if mistake == "repeated":
        columns = [pyarrow.array([value]) for value in (PICTURE, "a dog", "a cat")]
        table = pyarrow.Table.from_arrays(columns, names=["image", "text", "text"])
        pyarrow.parquet.write_table(table, tmp_path / "1.parquet")
    captions = "all" if mistake == "every caption" else None
    with pytest.raises(UserError, match=sentence) as caught:
        parse_sources(f"a={tmp_path}", table_format=CsvFormat(**given), captions=captions)
    assert "\n" not in str(caught.value)


def test_retrieval_sets_of_parquet_have_a_sentence(folder, tmp_path):
    for place in (f"{folder}/{{00000..00001}}.parquet", f"{folder}/*.parquet"):
        with pytest.raises(
            UserError,
            match="parquet is not a readable, uncompressed tar .* `zerovl data pack .*--out DIR`",
        ):
            open_retrieval_set(place)
