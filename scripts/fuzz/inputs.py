"""Valid and damaged files of each kind that this package reads, drawn by hypothesis so that it can shrink a failing one.

A maker gets hypothesis' `draw` and an empty folder, and writes the files there under names that `readers` knows.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from hypothesis import strategies as st
from PIL import Image

from open_clip_zerovl.sampling.schedule import Batching
from training.checkpointing import SETTINGS_ENTRY, Position, entry_of

Draw = Callable[[Any], Any]
MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 12, "width": 16, "heads": 1, "layers": 1},
}
MILLIONTHS = st.integers(0, 999_999)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(("flip", "set", "cut", "drop", "double", "zero")),
        MILLIONTHS,
        st.integers(0, 255),
    ),
    max_size=4,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.sampled_from((-(10**30), 1e300, float("inf"), float("nan"), 2.5, 1 << 62))
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


def edited(content: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    """Apply edits (kind, position in millionths of the length, value) to bytes."""
    data = bytearray(content)
    for kind, millionths, value in edits:
        at = len(data) * millionths // 1_000_000
        if kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + value + 1]
        elif kind == "double":
            data[at:at] = data[at : at + 16 * value]
        elif kind == "zero":
            data[at : at + value] = bytes(len(data[at : at + value]))
        elif at < len(data):
            data[at] = data[at] ^ (value or 1) if kind == "flip" else value
    return bytes(data)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------

FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO",  # these are opened
    "EPS", "PCX", "TGA", "PDF", "DDS", "SGI", "IM", "ICNS",  # these are not
)  # fmt: skip
MODES = (
    "RGB",
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
)


@cache
def encoded(format: str, mode: str, width: int, height: int) -> bytes:
    """Encode a picture of noise, or a black PNG where the format has no such mode."""
    rng = np.random.default_rng(width * height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    try:
        image = (
            Image.new("I;16", (width, height), 40_000) if mode == "I;16" else image.convert(mode)
        )
        image.save(buffer, format)
    except (OSError, ValueError, KeyError):
        buffer = io.BytesIO()
        Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def png_of(
    width: int, height: int, depth: int, colour: int, extra: list[tuple[bytes, bytes]]
) -> bytes:
    """Write a PNG whose header may claim anything, with valid checksums."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"".join(chunk(kind, data) for kind, data in extra)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + body
        + chunk(b"IDAT", zlib.compress(bytes(3000)))
        + chunk(b"IEND", b"")
    )


def picture(draw: Draw) -> bytes:
    """Draw an encoded picture, which may be damaged or have a header of false values."""
    if draw(st.integers(0, 9)) == 0:
        side = st.sampled_from((0, 1, 2, 40, 13_000, 60_000, (1 << 31) - 1))
        depth, colour = (
            draw(st.sampled_from((1, 2, 4, 8, 16, 3))),
            draw(st.sampled_from((0, 2, 3, 4, 6, 1))),
        )
        kinds = st.sampled_from(
            (b"PLTE", b"tRNS", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"acTL", b"eXIf", b"gAMA")
        )
        extra = st.lists(st.tuples(kinds, st.binary(max_size=40)), max_size=3)
        return png_of(draw(side), draw(side), depth, colour, draw(extra))
    sizes = st.sampled_from(((40, 30), (1, 1), (2, 9), (300, 1), (129, 200)))
    content = encoded(draw(st.sampled_from(FORMATS)), draw(st.sampled_from(MODES)), *draw(sizes))
    return edited(content, draw(EDITS)) if draw(st.booleans()) else content


def make_picture(draw: Draw, folder: Path) -> None:
    (folder / "picture").write_bytes(picture(draw))


# ---------------------------------------------------------------------------------------------------------------------
# Tars
# ---------------------------------------------------------------------------------------------------------------------

NAMES = (
    "a.png", "a.txt", "a.jpg", "a.cls", "a.json", "b.png", "b.txt", "b.cls", "b.json", "A.PNG", "a.b.png", "dir/c.png",
    "dir/c.txt", "dir.d/c.cls", "../../up.png", "/abs.txt", ".png", "a", "", "__meta__", "__meta__/x.png", "a.png\n.txt",
    "\x1b[2J.txt", "\udcff.png", "é" * 60 + ".txt", "x" * 99 + ".png", "x/" * 120 + "y.png", "a.pyd", "a.tar",
)  # fmt: skip
TYPES = (b"0",) * 8 + (
    b"\0",
    b"1",
    b"2",
    b"3",
    b"5",
    b"6",
    b"7",
    b"S",
    b"x",
    b"g",
    b"L",
    b"K",
    b"V",
    b"Z",
)
RECORDS = (
    b"0 size=1\n", b"12 size=-5\n", b"12 size=9e9\n", b"23 size=99999999999999\n", b"20 path=other.png\n", b"99999 a=b\n",
    b"19 GNU.sparse.major=1\n", b"22 GNU.sparse.map=0,1\n", b"25 GNU.sparse.realsize=9\n", b"21 hdrcharset=BINARY\n",
    b"5 a=\n", b"x=y\n", b"-1 a=b\n", b"13 size=1536\n", b"12 path=\xff\n",
)  # fmt: skip
SIZES = (None, None, None, None, None, 0, 1, -1, -512, -(1 << 40), 1 << 33, (1 << 63) - 1, 513)


def header(name: str, kind: bytes, size: int, format: Any, *, sound: bool = True) -> bytes:
    """Write a tar's header of any size, valid or not, with a wrong checksum if `sound` is False."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a.png" if kind in (b"1", b"2") else ""
    block = info.tobuf(format, "utf-8", "surrogateescape")
    *before, last = (block[at : at + 512] for at in range(0, len(block), 512))
    head = bytearray(last)
    head[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else _base_256(size)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % ((sum(head) + (not sound)) % 8**6)
    return b"".join(before) + bytes(head)


def _base_256(size: int) -> bytes:
    """Encode a size that octal digits cannot hold as GNU does."""
    return ((0x80 << 88) + size if size >= 0 else (1 << 96) + size).to_bytes(12, "big")


def tar_of(draw: Draw, depth: int = 0) -> bytes:
    """Draw a tar of valid and unusual members, which may be compressed, cut or have bytes changed."""
    format = draw(st.sampled_from((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    parts = []
    for _ in range(draw(st.integers(0, 7))):
        name, kind = draw(st.sampled_from(NAMES)), draw(st.sampled_from(TYPES))
        if kind in (b"x", b"g"):
            content = b"".join(draw(st.lists(st.sampled_from(RECORDS), max_size=3)))
        elif name.endswith(".tar") and depth == 0:
            content = tar_of(draw, 1)
        elif name.lower().endswith(("png", "jpg")):
            content = picture(draw)
        elif name.endswith("cls"):
            content = draw(
                st.sampled_from((b"0", b"1", b" 7\n", b"-1", b"x", b"", b"9" * 5000, b"\xff"))
            )
        elif name.endswith("json"):
            content = json_bytes(draw, {"label": 1, "caption": "x"})
        else:
            content = draw(
                st.sampled_from(
                    (b"a cat", b"", b" \n", b"\xff\xfe", b"one\ntwo\n\nthree", b"x" * 9000)
                )
            )
        claimed = draw(st.sampled_from(SIZES))
        size = len(content) if claimed is None else claimed
        try:
            head = header(name, kind, size, format, sound=draw(st.integers(0, 19)) > 0)
        except ValueError:  # USTAR takes no such name
            continue
        parts += [head, content, bytes(-len(content) % 512)]
    content = b"".join(parts) + (bytes(1024) if draw(st.integers(0, 4)) else b"")
    content = edited(content, draw(EDITS)) if draw(st.booleans()) else content
    pack = draw(st.sampled_from((None,) * 6 + (gzip.compress, bz2.compress, lzma.compress)))
    return content if pack is None or depth else edited(pack(content), draw(EDITS))


def good_tar() -> bytes:
    """Write eight samples of a picture, a caption, a class and its JSON."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(8):
            for suffix, content in (
                ("png", encoded("PNG", "RGB", 40, 30)), ("txt", b"number %d" % number), ("cls", b"%d" % (number % 2)),
                ("json", b'{"label": %d}' % (number % 2)),
            ):  # fmt: skip
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_tar(draw: Draw, folder: Path) -> None:
    """Write a source with a good shard and a drawn one, which is also that of a retrieval set and of a probe set."""
    content = edited(good_tar(), draw(EDITS)) if draw(st.integers(0, 2)) == 0 else tar_of(draw)
    (folder / "source").mkdir()
    (folder / "source" / "0.tar").write_bytes(good_tar())
    (folder / "source" / "1.tar").write_bytes(content)
    if draw(st.booleans()):
        (folder / "source" / "sizes.json").write_text(
            json.dumps({"0.tar": 8, "1.tar": draw(st.integers(0, 9))})
        )
    (folder / "set" / "test").mkdir(parents=True)
    (folder / "set" / "dataset_type.txt").write_text("retrieval\n")
    (folder / "set" / "test" / "nshards.txt").write_text("1\n")
    (folder / "set" / "test" / "0.tar").write_bytes(content)


# ---------------------------------------------------------------------------------------------------------------------
# sizes.json, tables, annotations
# ---------------------------------------------------------------------------------------------------------------------


def json_bytes(draw: Draw, good: Any) -> bytes:
    """Draw JSON: `good`, any other, nested too deep, in another encoding, or with bytes changed."""
    kind = draw(
        st.sampled_from(("good", "good", "good", "other", "edited", "edited", "deep", "utf-16"))
    )
    if kind == "deep":
        return draw(st.sampled_from((b"[", b'{"a":'))) * 100_000
    content = json.dumps(draw(JSON) if kind == "other" else good)
    if kind == "utf-16":
        return content.encode("utf-16")
    return edited(content.encode(), draw(EDITS)) if kind == "edited" else content.encode()


def odd(draw: Draw, good: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Draw an entry that may have any value at one of its keys, or of the given ones."""
    values = st.dictionaries(st.sampled_from(keys or tuple(good)), st.none() | JSON, max_size=1)
    return good | draw(values)


def make_sizes(draw: Draw, folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    for name in ("0.tar", "1.tar"):
        (source / name).write_bytes(good_tar())
    names = st.sampled_from(("0.tar", "1.tar", "2.tar", "../0.tar", "", "0.tar\x1b[2J"))
    numbers = st.sampled_from(
        (8, 8, 8, 7, 9, 0, -8, 8.0, "8", "-8", "٨", True, None, [8], 1e300, 1 << 70, float("nan"))
    )
    (source / "sizes.json").write_bytes(
        json_bytes(draw, draw(st.dictionaries(names, numbers, max_size=3)))
    )


FIELDS = (
    "p.png", "p.png", "q.png", "missing.png", "/dev/zero", "fifo", ".", "", "a cat", "a cat, red", '"', '"a', 'a"b', '""',
    '"x\ny"', "\0", "é", "a\tb", "  ", "x" * 200_000, "1", "2", "-1", "\ufeff", "../p.png", "file:p.png", "\u2028",
)  # fmt: skip
HEADERS = (
    "filepath\ttitle", "filepath\ttitle", "filepath,title", "image,caption", "image,image_id,caption,caption_id",
    "url\tcaption", "", "image,image,caption", "\ufefffilepath,title",
)  # fmt: skip


def make_table(draw: Draw, folder: Path) -> None:
    for name in ("p.png", "q.png"):
        (folder / name).write_bytes(encoded("PNG", "RGB", 40, 30))
    os.mkfifo(folder / "fifo")
    comma = draw(st.sampled_from(",\t;"))
    lines = [draw(st.sampled_from(HEADERS))]
    rows = st.lists(st.sampled_from(FIELDS), max_size=5)
    for _ in range(draw(st.integers(0, 8))):
        good = draw(st.integers(0, 3)) > 0
        columns = 4 if "image_id" in lines[0] else 2
        row = (
            [
                str(folder / "p.png") if "\t" in lines[0] else "p.png",
                str(len(lines)),
                "a cat",
                str(len(lines)),
            ][:: 3 - columns // 2]
            if good
            else draw(rows)
        )
        lines.append(("\t" if "\t" in lines[0] else ",").join(row) if good else comma.join(row))
    content = draw(st.sampled_from(("\n", "\r\n", "\r"))).join(lines)
    encoding = draw(st.sampled_from(("utf-8",) * 8 + ("utf-16", "latin-1")))
    data = edited(
        content.encode(encoding, "replace"), draw(EDITS) if draw(st.integers(0, 2)) == 0 else []
    )
    (folder / "table.csv").write_bytes(data)


def make_annotations(draw: Draw, folder: Path) -> None:
    """Write Karpathy's and Visual Genome's JSON, plain and in a zip."""
    (folder / "p.png").write_bytes(encoded("PNG", "RGB", 40, 30))
    sentence = odd(draw, {"raw": "a cat", "sentid": 1})
    image = {"filename": "p.png", "split": "test", "imgid": 3, "sentences": [sentence] * 2}
    image = odd(draw, image, *image, "cocoid")
    region = {"region_id": 1, "x": 0, "y": 0, "width": 5, "height": 4, "phrase": "a cat"}
    region = odd(draw, region, "region_id", "width", "height", "phrase")
    karpathy = json_bytes(draw, {"images": [image]})
    genome = json_bytes(draw, [{"image_id": 7, "regions": [region] * 2}])
    for name, content in (("karpathy.json", karpathy), ("regions.json", genome)):
        (folder / name).write_bytes(content)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
        (folder / f"{name}.zip").write_bytes(edited(buffer.getvalue(), draw(EDITS)))


def make_pairs(draw: Draw, folder: Path) -> None:
    """Write further inputs of `zerovl data pack`: JSON of three kinds, parquet, Arrow, and a folder with texts."""
    import pyarrow
    import pyarrow.parquet

    place = folder / "photos"
    place.mkdir()
    for name in ("p.png", "q.png"):
        (place / name).write_bytes(encoded("PNG", "RGB", 40, 30))
    row = odd(draw, {"image": "photos/p.png", "caption": "a cat"})
    good = {"image": "photos/q.png", "caption": ["a dog", "two dogs"]}
    (folder / "pairs.json").write_bytes(json_bytes(draw, [row, good]))
    (folder / "pairs.jsonl").write_bytes(
        json_bytes(draw, row) + b"\n" + json.dumps(good).encode() + b"\n"
    )
    (folder / "pairs.json.gz").write_bytes(
        edited(gzip.compress(json_bytes(draw, [row, good])), draw(EDITS))
    )
    image = odd(draw, {"id": 1, "file_name": "photos/p.png"})
    annotation = odd(draw, {"image_id": 1, "id": 2, "caption": "a cat"}, "image_id", "caption")
    coco = odd(draw, {"images": [image], "annotations": [annotation] * 2})
    (folder / "captions_train.json").write_bytes(json_bytes(draw, coco))
    texts = draw(st.lists(st.sampled_from(FIELDS[:-5]), max_size=3))
    picture_of = [encoded("PNG", "RGB", 40, 30), b"", b"x"]
    rows = {
        "image": [{"bytes": picture_of[i % 3], "path": None} for i in range(3)],
        "caption": ["a cat", *texts, "", ""][:3],
    }
    table = pyarrow.table(rows)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    (folder / "pairs.parquet").write_bytes(edited(buffer.getvalue(), draw(EDITS)))
    buffer = io.BytesIO()
    with pyarrow.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    (folder / "pairs.arrow").write_bytes(edited(buffer.getvalue(), draw(EDITS)))
    encoding = draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1")))
    (place / "p.txt").write_bytes(edited("\n".join(texts).encode(encoding, "replace"), draw(EDITS)))
    (place / "q.json").write_bytes(json_bytes(draw, {"caption": "a cat"}))
    (place / "r.png").write_bytes(encoded("PNG", "RGB", 40, 30))
    no_file = place / draw(
        st.sampled_from(("r.txt", "s.png", "q.txt", "t.jpg", "report.html", "pack.json"))
    )
    draw(
        st.sampled_from((os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path), Path.touch))
    )(no_file)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, exported folders
# ---------------------------------------------------------------------------------------------------------------------


@cache
def model() -> torch.nn.Module:
    """Build a dual encoder of some thousand parameters, registered as `fuzz-tiny`."""
    torch.manual_seed(0)
    return open_clip.create_model("fuzz-tiny", load_weights=False)


@cache
def checkpoint(legacy: bool) -> bytes:
    """Write a checkpoint as training does in the middle of an epoch."""
    return saved(dict(good_content()), legacy)


SETTINGS = {"seed": "0", "lr": "0.001"}


def good_content() -> dict[str, Any]:
    position = Position(1, 10, Batching(8, 3, 1, 2))
    optimizer = torch.optim.AdamW(model().parameters())
    state = {"state_dict": model().state_dict(), "optimizer": optimizer.state_dict()}
    entries = {"zerovl": entry_of(position), SETTINGS_ENTRY: SETTINGS}
    return {"epoch": 1, "name": "run", **state, **entries}


def saved(content: Any, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def make_checkpoint(draw: Draw, folder: Path) -> None:
    """Write RUN/params.txt and RUN/checkpoints/epoch_1.pt."""
    kind = draw(
        st.sampled_from(
            ("edited", "edited", "edited", "legacy", "entry", "entry", "content", "pickle", "other")
        )
    )
    if kind in ("edited", "legacy"):
        content = edited(checkpoint(kind == "legacy"), draw(EDITS))
    elif kind in ("entry", "content"):
        whole = good_content()
        place = whole["zerovl"] if kind == "entry" else whole
        for name in draw(st.lists(st.sampled_from(sorted(place)), max_size=2)):
            place[name] = draw(JSON)
        whole["zerovl"] = draw(JSON) if draw(st.integers(0, 9)) == 0 else whole["zerovl"]
        content = saved(whole)
    elif kind == "pickle":
        content = pickle.dumps(
            draw(st.sampled_from((os.system, 3, {"state_dict": print}, [1], Path("x")))),
            draw(st.integers(2, 5)),
        )
    else:
        content = draw(
            st.sampled_from(
                (b"", b"PK", b"PK\x05\x06" + bytes(18), b"text", good_tar(), gzip.compress(b"x"))
            )
        )
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "epoch_1.pt").write_bytes(content)
    (folder / "run" / "params.txt").write_bytes(
        edited(b"model: fuzz-tiny\nprecision: fp32\n", draw(EDITS))
    )


def make_export(draw: Draw, folder: Path) -> None:
    """Write a folder with open_clip_config.json and weights in safetensors, one of which may be damaged."""
    from safetensors.torch import save

    config: dict[str, Any] = json.loads(json.dumps({"model_cfg": MODEL, "preprocess_cfg": {}}))
    weights = save({name: value.contiguous() for name, value in model().state_dict().items()})
    if draw(st.booleans()):
        weights = edited(weights, draw(EDITS))
        text = json.dumps(config).encode()
    else:
        part = draw(
            st.sampled_from((config, config["model_cfg"], config["model_cfg"]["vision_cfg"]))
        )
        value = (
            JSON if part is config else st.sampled_from((0, -1, 1.5, "x", None, [], {}, True, 17))
        )
        part[draw(st.sampled_from((*sorted(part), "mean", "std", "trust_remote_code")))] = draw(
            value
        )
        text = json.dumps(config).encode() if draw(st.booleans()) else json_bytes(draw, config)
    (folder / "exported").mkdir()
    (folder / "exported" / "open_clip_config.json").write_bytes(text)
    (folder / "exported" / "open_clip_model.safetensors").write_bytes(weights)
