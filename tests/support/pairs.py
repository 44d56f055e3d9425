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
from typing import NamedTuple

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


def as_folder(folder: Path, pairs: list[Pair]) -> Path:
    """Texts beside the pictures, one caption a line."""
    write_pictures(folder, pairs)
    for pair in pairs:
        (folder / pair.name).with_suffix(".txt").write_text(
            "\n".join(pair.captions) + "\n", encoding="utf-8"
        )
    return folder


def as_json_folder(folder: Path, pairs: list[Pair]) -> Path:
    """JSON files beside the pictures."""
    write_pictures(folder, pairs)
    for pair in pairs:
        fields = {"id": 7, "caption": pair.captions, "kind": pair.source}
        (folder / pair.name).with_suffix(".json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def _write_table(
    folder: Path,
    pairs: list[Pair],
    header: tuple,
    rows: list[tuple],
    name: str = "pairs.csv",
    separator: str = ",",
) -> Path:
    write_pictures(folder, pairs)
    with open(folder / name, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return folder / name


def as_csv(
    folder: Path, pairs: list[Pair], *, separator: str = ",", name: str = "pairs.csv"
) -> Path:
    """Write a row a caption, paths relative to the table."""
    rows = [(pair.name, caption, pair.source) for pair in pairs for caption in pair.captions]
    return _write_table(folder, pairs, ("filepath", "title", "kind"), rows, name, separator)


def as_columns_csv(folder: Path, pairs: list[Pair]) -> Path:
    """Write a row a picture, captions in numbered columns, with semicolons."""
    header = ("Image", "Caption 1", "Caption 2", "Caption 3", "kind")
    rows = [(pair.name, *[*pair.captions, "", ""][:3], pair.source) for pair in pairs]
    return _write_table(folder, pairs, header, rows, separator=";")


def as_listed_csv(folder: Path, pairs: list[Pair]) -> Path:
    """Write a row a picture, captions as pandas writes a list into a cell."""
    rows = [(pair.name, repr(pair.captions), pair.source) for pair in pairs]
    return _write_table(folder, pairs, ("path", "captions", "kind"), rows)


def as_jsonl(folder: Path, pairs: list[Pair]) -> Path:
    write_pictures(folder, pairs)
    lines = [json.dumps({"file_name": p.name, "text": p.captions, "kind": p.source}) for p in pairs]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder  # a folder with a table and pictures


def as_json_list(folder: Path, pairs: list[Pair]) -> Path:
    write_pictures(folder, pairs)
    (folder / "pairs.json").write_text(
        json.dumps(
            [{"image": p.name, "caption": p.captions, "kind": p.source} for p in pairs], indent=1
        )
    )
    return folder / "pairs.json"


def as_coco(folder: Path, pairs: list[Pair]) -> Path:
    """Write MS-COCO's captions: images, and annotations in another order."""
    write_pictures(folder, pairs)
    images = [{"id": number, "file_name": pair.name} for number, pair in enumerate(pairs)]
    annotations = [
        {"image_id": number, "id": 100 * number + text, "caption": caption, "kind": pair.source}
        for number, pair in enumerate(pairs)
        for text, caption in enumerate(pair.captions)
    ]
    annotations.sort(key=lambda one: one["id"] % 100)
    content = {"info": {"year": 2017}, "images": images, "licenses": [], "annotations": annotations}
    (folder / "captions.json").write_text(json.dumps(content))
    return folder / "captions.json"


def as_tars(folder: Path, pairs: list[Pair]) -> Path:
    """Write img2dataset's webdataset form: `txt` and `json` beside the picture, and a parquet without pictures."""
    for shard in range(2):
        members = []
        for number, pair in enumerate(pairs[shard::2]):
            key = f"{shard:05d}{number:04d}"
            members += [
                (f"{key}.{pair.name[-3:]}", pair.content),
                (f"{key}.txt", "\n".join(pair.captions).encode()),
            ]
            members += [
                (
                    f"{key}.json",
                    json.dumps({"caption": pair.captions[0], "kind": pair.source}).encode(),
                )
            ]
        write_tar(folder / f"{shard:05d}.tar", members)
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1 of no matter")
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def as_gzipped_tar(folder: Path, pairs: list[Pair]) -> Path:
    as_tars(folder, pairs)
    for file in folder.glob("*.tar"):
        file.with_suffix(".tar.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()
    return folder


def _table(pairs: list[Pair], pictures: list, name: str):
    captions, kinds = [pair.captions for pair in pairs], [pair.source for pair in pairs]
    return pyarrow.table(
        {name: pictures, "caption": captions, "kind": kinds, "width": [24] * len(pairs)}
    )


def as_parquet(folder: Path, pairs: list[Pair]) -> Path:
    """Write img2dataset's parquet form: a column of bytes, in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((pairs[:5], pairs[5:])):
        pyarrow.parquet.write_table(
            _table(part, [p.content for p in part], "jpg"), folder / f"{number:05d}.parquet"
        )
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
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet"
    )
    return folder / "train-00000-of-00001.parquet"


def as_parquet_paths(folder: Path, pairs: list[Pair]) -> Path:
    write_pictures(folder, pairs)
    pyarrow.parquet.write_table(
        _table(pairs, [p.name for p in pairs], "image_path"), folder / "pairs.parquet"
    )
    return folder / "pairs.parquet"


def as_saved_dataset(folder: Path, pairs: list[Pair]) -> Path:
    """Write as `datasets.Dataset.save_to_disk`: Arrow streams, and `state.json` that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (pairs[:7], pairs[7:]), strict=True):
        table = _table(part, [{"bytes": p.content, "path": None} for p in part], "image")
        with (
            pyarrow.OSFile(str(folder / name), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


FORMS: dict[str, Callable[[Path, list[Pair]], Path]] = {
    "folder": as_folder,
    "folder of json": as_json_folder,
    "csv": as_csv,
    "tsv": partial(as_csv, separator="\t", name="pairs.tsv"),
    "csv, several columns": as_columns_csv,
    "csv, lists": as_listed_csv,
    "jsonl in a folder": as_jsonl,
    "json list": as_json_list,
    "coco": as_coco,
    "tars": as_tars,
    "gzipped tars": as_gzipped_tar,
    "parquet": as_parquet,
    "parquet, a row a caption": as_parquet_rows,
    "parquet of paths": as_parquet_paths,
    "saved dataset": as_saved_dataset,
}
ARROW_FORMS = {"parquet", "parquet, a row a caption", "parquet of paths", "saved dataset"}


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
