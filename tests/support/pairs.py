"""The same small set of pairs in every form that `zerovl data pack` reads, and the packed result."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from open_clip_zerovl.shards.tar import Sample, read_samples
from support.tars import write_tar


class Pair(NamedTuple):
    """A picture's file name and bytes, its captions, its source."""

    name: str
    content: bytes
    captions: list[str]
    source: str


def picture(number: int, format: str = "PNG", size: tuple[int, int] = (24, 20)) -> bytes:
    """Make a picture that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, format)
    return content.getvalue()


def make_pairs(count: int = 12) -> list[Pair]:
    """Make pairs of two sources, where every third picture has three captions."""
    return [
        Pair(
            f"{'ab'[number % 2]}/{number:03d}.{'jpg' if number % 4 == 1 else 'png'}",
            picture(number, "JPEG" if number % 4 == 1 else "PNG"),
            [f'picture {number}, "text" {text}' for text in range(3 if number % 3 == 0 else 1)],
            f"source-{'ab'[number % 2]}",
        )
        for number in range(count)
    ]


def write_pictures(folder: Path, pairs: list[Pair]) -> None:
    for pair in pairs:
        (folder / pair.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / pair.name).write_bytes(pair.content)


def with_pictures(folder: Path, pairs: list[Pair], name: str, text: str) -> Path:
    """Write pictures and a file beside them."""
    write_pictures(folder, pairs)
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder / name


def as_folder(
    folder: Path,
    pairs: list[Pair],
    ending: str = ".txt",
    text: Callable[[Pair], str] = lambda pair: "\n".join(pair.captions) + "\n",
) -> Path:
    """Texts beside the pictures, one caption a line."""
    write_pictures(folder, pairs)
    for pair in pairs:
        (folder / pair.name).with_suffix(ending).write_text(text(pair), encoding="utf-8")
    return folder


def of_pair(pair: Pair) -> str:
    """The JSON beside a picture."""
    return json.dumps({"id": 7, "caption": pair.captions, "kind": pair.source})


def each_caption(pair: Pair) -> list[tuple]:
    return [(pair.name, caption, pair.source) for caption in pair.captions]


def as_csv(
    folder: Path,
    pairs: list[Pair],
    *,
    separator: str = ",",
    name: str = "pairs.csv",
    header: str = "filepath,title,kind",
    rows: Callable[[Pair], list[tuple]] = each_caption,
) -> Path:
    """Write a row a caption, paths relative to the table."""
    table = io.StringIO()
    listed = [header.split(","), *(row for pair in pairs for row in rows(pair))]
    csv.writer(table, delimiter=separator).writerows(listed)
    return with_pictures(folder, pairs, name, table.getvalue())


def as_jsonl(folder: Path, pairs: list[Pair]) -> Path:
    lines = [json.dumps({"file_name": p.name, "text": p.captions, "kind": p.source}) for p in pairs]
    with_pictures(folder, pairs, "metadata.jsonl", "\n".join(lines) + "\n")
    return folder  # a folder with a table and pictures


def as_json_list(folder: Path, pairs: list[Pair]) -> Path:
    rows = [{"image": p.name, "caption": p.captions, "kind": p.source} for p in pairs]
    return with_pictures(folder, pairs, "pairs.json", json.dumps(rows, indent=1))


def as_coco(folder: Path, pairs: list[Pair]) -> Path:
    """Write MS-COCO's captions: images, and annotations in another order."""
    images = [{"id": number, "file_name": pair.name} for number, pair in enumerate(pairs)]
    annotations = [
        {"image_id": number, "id": 100 * number + text, "caption": caption, "kind": pair.source}
        for number, pair in enumerate(pairs)
        for text, caption in enumerate(pair.captions)
    ]
    annotations.sort(key=lambda one: one["id"] % 100)
    content = {"info": {"year": 2017}, "images": images, "licenses": [], "annotations": annotations}
    return with_pictures(folder, pairs, "captions.json", json.dumps(content))


def as_tars(folder: Path, pairs: list[Pair], *, gzipped: bool = False) -> Path:
    """Write img2dataset's webdataset form: `txt` and `json` beside the picture, and a parquet without pictures."""
    for shard in range(2):
        members = []
        for number, pair in enumerate(pairs[shard::2]):
            about = json.dumps({"caption": pair.captions[0], "kind": pair.source})
            texts = {"txt": "\n".join(pair.captions), "json": about}
            members += [(f"{shard:05d}{number:04d}.{pair.name[-3:]}", pair.content)]
            members += [(f"{shard:05d}{number:04d}.{end}", t.encode()) for end, t in texts.items()]
        tar = write_tar(folder / f"{shard:05d}.tar", members)
        if gzipped:
            tar.with_suffix(".tar.gz").write_bytes(gzip.compress(tar.read_bytes(), mtime=0))
            tar.unlink()
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1 of no matter")
    return folder


def rows_of(pairs: list[Pair], name: str, picture: Callable[[Pair], Any]) -> pyarrow.Table:
    """Make a table of a row a picture."""
    return pyarrow.Table.from_pylist(
        [
            {name: picture(pair), "caption": pair.captions, "kind": pair.source, "width": 24}
            for pair in pairs
        ]
    )


def as_parquet(folder: Path, pairs: list[Pair]) -> Path:
    """Write img2dataset's parquet form: a column of bytes, in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((pairs[:5], pairs[5:])):
        table = rows_of(part, "jpg", lambda pair: pair.content)
        pyarrow.parquet.write_table(table, folder / f"{number:05d}.parquet")
    return folder


def as_parquet_rows(folder: Path, pairs: list[Pair]) -> Path:
    """Hugging Face's image column, a row a caption: the bytes of a picture come again with each of its captions."""
    rows = [
        {
            "image": {"bytes": pair.content, "path": Path(pair.name).name},
            "text": caption,
            "kind": pair.source,
        }
        for pair in pairs
        for caption in pair.captions
    ]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def as_parquet_paths(folder: Path, pairs: list[Pair]) -> Path:
    write_pictures(folder, pairs)
    table = rows_of(pairs, "image_path", lambda pair: pair.name)
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    return folder / "pairs.parquet"


def as_saved_dataset(folder: Path, pairs: list[Pair]) -> Path:
    """Write as `datasets.Dataset.save_to_disk`: Arrow streams, and `state.json` that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (pairs[:7], pairs[7:]), strict=True):
        table = rows_of(part, "image", lambda pair: {"bytes": pair.content, "path": None})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    listed = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(listed))
    return folder


FORMS: dict[str, Callable[[Path, list[Pair]], Path]] = {
    "folder": as_folder,
    "folder of json": partial(as_folder, ending=".json", text=of_pair),
    "csv": as_csv,
    "tsv": partial(as_csv, separator="\t", name="pairs.tsv"),
    "csv, several columns": partial(
        as_csv,
        separator=";",
        header="Image,Caption 1,Caption 2,Caption 3,kind",
        rows=lambda pair: [(pair.name, *[*pair.captions, "", ""][:3], pair.source)],
    ),
    "csv, lists as pandas writes them": partial(
        as_csv,
        header="path,captions,kind",
        rows=lambda pair: [(pair.name, repr(pair.captions), pair.source)],
    ),
    "jsonl in a folder": as_jsonl,
    "json list": as_json_list,
    "coco": as_coco,
    "tars": as_tars,
    "gzipped tars": partial(as_tars, gzipped=True),
    "parquet": as_parquet,
    "parquet, a row a caption": as_parquet_rows,
    "parquet of paths": as_parquet_paths,
    "saved dataset": as_saved_dataset,
}


def samples_of(folder: Path) -> list[Sample]:
    """Read all samples of a folder's shards, in order."""
    return [sample for shard in sorted(folder.glob("*.tar")) for sample in read_samples(shard)]


def shards_of(out: Path) -> dict[str, str]:
    """Hash of every tar, sizes.json, nshards.txt and dataset_type.txt below a folder."""
    wanted = (".tar", "sizes.json", "nshards.txt", "dataset_type.txt")
    return {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(out.rglob("*"))
        if file.name.endswith(wanted)
    }
