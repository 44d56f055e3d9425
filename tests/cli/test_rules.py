"""Each rule at each door: one picture, caption and count in all commands that read pairs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image, PngImagePlugin

from open_clip_zerovl.align.rows import open_sources as open_aligned
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.data.images import Crop, decode_image, decode_pixels
from open_clip_zerovl.data.names import class_order
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sets import open_probe_set, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.settings import ZeroShotSettings
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.finetune.data import find_data, open_sources
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.prepare.door import as_shards, labelled_as_shards, sets_as_shards
from open_clip_zerovl.prepare.near import find_overlap, open_test_sets
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.rows import class_caption
from open_clip_zerovl.prepare.settings import Columns, PackSettings, Work
from open_clip_zerovl.shards.tar import Sample, read_samples
from support.loading import loader_of
from support.tars import add_file, encoded, write_tar

PAIRS = 24
SPLITS = {"train": range(18), "val": range(18, 20), "test": range(20, PAIRS)}


def picture(number: int) -> Image.Image:
    """A picture of 48 x 32 whose four quarters differ, so that a turned one is another."""
    grey = 60 + 5 * number
    image = Image.new("RGB", (48, 32), (grey, grey, grey))
    for box, colour in (((0, 0), "red"), ((24, 0), "green"), ((0, 16), "blue")):
        image.paste(Image.new("RGB", (12, 8), colour), box)
    return image


def caption(number: int) -> str:
    return f"picture number {number}"


def split_of(number: int) -> str:
    return next(split for split, numbers in SPLITS.items() if number in numbers)


def members(
    numbers=range(PAIRS), ending: str = "png", content=lambda n: encoded(picture(n))
) -> list[tuple[str, bytes]]:
    names = ((f"{n:04d}", n) for n in numbers)
    return [
        member
        for name, n in names
        for member in ((f"{name}.{ending}", content(n)), (f"{name}.txt", caption(n).encode()))
    ]


def write_files(folder: Path, listed) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def pictures_in(folder: Path, numbers=range(PAIRS)) -> Path:
    return write_files(folder, members(numbers)[::2])


def rows_of(numbers=range(PAIRS), **columns) -> list[dict]:
    """Rows of a table; a column is a function of the picture's number."""
    columns = {"image": lambda n: f"{n:04d}.png", "caption": caption, **columns}
    return [{name: value(n) for name, value in columns.items()} for n in numbers]


def write_table(file: Path, rows: list[dict]) -> Path:
    if file.suffix == ".parquet":
        file.parent.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        lines = (list(rows[0]), *(row.values() for row in rows))
        file.write_text("".join(",".join(line) + "\n" for line in lines), newline="")
    return file


def write_dataset(folder: Path, table: pyarrow.Table) -> None:
    """A dataset as `datasets` saves it."""
    write_files(folder, [("state.json", b'{"_data_files": [{"filename": "data.arrow"}]}')])
    with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)


def packing(inputs, out: Path, **settings) -> dict:
    inputs = [str(each) for each in (inputs if isinstance(inputs, list) else [inputs])]
    return pack(inputs, out, PackSettings(**settings), work=Work(progress=False))


def captions_in(folder: Path) -> set[str]:
    samples = (one for shard in folder.glob("*.tar") for one in read_samples(shard))
    return {text for one in samples for text in one.captions}


# ------------------------------------------------------------------------------------------------------------ doors

Seen = dict[str, tuple[int, ...]]  # caption -> what its picture looks like


def look(image: Image.Image) -> tuple[int, ...]:
    """Width, height and the colours of the quarters, in steps of 16 for lossy formats."""
    width, height = image.size
    places = ((x * width // 8, y * height // 8) for y in (1, 5) for x in (1, 5))
    levels = [round(level / 16) for place in places for level in image.getpixel(place)]
    return width, height, *levels


def of_samples(samples: list[Sample]) -> Seen:
    return {
        text: look(decode_image(sample.image)) for sample in samples for text in sample.captions
    }


def trained(data: str) -> Seen:
    shown: list[str] = []
    loader = loader_of(
        parse_sources(as_shards(f"x={data}"), captions="one-per-epoch"),
        1,
        transform=lambda image: torch.tensor(look(image)),
        tokenizer=lambda captions: shown.extend(captions) or torch.zeros(len(captions)),
    )
    pictures = [tuple(row.tolist()) for images, *_ in loader for row in images]
    assert not loader.lost, loader.lost
    return dict(zip(shown, pictures, strict=True))


def retrieved(data: str) -> Seen:
    (place,) = parse_retrieval_data(sets_as_shards(data)).values()
    dataset = open_retrieval_set(place)
    rows = enumerate(dataset.samples)
    return {text: look(dataset.image(row)) for row, sample in rows for text in sample.captions}


def packed(data: str) -> Seen:
    packing(data, Path(f"{data}-packed"))
    return of_samples(list(read_samples(f"{data}-packed/train/00000.tar")))


def searched(data: str) -> Seen:
    collection = open_collection(data if Path(data).is_dir() else as_shards(data))
    contents = [
        content
        for number in range(len(collection.files))
        for _, content in collection.pictures(number)
    ]
    return {caption(n): look(decode_image(content)) for n, content in enumerate(contents)}


def finetuned(data: str) -> Seen:
    (source,) = open_sources(find_data(data).train_data)
    return of_samples([one for n in range(len(source.shards)) for one in samples_of(source, n)])


def aligned(data: str) -> Seen:
    opened = open_aligned(find_data(data).train_data, "").opened
    images, texts = (
        [each for part in range(len(side.counts)) for _, each in side.read(part)]
        for side in (SourceSamples(opened, "image"), SourceSamples(opened, "text"))
    )
    starts = SourceSamples(opened, "text").caption_starts.tolist()
    return {
        text: look(image)
        for image, start, end in zip(images, starts[:-1], starts[1:], strict=True)
        for text in texts[start:end]
    }


DOORS = {
    "pack": packed,
    "train": trained,
    "retrieval": retrieved,
    "search": searched,
    "finetune": finetuned,
    "align": aligned,
}


# ------------------------------------------------------------------------------- a table, and what pack has written

HEADERS = [
    "image_path,text",
    "file_name,caption",
    "filepath,caption",
    "image,title",
    "path,caption",
]


@pytest.mark.parametrize("header", HEADERS)
def test_every_door_reads_a_table_that_pack_reads(tmp_path, header):
    columns = header.split(",")
    rows = [dict(zip(columns, row.values(), strict=True)) for row in rows_of(range(5))]
    table = str(write_table(pictures_in(tmp_path / "in", range(5)) / "pairs.csv", rows))
    expected = {caption(n): look(picture(n)) for n in range(5)}
    for name, door in DOORS.items():
        if name == "search":  # shows the pictures in the order of the shards
            assert sorted(door(table).values()) == sorted(expected.values())
        else:
            assert door(table) == expected, name
    if hasattr(np, "bitwise_count"):  # numpy 2, of the extra `near`
        tests = open_test_sets(f"t={table}", progress=False)
        near = find_overlap(f"x={table}", tests, progress=False)
        assert near.samples == {"x": 5} and len(near.pairs) >= 5


@pytest.fixture
def two_sources(tmp_path) -> Path:
    """Pack two sources of two classes, 12 pictures each, of which a share of 0.3 holds out 7 and 2."""
    listed = [
        (f"{('shop', 'web')[n % 2]}/{('hat', 'shoe')[n // 2 % 2]}/{n}.png", encoded(picture(n)))
        for n in range(24)
    ]
    columns = Columns(source="folder")
    folder = write_files(tmp_path / "in", listed)
    packing(folder, tmp_path / "packed", columns=columns, test_share=0.3)
    return tmp_path / "packed"


def seen_pictures(data: Path) -> int:
    collection = open_collection(str(data))
    return sum(len(list(collection.pictures(number))) for number in range(len(collection.files)))


def test_every_door_takes_a_packed_folder(two_sources):
    folder = two_sources
    sources = parse_sources(f"x={folder}")
    assert [(source.name, source.num_samples) for source in sources] == [
        ("x-shop", 5),
        ("x-web", 10),
    ]
    assert sources[0].classes
    held_out = parse_sources(f"x={folder}", split="test", evaluation=True)
    assert [source.num_samples for source in held_out] == [7, 2]
    assert parse_retrieval_data(str(folder)) == {"shop": folder / "shop", "web": folder / "web"}
    sets = parse_retrieval_data(f"Öl-Bilder={folder}")
    assert list(sets) == ["Öl-Bilder-shop", "Öl-Bilder-web"]
    assert [len(open_retrieval_set(place)) for place in sets.values()] == [7, 2]
    assert [len(open_labelled_set(str(place)).images) for place in sets.values()] == [7, 2]
    assert find_data(str(folder)).train_data == f"shop={folder}/shop/train::web={folder}/web/train"
    opened = open_aligned(f"x={folder}", f"h={folder}")
    assert [source.num_samples for source in opened.opened] == [5, 10, 7, 2]
    assert seen_pictures(folder) == 24


def test_a_packed_folder_of_one_source(two_sources, tmp_path):
    packing(tmp_path / "in/shop", tmp_path / "one")
    (source,) = parse_sources(f"x={tmp_path}/one")
    assert (source.name, source.num_samples) == ("x", 12)
    with pytest.raises(UserError, match="was packed without pictures of the split 'test'"):
        parse_sources(f"x={tmp_path}/one", split="test", evaluation=True)
    assert len(open_probe_set(tmp_path / "one", "train")) == 12


# ------------------------------------------------------------------------------------------------ has the file ended?


def joined(tar: bytes) -> bytes:
    return tar + tar


def with_lone_block(tar: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        cut = opened.getmembers()[10].offset
    return tar[:cut] + bytes(512) + tar[cut:]


def in_parts(compress):
    return lambda tar: compress(tar[:9_000]) + compress(tar[9_000:20_000]) + compress(tar[20_000:])


WHOLE = {
    "the control": lambda tar: tar,
    "long padding": lambda tar: tar + bytes(3 << 20),
    "one gzip": gzip.compress,
    "three gzips": in_parts(gzip.compress),
    "three bzips": in_parts(bz2.compress),
    "three xz": in_parts(lzma.compress),
}
ENDED_EARLY = {
    "joined tars": joined,
    "a lone zero block": with_lone_block,
    "a zero block in front": lambda tar: bytes(512) + tar,
    "joined gzips": lambda tar: joined(gzip.compress(tar)),
    "a gzip of joined tars": lambda tar: gzip.compress(joined(tar)),
}


def placed(tmp_path: Path, change) -> str:
    content = write_tar(tmp_path / "plain.tar", members()).read_bytes()
    return str(write_files(tmp_path / "in", [("0.tar", change(content))]))


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_tar_gives_all_pairs(tmp_path, case):
    data = placed(tmp_path, WHOLE[case])
    expected = {caption(n): look(picture(n)) for n in range(PAIRS)}
    for name, door in DOORS.items():
        # those two read by position
        if case in ("the control", "long padding") or name not in ("retrieval", "align"):
            assert door(data) == expected, name


@pytest.mark.parametrize("case", ENDED_EARLY)
def test_bytes_behind_the_end_mark_are_named(tmp_path, case):
    data = placed(tmp_path, ENDED_EARLY[case])
    for name in DOORS.keys() - {"pack"}:
        reason = "uncompressed tar" if "gzip" in case and name == "retrieval" else "end mark"
        with pytest.raises(UserError, match=reason):
            DOORS[name](data)
    try:
        refused = packing(data, tmp_path / "out")["refused"]
    except UserError as error:
        refused = str(error)
    assert "end mark" in str(refused)
    faults = check_shards(tmp_path / "in", progress=False).report
    assert "end mark" in faults or "gzip" in case


def test_a_counted_shard_that_is_joined_loses_counted_samples(tmp_path):
    data = placed(tmp_path, with_lone_block)
    Path(data, "sizes.json").write_text('{"0.tar": 24}')
    loader = loader_of(
        parse_sources(f"x={data}"), 2, tokenizer=lambda texts: torch.zeros(len(texts))
    )
    list(loader)
    assert loader.lost["x"] == {"bytes behind the end mark": PAIRS - 5}


UNPAIRED = {
    "dots in keys": [("IMG.01.png", encoded(picture(0))), ("IMG.01.txt", b"a dog")],
    "members apart": [*members(range(3))[::2], *members(range(3))[1::2]],
    "another ending": [("1.png", encoded(picture(0))), ("1.caption", b"a dog")],
    "no picture": [("1.heic", b"ftypheic"), ("1.txt", b"a dog")],
}


@pytest.mark.parametrize("case", UNPAIRED)
@pytest.mark.parametrize("door", ["pack", "retrieval"])
def test_members_that_make_no_pairs_are_explained(tmp_path, case, door):
    write_tar(tmp_path / "in/0.tar", UNPAIRED[case])
    with pytest.raises(UserError, match=r"one key, .* its members begin with (IMG|0000|1)\."):
        DOORS[door](str(tmp_path / "in"))


def test_links_and_files_of_macos(tmp_path, caplog):
    """Hard links are read, links out of the tar are empty with a warning, ._ members are none."""
    content = encoded(picture(0))
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for n, target in enumerate((None, "p/0.txt", "0.txt", "../../etc/passwd")):
            add_file(tar, f"p/._{n}.png", b"Mac OS X")
            add_file(tar, f"p/{n}.png", content)
            if target is None:
                add_file(tar, f"p/{n}.txt", b"a dog")
                continue
            text = tarfile.TarInfo(f"p/{n}.txt")
            text.type = tarfile.LNKTYPE if n == 1 else tarfile.SYMTYPE
            text.linkname = target
            tar.addfile(text)
    samples = list(read_samples(tmp_path / "0.tar"))
    assert [(one.key, sorted(one.files)) for one in samples] == [
        (f"p/{n}", ["png", "txt"]) for n in range(4)
    ]
    assert [one.captions for one in samples] == [["a dog"]] * 3 + [[]]
    assert "a link or a sparse file whose bytes cannot be read" in caplog.text


# ------------------------------------------------------------------------------------------- upright 8-bit RGB pictures

#: Orientation -> how a camera that writes it stores an upright picture, as one of Pillow's turns.
STORED = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}


def lying(image: Image.Image, orientation: int, form: str) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    if orientation > 1:
        image = image.transpose(Image.Transpose(STORED[orientation]))
    return encoded(image, form, exif=exif, **({} if form == "TIFF" else {"quality": 95}))


def with_xmp(image: Image.Image) -> bytes:
    """A JPEG whose orientation stands in XMP alone."""
    stored = encoded(image.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    return stored[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + stored[2:]


def wide(image: Image.Image, kind: type, form: str, scale: int) -> bytes:
    grey = np.asarray(image.convert("L")).astype(kind) * scale
    return encoded(Image.fromarray(grey), form)


def animated(image: Image.Image, form: str, **options) -> bytes:
    other = Image.new("RGB", image.size, "white")
    return encoded(image, form, save_all=True, append_images=[other], **options)


def transparent(image: Image.Image) -> bytes:
    """A picture on white, stored on a transparent ground of another colour."""
    layer = image.convert("RGBA")
    layer.paste((0, 0, 0, 0), (40, 24, 48, 32))
    return encoded(layer)


def with_large_text(image: Image.Image) -> bytes:
    about = PngImagePlugin.PngInfo()
    about.add_text("settings", "x" * (3 << 20), zip=True)
    return encoded(image, "PNG", pnginfo=about)


GREY = {
    "a 16-bit PNG", "a TIFF of 32-bit integers", "one that holds 16 bits", "one of 16-bit integers", "grey",
}  # fmt: skip
PICTURES = {
    "the control": ("jpg", lambda image: encoded(image, "JPEG", quality=95)),
    "EXIF that is broken": ("jpg", lambda image: encoded(image, "JPEG", exif=b"Exif\0\0MM\0*")),
    **{
        f"JPEG {turn}": ("jpg", lambda image, n=turn: lying(image, n, "JPEG"))
        for turn in range(1, 9)
    },
    **{
        f"{form} {turn}": (form.lower(), lambda image, n=turn, form=form: lying(image, n, form))
        for form in ("PNG", "WEBP", "TIFF", "AVIF")
        for turn in (1, 5, 6)
    },
    "XMP's orientation": ("jpg", with_xmp),
    "a 16-bit PNG": ("png", lambda image: wide(image, np.uint16, "PNG", 256)),
    "a TIFF of 32-bit integers": ("tif", lambda image: wide(image, np.int32, "TIFF", 1)),
    "one that holds 16 bits": ("tif", lambda image: wide(image, np.int32, "TIFF", 256)),
    "one of 16-bit integers": ("tiff", lambda image: wide(image, np.uint16, "TIFF", 256)),
    "grey": ("jpg", lambda image: encoded(image.convert("L"), "JPEG", quality=95)),
    "CMYK": ("jpeg", lambda image: encoded(image.convert("CMYK"), "JPEG", quality=95)),
    "a transparent PNG": ("png", transparent),
    "a PNG with a large text": ("png", with_large_text),
    "a palette": ("png", lambda image: encoded(image.quantize(64))),
    "a GIF": ("gif", lambda image: encoded(image, "GIF")),
    "an animated GIF": ("gif", lambda image: animated(image, "GIF")),
    "an animated WebP": ("webp", lambda image: animated(image, "WEBP", lossless=True)),
    "an animated PNG": ("png", lambda image: animated(image, "PNG")),
    "a bitmap": ("BMP", lambda image: encoded(image, "BMP")),
    "a pixmap": ("ppm", lambda image: encoded(image, "PPM")),
}


def close(one: Image.Image, other: Image.Image) -> bool:
    pixels = [np.asarray(image, dtype=np.float64) for image in (one, other)]
    return one.size == other.size and abs(pixels[0] - pixels[1]).mean() < 12


@pytest.mark.parametrize("case", PICTURES)
def test_a_picture_is_upright_and_in_colour_at_every_door(tmp_path, case):
    ending, encode = PICTURES[case]
    images = {n: picture(n).resize((96, 64)) for n in range(3)}
    listed = members(images, ending, lambda n: encode(images[n]))
    shown = {
        n: image.convert("L").convert("RGB") if case in GREY else image
        for n, image in images.items()
    }
    for (_, content), expected in zip(listed[::2], shown.values(), strict=True):
        if case == "a transparent PNG":
            expected.paste("white", (40, 24, 48, 32))
        assert close(decode_image(content), expected)
        for crop in (None, Crop(8, 8, 0.9, (0.75, 1.33))):  # the fast path of training
            pixels = Image.fromarray(decode_pixels(content, crop))
            assert close(pixels, expected.resize(pixels.size)) and pixels.width > pixels.height
    write_tar(tmp_path / "tar/0.tar", listed)
    for name, door in DOORS.items():
        pictures = dict(sorted(door(str(tmp_path / "tar")).items()))
        differences = np.subtract(list(pictures.values()), [look(shown[n]) for n in images])
        assert np.abs(differences).max() <= 2, name
    # a packed picture is what stock open_clip reads, and is the same picture wherever it is held out
    folder = write_files(tmp_path / "folder", listed)
    report = packing(folder, tmp_path / "out")
    assert report["pictures"] == len(images) and not report["refused"]
    stored = {one.captions[0]: one for one in read_samples(tmp_path / "out/train/00000.tar")}
    for n, expected in shown.items():
        assert close(Image.open(io.BytesIO(stored[caption(n)].image)).convert("RGB"), expected)
    if hasattr(np, "bitwise_count"):  # numpy 2, of the extra `near`
        tests = open_test_sets(f"t={folder}", progress=False)
        near = find_overlap(f"x={tmp_path}/out/train", tests, progress=False)
        assert len(near.pairs) >= len(images) and not any(near.unreadable.values())


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_without_a_white_are_refused_at_every_door(tmp_path, kind):
    content = wide(picture(0), kind, "TIFF", 70_000)
    write_tar(tmp_path / "tar/0.tar", [("0.tif", content), ("0.txt", b"a dog")])
    for door, sentence in ((retrieved, "no defined white"), (packed, "broken picture in 1")):
        with pytest.raises(UserError, match=sentence):
            door(str(tmp_path / "tar"))


# ------------------------------------------------------------------------------------------------- which split is it?


def coco(folder: Path, split: str, numbers) -> Path:
    images = [{"id": n, "file_name": f"{n:04d}.png"} for n in numbers]
    annotations = [{"image_id": n, "id": n, "caption": caption(n)} for n in numbers]
    file = pictures_in(folder, numbers) / f"captions_{split}2017.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations}))
    return file


def karpathy(folder: Path) -> list[Path]:
    pictures_in(folder / "val2014")
    images = [
        {
            "filename": f"{n:04d}.png",
            "filepath": "val2014",
            "imgid": n,
            "split": "restval" if n < 5 else split_of(n),
            "sentences": [{"raw": caption(n), "sentid": n, "tokens": caption(n).split()}],
        }
        for n in range(PAIRS)
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return [folder / "dataset_coco.json"]


def a_dataset_dict(folder: Path) -> list[Path]:
    write_files(folder, [("dataset_dict.json", json.dumps({"splits": list(SPLITS)}).encode())])
    for split, numbers in SPLITS.items():
        rows = rows_of(numbers, image=lambda n: encoded(picture(n)))
        write_dataset(folder / split, pyarrow.Table.from_pylist(rows))
    return [folder]


def paths_in_a_table(folder: Path, form: str = "images/{}2014/{:04d}.png") -> list[Path]:
    """The table names the pictures; only their folders say the splits."""
    write_files(folder, [(form.format(split_of(n), n), encoded(picture(n))) for n in range(PAIRS)])
    rows = rows_of(image=lambda n: form.format(split_of(n), n))
    return [write_table(folder / "pairs.jsonl", rows)]


def each_split(write):
    """One input for each split."""
    return lambda folder: [write(folder, split, numbers) for split, numbers in SPLITS.items()]


def one_folder(write):
    return lambda folder: each_split(write)(folder) and [folder]


def metadata(folder: Path, split: str, numbers) -> Path:
    """A split of the hub's imagefolder."""
    return write_table(pictures_in(folder / split, numbers) / "metadata.csv", rows_of(numbers))


def a_split_of_texts(folder: Path, split: str, numbers) -> Path:
    return write_files(folder / split, members(numbers))


WORDS = {"train": "train", "val": "Validation", "test": "test"}
SPLIT_INPUTS = {
    "a column": lambda folder: [
        write_table(pictures_in(folder) / "a.csv", rows_of(Split=lambda n: WORDS[split_of(n)]))
    ],
    "JSON lines": lambda folder: [
        write_table(pictures_in(folder) / "pairs.jsonl", rows_of(split=split_of))
    ],
    "a column of parquet": lambda folder: [
        write_table(
            folder / "pairs.parquet",
            rows_of(image=lambda n: encoded(picture(n)), split=split_of),
        )
    ],
    "folders in a table's paths": paths_in_a_table,
    "folders above classes": lambda folder: paths_in_a_table(folder, "{}/dog/{:04d}.png"),
    "a DatasetDict": a_dataset_dict,
    "names of files": each_split(
        lambda folder, split, numbers: write_table(
            pictures_in(folder, numbers) / f"pairs_{split}2017.csv", rows_of(numbers)
        )
    ),
    "tables in a folder": one_folder(
        lambda folder, split, numbers: write_table(
            pictures_in(folder, numbers) / f"{split}.csv", rows_of(numbers)
        )
    ),
    "metadata.csv": one_folder(metadata),
    "each metadata.csv": each_split(metadata),
    "MS-COCO": each_split(coco),
    "Karpathy": karpathy,
    "names of tars": one_folder(
        lambda folder, split, numbers: write_tar(folder / f"{split}-00000.tar", members(numbers))
    ),
    "json in tars": lambda folder: [
        write_tar(
            folder / "0.tar",
            sorted(
                members()
                + members(
                    ending="json", content=lambda n: b'{"split": "%s"}' % split_of(n).encode()
                )[::2]
            ),
        )
    ],
    "folders with texts": one_folder(a_split_of_texts),
    "each folder": each_split(a_split_of_texts),
}


@pytest.mark.parametrize("case", SPLIT_INPUTS)
def test_pack_keeps_the_splits_of_every_input(tmp_path, case, capsys):
    pack([str(path) for path in SPLIT_INPUTS[case](tmp_path / "in")], tmp_path / "out")
    for split, numbers in SPLITS.items():
        assert captions_in(tmp_path / "out" / split) == set(map(caption, numbers)), split
    assert "splits, by " in capsys.readouterr().out


def test_what_names_no_split_makes_none(tmp_path, capsys):
    """Words of a column, and a folder around the pictures that happens to be called test."""
    pictures_in(tmp_path)
    table = write_table(tmp_path / "pairs.jsonl", rows_of(range(9), split=lambda n: str(n % 3)))
    pack([str(table)], tmp_path / "out")
    assert "column 'split' names no split with '0', '1', '2'" in capsys.readouterr().out
    (alone,) = paths_in_a_table(tmp_path / "one", "test/{1:04d}.png")
    assert len(trained(str(alone))) == PAIRS
    packing(write_table(pictures_in(tmp_path / "test") / "pairs.csv", rows_of()), tmp_path / "out2")
    assert not (tmp_path / "out2/test").exists()


def test_no_held_out_picture_is_trained_on(tmp_path):
    """Of a table the training rows are shown; shards are refused unless they are named as held out."""
    training, testing = (set(map(caption, SPLITS[split])) for split in ("train", "test"))
    (table,) = SPLIT_INPUTS["a column"](tmp_path / "table")
    assert trained(str(table)).keys() == training
    assert retrieved(str(table)).keys() == testing
    assert len(searched(str(table))) == PAIRS
    (folder,) = SPLIT_INPUTS["names of tars"](tmp_path / "tars")
    for data in (folder, f"{folder}/*.tar"):
        with pytest.raises(UserError, match=r"2 of the 3 shards .* held out .* /?.*/train-\*.tar"):
            parse_sources(f"x={data}")
    assert parse_sources(f"x={folder}/train-*.tar")[0].num_samples == 18
    assert parse_sources(f"x={folder}/{{train,val,test}}-00000.tar")[0].num_samples == PAIRS
    assert retrieved(str(folder)).keys() == testing
    assert len(searched(str(folder))) == PAIRS
    (file,) = SPLIT_INPUTS["Karpathy"](tmp_path / "karpathy")
    opened = open_aligned(f"x={folder}/train-*.tar", sets_as_shards(f"h={file}", karpathy=True))
    assert [source.num_samples for source in opened.opened] == [18, 4]
    (file,) = SPLIT_INPUTS["a column of parquet"](tmp_path / "parquet")
    assert trained(str(file)).keys() == training
    (file,) = SPLIT_INPUTS["json in tars"](tmp_path / "json")
    plain = file.read_bytes()
    for content in (gzip.compress(plain), plain):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"0\.tar: the json of sample '0018' says 'val'.*data"):
            parse_sources(f"x={file}")
        assert parse_sources(f"x={file}", evaluation=True)[0].num_samples == PAIRS


# ------------------------------------------------------------------------------------------------- words for a class

IMAGENET = ("n01440764", "n01443537", "n02085620-Chihuahua")
CLASSES = {  # folders -> words
    "the control": {"hat": "hat", "rain_coat": "rain coat"},
    "numbers and dots": {
        "001.Black_footed_Albatross": "Black footed Albatross",
        "002.Crow": "Crow",
    },
    "ImageNet": dict(zip(IMAGENET, ("tench", "goldfish", "Chihuahua"), strict=True)),
    "enumerated": {"1-rose": "rose", "02_tulip": "tulip"},
    "not enumerated": {"3_wheeler": "3 wheeler", "4_wheeler": "4 wheeler"},
    "in natural order": {f"class_{n}": f"class {n}" for n in (2, 10, 1)},
}


def class_folders(folder: Path, names) -> Path:
    for number, name in enumerate(names):
        pictures_in(folder / name, (2 * number, 2 * number + 1))
    return folder


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_has_the_same_words_in_pack_and_zero_shot(tmp_path, case):
    folders = CLASSES[case]
    place = class_folders(tmp_path / "in", folders)
    packing(place, tmp_path / "out", test_share=0.3)
    words = sorted(folders.values(), key=class_order)
    assert (tmp_path / "out/classnames.txt").read_text().splitlines() == words
    ordered = [folders[label] for label in sorted(folders, key=class_order)]
    assert open_labelled_set(str(place)).names == ordered
    assert open_labelled_set(str(tmp_path / "out")).names == words
    assert captions_in(tmp_path / "out/train") <= {
        class_caption("a photo of a {}.", word) for word in words
    }


@pytest.mark.parametrize("names", [("n99999999", "n01443537"), ("0", "1")])
def test_classes_without_words_need_some(tmp_path, names):
    place = class_folders(tmp_path / "in", names)
    for door in (packed, open_labelled_set):
        with pytest.raises(UserError, match="classes of .* have no words for captions"):
            door(str(place))


def test_numbers_are_words_with_a_template_or_names_of_ones_own(tmp_path):
    place = class_folders(tmp_path / "in", ("0", "1"))
    packing(place, tmp_path / "out", templates=("the digit {}.",))
    assert (tmp_path / "out/classnames.txt").read_text() == "0\n1\n"
    (place / "classnames.txt").write_text("zero\none\n")
    assert open_labelled_set(str(place)).names == ["zero", "one"]
    packing(place, tmp_path / "named")
    assert (tmp_path / "named/classnames.txt").read_text() == "one\nzero\n"


def test_lines_of_class_names_follow_the_numbers(tmp_path):
    place = class_folders(tmp_path / "in", ("class_2", "class_10", "class_1"))
    (tmp_path / "names.txt").write_text("one\ntwo\nten\n")
    opened = open_labelled_set(str(place), ZeroShotSettings(class_names=tmp_path / "names.txt"))
    named = dict(zip(opened.classes, opened.names, strict=True))
    assert named == {"class_1": "one", "class_2": "two", "class_10": "ten"}


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_labels_of_the_hub_are_classes(tmp_path, form):
    """As cifar100 has them: a fine and a coarse label, -1 for a row without one."""
    names = {"coarse_label": ["animal"], "fine_label": ["polar_bear", "lion"]}
    features = {name: {"names": words, "_type": "ClassLabel"} for name, words in names.items()}
    rows = [
        {
            "img": {"bytes": encoded(picture(n)), "path": None},
            "fine_label": label,
            "coarse_label": 0,
        }
        for n, label in enumerate((0, 1, 1, -1))
    ]
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(about)
    write_dataset(tmp_path / "in", table)
    if form == "parquet":
        (tmp_path / "in/state.json").unlink()
        (tmp_path / "in/data.arrow").unlink()
        pyarrow.parquet.write_table(table, tmp_path / "in/train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="rows that cannot be used .1 no class"):
        labelled_as_shards(f"x={tmp_path}/in")
    report = packing(tmp_path / "in", tmp_path / "out")
    assert report["classes"] == {"lion": 2, "polar bear": 1}
    assert {reason: entry["rows"] for reason, entry in report["refused"].items()} == {"no class": 1}
    assert captions_in(tmp_path / "out/train") == {"a photo of a polar bear.", "a photo of a lion."}


def test_what_is_not_read_is_counted(tmp_path, caplog, capsys):
    """A HEIC, an empty class, a link out of the folder."""
    place = class_folders(tmp_path / "in", ("hat", "shoe"))
    (place / "empty").mkdir()
    (place / "hat/1.HEIC").write_bytes(b"heic")
    (tmp_path / "elsewhere.png").write_bytes(encoded(picture(9)))
    (place / "shoe/link.png").symlink_to(tmp_path / "elsewhere.png")
    (place / "shoe/near.png").symlink_to(place / "hat/0000.png")
    report = pack([str(place)], tmp_path / "out")
    open_labelled_set(str(place))
    for words in (capsys.readouterr().out, caplog.text):
        assert "left out: 1 .heic (pip install pillow-heif, or convert)" in words
        assert "no picture: class 'empty'" in words
        assert "links that lead out of the folder, first" in words
    assert report["rows"] == 5


def test_links_out_of_a_folder_of_texts_are_counted(tmp_path, capsys):
    listed = [*members(range(2)), *members([2])[:1], ("0007.heic", b"heic"), ("0007.txt", b"x")]
    folder = write_files(tmp_path / "pairs", listed)
    (folder / "0002.txt").symlink_to("/etc/hostname")
    report = pack([str(folder)], tmp_path / "out")
    said = capsys.readouterr().out
    assert report["pictures"] == 2 and "1 .heic" in said and "1 .txt" in said
    assert "1 links that lead out of the folder" in said


# ----------------------------------------------------------------------------------------------- the text of a caption

LONG = "word " * 1_200
TEXTS = {  # a txt -> its captions; None where the caption is refused
    "the control": (b"a dog", ["a dog"]),
    "a mark": (b"\xef\xbb\xbfa dog", ["a dog"]),
    "UTF-16": ("a dög".encode("utf-16"), ["a dög"]),
    "UTF-32": ("a dög".encode("utf-32"), ["a dög"]),
    "Windows": (b"a dog\r\n", ["a dog"]),
    "an old Mac": (b"a dog\ra cat\r", ["a dog", "a cat"]),
    "two lines": (b"a dog\n\n  a cat\n", ["a dog", "a cat"]),
    "white space": ("a\u2028dog,\t\u00a0 and\x85more".encode(), ["a dog, and more"]),
    "6,000 characters": (LONG.encode(), [LONG[:4096]]),
    "Latin-1": ("a dög".encode("latin-1"), None),
    "UTF-16 without its mark": ("a dog".encode("utf-16-le"), None),
    "blank": (" \u00a0\n\t\n".encode(), None),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_has_the_same_captions_at_every_door(tmp_path, case):
    content, captions = TEXTS[case]
    expected = {caption(0), caption(1), *(captions or [])}
    pairs = [*members(range(2)), ("2.png", encoded(picture(2))), ("2.txt", content)]
    write_tar(tmp_path / "in/0.tar", pairs)
    data = str(tmp_path / "in")
    assert list(read_samples(tmp_path / "in/0.tar"))[2].captions == (captions or [])
    for place in (tmp_path / "in", write_files(tmp_path / "folder", pairs)):
        report = packing(place, tmp_path / f"{place.name}-packed")
        assert captions_in(tmp_path / f"{place.name}-packed/train") == expected
        assert len(report["refused"]) == (captions is None)
    assert bool(check_shards(tmp_path / "in", progress=False).faults) == (captions is None)
    if captions is None:
        with pytest.raises(UserError, match="sample '2' has .*caption"):
            retrieved(data)
        with pytest.raises(AssertionError, match="caption"):  # which counts the loss
            trained(data)
    else:
        assert list(retrieved(data))[2:] == captions
        assert {caption(0), caption(1)} < set(trained(data)) <= expected


def test_a_quoted_line_break_is_a_blank_at_every_door(tmp_path):
    rows = rows_of(range(3), caption=lambda n: f'"picture\r\nnumber {n}"')
    table = str(write_table(pictures_in(tmp_path / "in", range(3)) / "pairs.csv", rows))
    for name in ("pack", "train", "retrieval"):
        assert set(DOORS[name](table)) == set(map(caption, range(3))), name


def test_words_for_nothing_are_counted_in_the_printed_report(tmp_path, capsys):
    words = ("nan", "None", "NULL", "N/A", "<NA>", "-", ".", "None")
    rows = rows_of(caption=lambda n: words[n] if n < 8 else caption(n))
    pack([str(write_table(pictures_in(tmp_path / "in") / "pairs.csv", rows))], tmp_path / "out")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nothing")]
    assert all(f"1 {word!r}" in line for word in words if word != "None") and "2 'None'" in line


# ------------------------------------------------------------------------------------------------- names of pictures

NAMES = {  # (file, name in the table)
    "the control": ("a.png", "a.png"),
    "a number behind it": ("a.png", "a.png#0"),
    "decomposed letters": (unicodedata.normalize("NFD", "\u00fc.png"), "\u00fc.png"),
    "composed letters": ("\u00fc.png", unicodedata.normalize("NFD", "\u00fc.png")),
    "%20": ("a b.png", "a%20b.png"),
    "case": ("A.PNG", "a.png"),
    "Windows": ("p/a.png", "p\\a.png"),
}
TABLES = {  # file -> its content for a name; the last is Flickr30K's, without a header
    "pairs.csv": "image,caption\n{0},a dog\n{0},a cat\n",
    "excel.csv": "sep=;\nimage;caption\n{0};a dog\n{0};a cat\n",
    "results.tsv": "{0}\ta dog\n{0}\ta cat\n",
}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("table", TABLES)
def test_a_picture_is_found_by_the_name_that_a_table_gives_it(tmp_path, case, table):
    file, name = NAMES[case]
    content = TABLES[table].format(name).encode()
    folder = write_files(tmp_path / "in", [(file, encoded(picture(0))), (table, content)])
    report = packing(folder / table, tmp_path / "out")
    assert (report["pictures"], report["captions"]) == (1, 2)
