"""The door: each form of data is packed once, into a folder named by its content, and read as shards."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from urllib.parse import unquote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import user_cache
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sets import open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare import door
from open_clip_zerovl.prepare.door import as_shards, sets_as_shards
from open_clip_zerovl.prepare.inputs import open_input
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.settings import Columns, Work
from open_clip_zerovl.shards.fetch import _marker, used_bytes
from support.pairs import Pair, as_csv, as_folder, as_parquet, picture
from support.servers import Handler, Server
from training.checkpointing import described

PAIRS = 7


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache("open_clip_zerovl") / "packed"


def some(count: int = PAIRS) -> list[Pair]:
    return [Pair(f"{n}.png", picture(n), [f"caption {n}"], "") for n in range(count)]


def write_table(place: Path, rows: int = PAIRS) -> str:
    columns = {"header": "filepath,title", "rows": lambda pair: [(pair.name, pair.captions[0])]}
    return str(as_csv(place, some(rows), **columns))


def karpathy(place: Path) -> str:
    write_table(place / "pictures")
    images = [
        {
            "filename": f"{n}.png",
            "split": "train",
            "imgid": n,
            "sentences": [{"raw": f"caption {n}"}],
        }
        for n in range(PAIRS)
    ]
    (place / "dataset.json").write_text(json.dumps({"images": images, "dataset": "x"}))
    return f"{place}/dataset.json@{place}/pictures"


def packed(place: Path) -> str:
    pack([write_table(place / "in")], place / "out", work=Work(progress=False))
    return f"{place}/out"


FORMS = {
    "a table": write_table,
    "a folder with a table": lambda place: os.path.dirname(write_table(place)),
    "parquet": lambda place: f"{as_parquet(place, some())}/*.parquet",
    "a folder with parquet": lambda place: str(as_parquet(place, some())),
    "pictures with texts": lambda place: str(as_folder(place, some())),
    "Karpathy's JSON": karpathy,
    "a packed folder": packed,
}


def pairs(source) -> dict[str, bytes]:
    samples = [
        sample for shard in range(len(source.shards)) for sample in samples_of(source, shard)
    ]
    return {sample.captions[0]: sample.image for sample in samples}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_a_source_of_shards_that_is_packed_once(form, tmp_path, cache):
    said: list[str] = []
    data = f"x={FORMS[form](tmp_path / 'in')}"
    packed_data = as_shards(data, say=said.append)
    (source,) = parse_sources(packed_data)
    assert (source.name, source.captions) == ("x", "one-per-epoch")
    assert all(shard.endswith(".tar") for shard in source.shards)
    assert pairs(source) == {f"caption {number}": picture(number) for number in range(PAIRS)}
    if form == "a packed folder":
        assert not said and not cache.exists()
        return
    assert len(said) == 2 and "Packing" in said[0] and f"{PAIRS} pictures as shards" in said[1]
    before = shard_times(source)
    assert as_shards(packed_data, say=said.append) == packed_data and len(said) == 2
    shutil.copytree(tmp_path / "in", tmp_path / "again")
    for file in (tmp_path / "again").rglob("*"):
        os.utime(file, (1, 1))
    copy = data.replace(str(tmp_path / "in"), str(tmp_path / "again"))
    assert as_shards(copy, say=said.append) == packed_data
    assert len(said) == 3 and shard_times(source) == before and len(list(cache.glob("[!.]*"))) == 1


def shard_times(source) -> list[int]:
    return [os.stat(shard).st_mtime_ns for shard in source.shards]


def test_another_picture_or_caption_is_another_folder_and_a_resumed_run_sees_it(tmp_path):
    table = write_table(tmp_path / "in")

    def seen() -> tuple[str, str]:
        data = as_shards(f"x={table}")
        return data, described(parse_sources(data))

    known = {seen()}
    (tmp_path / "in/3.png").write_bytes(picture(77))
    known.add(seen())
    Path(table).write_text(Path(table).read_text().replace("caption 3", "caption thirty"))
    known.add(seen())
    os.utime(table, (5, 5))
    known.add(seen())
    assert len(known) == 3 and len({line for _, line in known}) == 3
    assert all(line.startswith(f"x ({PAIRS}, packed ") for _, line in known)


def test_other_words_for_a_class_are_other_data(tmp_path):
    """A corrected classnames.txt was not seen, and the captions of the earlier words were trained on."""
    for number in range(6):
        (tmp_path / f"in/{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/{number % 2}/{number}.png").write_bytes(picture(number))

    def captions(*names: str) -> set[str]:
        (tmp_path / "in/classnames.txt").write_text("\n".join(names))
        (source,) = parse_sources(as_shards(f"x={tmp_path}/in"))
        return set(pairs(source))

    for second in ("shoo", "shoe"):
        assert captions("hat", second) == {"a photo of a hat.", f"a photo of a {second}."}


def packs(data: str, done: multiprocessing.Queue) -> None:
    done.put(as_shards(data))


def test_two_processes_at_once_end_in_one_folder(tmp_path, cache):
    table, context = write_table(tmp_path / "in", 200), multiprocessing.get_context("fork")
    done = context.Queue()
    children = [context.Process(target=packs, args=(f"x={table}", done)) for _ in range(3)]
    for child in children:
        child.start()
    ends = {done.get(timeout=120) for _ in children}
    for child in children:
        child.join()
    assert len(ends) == 1 and [child.exitcode for child in children] == [0, 0, 0]
    (source,) = parse_sources(ends.pop())
    assert source.num_samples == 200 and len(list(cache.glob("[!.]*"))) == 1


def test_folders_out_of_use_make_room_least_recently_used_first(tmp_path, cache):
    folders, said = [], []
    for name in "abc":
        data = as_shards(f"x={write_table(tmp_path / name, rows=4 + len(folders))}")
        folders.append(Path(data.partition("=")[2]))
    door.limit_size(cache, said.append, most_bytes=0)  # this process reads all of them
    assert all(folder.is_dir() for folder in folders) and not said
    for age, folder in zip((1, 2), (folders[2], folders[0]), strict=True):
        os.close(door._READING.pop(folder))
        os.utime(_marker(folder), (1e9 - age, 1e9 - age))
    (folders[0] / ".x.part").symlink_to("what another process has renamed meanwhile")
    for most_bytes, left in (
        (sum(map(used_bytes, folders)) - 1, [False, True, True]),
        (0, [False, True, False]),
    ):
        door.limit_size(cache, said.append, most_bytes)
        assert [folder.is_dir() for folder in folders] == left
    (source,) = parse_sources(as_shards(f"x={tmp_path}/a/pairs.csv"))
    assert source.num_samples == 4 and folders[0].is_dir()


def test_rows_that_cannot_be_used_are_said_or_end_a_strict_call(tmp_path):
    table = write_table(tmp_path / "in")
    with open(table, "a") as file:
        file.write("gone.png,a caption\n3.png,\n")
    said: list[str] = []
    (source,) = parse_sources(as_shards(f"x={table}", say=said.append))
    assert source.num_samples == PAIRS
    assert "rows refused: 1 empty caption, 1 picture missing" in said[-1]
    with pytest.raises(UserError, match=r"pairs\.csv has rows that cannot be used .*refused\.csv"):
        as_shards(f"x={table}", strict=True)


def test_addresses_and_too_many_rows_get_the_command_to_type(tmp_path, monkeypatch):
    table = write_table(tmp_path / "in")
    (tmp_path / "web.csv").write_text("url,caption\nhttps://example.org/1.jpg,a dog\n")
    monkeypatch.setattr(door, "MOST_ROWS", PAIRS - 1)
    for place, why in (
        (f"{tmp_path}/web.csv", "holds addresses"),
        (table, f"more than {PAIRS - 1} rows"),
    ):
        with pytest.raises(UserError, match=rf"{why}.*`zerovl data pack .*\.csv --out DIR"):
            as_shards(f"x={place}")


def test_shards_and_what_lies_on_servers_are_left_alone(tmp_path):
    for data in (
        "a=s3://bucket/{0..3}.tar", "pipe:cat x.tar", f"a={tmp_path}/no/{{0..3}}.tar::b=/gone/*.tgz",
    ):  # fmt: skip
        assert as_shards(data) == data


def test_a_retrieval_set_is_its_split_or_all_of_a_table_without_splits(tmp_path):
    table = write_table(tmp_path / "in")
    (place,) = parse_retrieval_data(sets_as_shards(table)).values()
    assert len(open_retrieval_set(place)) == PAIRS
    rows = [f"{n}.png,caption {n},{'test' if n < 2 else 'train'}" for n in range(PAIRS)]
    Path(table).write_text("\n".join(["filepath,title,split", *rows]) + "\n")
    sets = parse_retrieval_data(sets_as_shards(f"s={tmp_path}/in"))
    assert list(sets) == ["s"] and len(open_retrieval_set(sets["s"])) == 2


def test_karpathys_file_is_the_same_set_by_itself_and_packed(tmp_path):
    """In the form of dataset_flickr8k.json: no `filepath`, no `cocoid`; one split at a time."""
    write_table(tmp_path / "in", 8)
    images = [
        {"filename": f"{n}.png", "split": ("train", "restval", "val", "test")[n % 4], "imgid": n,
         "sentids": [2 * n, 2 * n + 1],
         "sentences": [{"raw": f"a  dog {n}, {k}.", "tokens": ["a"], "imgid": n, "sentid": 2 * n + k} for k in (0, 1)]}
        for n in range(8)
    ]  # fmt: skip
    file = tmp_path / "dataset_flickr8k.json"
    file.write_text(json.dumps({"images": images, "dataset": "flickr8k"}))
    text = f"{file}@{tmp_path}/in"
    (alone,) = parse_retrieval_data(sets_as_shards(text)).values()
    data = as_shards(f"k={text}").partition("=")[2]
    for split, count in (("train", 4), ("val", 2), ("test", 2)):
        contents = [
            {sample.content(): sample.captions for sample in samples}
            for samples in (
                open_retrieval_set(alone, split).samples,
                open_retrieval_set(f"{data}/{split}", split).samples,
            )
        ]
        assert contents[0] == contents[1] and len(contents[0]) == count


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12),
        min_size=1,
        max_size=150,
    )
)
def test_rows_are_found_again_whatever_is_quoted_in_them(tmp_path_factory, captions):
    path = tmp_path_factory.mktemp("table") / "t.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", "caption"])
        writer.writerows((f"{number}.png", caption) for number, caption in enumerate(captions))
    for number in range(len(captions)):
        (path.parent / f"{number}.png").touch()
    rows = [(row.name, row.captions) for row in open_input(path, Columns()).rows()]
    assert rows == [(f"{number}.png", [caption]) for number, caption in enumerate(captions)]


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

    def do_POST(self) -> None:
        """Name the paths that are asked for, as huggingface_hub before 1.0 does."""
        asked = unquote_plus(self.rfile.read(int(self.headers["Content-Length"])).decode())
        answer = [{"type": "directory", "path": "data", "oid": "0"}] if "data" in asked else []
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def test_a_star_names_the_files_of_a_data_set_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = as_parquet(tmp_path / "rows", some())
    data = "cc=hf://datasets/me/cc@v1/data/*.parquet"
    with Server(Hub) as hub:
        hub.folder = folder
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        (source,) = parse_sources(as_shards(data))
        assert pairs(source) == {f"caption {number}": picture(number) for number in range(PAIRS)}
        with pytest.raises(
            UserError, match=r"no file is named like hf://datasets/me/cc@v1/data/\*\.pq"
        ):
            as_shards("cc=hf://datasets/me/cc@v1/data/*.pq")


COLUMNS = {  # header: (columns that are given, those of the picture and of the captions, or words of the refusal)
    "file,title": (Columns("file"), ("file", "title")),  # one is given, the other has a usual name
    "image,text": (Columns(None, ("text",)), ("image", "text")),
    "image,text,caption": (Columns(), ("image", "caption")),  # the likelier, wherever it stands
    "title,filepath,a,b": (Columns("a", ("b",)), ("a", "b")),
    "image_path;text": (Columns(), ("image_path", "text")),
    "file;words": (Columns("file", ("words",), separator=";"), ("file", "words")),
    "path|caption_0|caption_1": (Columns(), ("path", "caption_0", "caption_1")),
    "words;thing": (Columns(), "like a picture .* or a caption .*; its columns are 'words', 'thing': name them"),
    "filepath,title": (Columns("a", ("b",)), "has no column 'a', given with --picture-column"),
    "image,caption,caption": (Columns(), "has 2 columns named 'caption': give each column its own name"),
}  # fmt: skip


@pytest.mark.parametrize("header", COLUMNS)
def test_columns_are_the_given_ones_or_one_sentence_names_all_that_lack(tmp_path, header):
    """A flag that stood alone, or named no column, was passed over without a word."""
    given_columns, wanted = COLUMNS[header]
    (tmp_path / "x.csv").write_text(f"{header}\n{header}\n")
    if isinstance(wanted, str):
        with pytest.raises(UserError, match=wanted):
            open_input(tmp_path / "x.csv", given_columns)
    else:
        chosen = open_input(tmp_path / "x.csv", given_columns).chosen
        assert (chosen.picture, *chosen.captions) == wanted
