"""From the official annotation files, in their true forms and broken ones, to rows and shards."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.prepare.public import (
    largest_phrases,
    prepare_public,
    sbu_pairs,
    tsv_pairs,
)
from open_clip_zerovl.prepare.settings import Limits, Work
from support.pairs import samples_of
from support.servers import HostileServer, photo

WORK = Work(threads=4, progress=False, attempts=2, backoff_seconds=0.01)


def made(dataset: str, out: Path, source: list, work: Work = WORK, **options) -> dict:
    """Pack a dataset of small pictures."""
    return prepare_public(dataset, out, source=list(map(str, source)), work=work, **options)


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


# --------------------------------------------------------------------------------------------------------- CC, SBU


def test_cc_lists_in_either_order_with_and_without_header(tmp_path):
    pairs = [
        ("a dog", "http://a.example/1.jpg"),
        ("two\tcats , \u00e9", "https://b.example/2.jpg?x=1"),
    ]
    caption_first = "".join(f"{caption}\t{url}\n" for caption, url in pairs)
    address_first = "".join(f"{url}\t{caption}\n" for caption, url in pairs)
    expected = [(pairs[0][1], "a dog"), (pairs[1][1], "two cats , \u00e9")]

    def read(path: Path) -> list:
        return [(row.image, " ".join(row.captions[0].split())) for row in tsv_pairs([path])]

    headed = "caption\turl\n" + caption_first, "url\tcaption\n" + address_first
    for text in (caption_first, address_first, *headed, caption_first.replace("\n", "\r\n")):
        (tmp_path / "list.tsv").write_bytes(text.encode())
        assert read(tmp_path / "list.tsv") == expected
    (tmp_path / "list.tsv.gz").write_bytes(gzip.compress(address_first.encode()))
    assert read(tmp_path / "list.tsv.gz") == expected


def test_a_broken_line_is_a_row_and_a_broken_list_is_refused(tmp_path):
    listed = tmp_path / "list.tsv"
    listed.write_bytes(
        b"a dog\thttp://a.example/1.jpg\nno tab\n\xff\xfe bytes\thttp://a.example/3.jpg\n"
    )
    rows = list(tsv_pairs([listed]))
    assert len(rows) == 3 and rows[1].captions == [""]
    assert rows[2].image == "http://a.example/3.jpg"
    listed.write_bytes(b"<html><body>Sign in</body></html>\n")
    with pytest.raises(UserError, match="is not a list of captions and addresses"):
        list(tsv_pairs([listed]))


SBU = [
    ("http://static.flickr.com/1/2_3.jpg", "Boats in the harbour"),
    ("http://static.flickr.com/4/5.jpg", "My \u201ccat\u201d"),
]


def test_sbu_in_both_official_forms(tmp_path):
    columns = {
        "user_ids": ["1", "2"],
        "image_urls": [u for u, _ in SBU],
        "captions": [c for _, c in SBU],
    }
    table = tmp_path / "sbu-captions-all.json"
    table.write_text(json.dumps(columns))
    with tarfile.open(tmp_path / "sbu-captions-all.tar.gz", "w:gz") as tar:
        tar.add(table, "sbu-captions-all.json")
    with tarfile.open(tmp_path / "SBUCaptionedPhotoDataset.tar.gz", "w:gz") as tar:
        for name, lines in (("urls", columns["image_urls"]), ("captions", columns["captions"])):
            file = tmp_path / f"SBU_captioned_photo_dataset_{name}.txt"
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            tar.add(file, f"dataset/{file.name}")
    texts = sorted(tmp_path.glob("SBU_captioned*.txt"))
    packed = [
        [tmp_path / f"{name}.tar.gz"] for name in ("sbu-captions-all", "SBUCaptionedPhotoDataset")
    ]
    for given in ([table], *packed, texts):
        assert [(row.image, row.captions[0]) for row in sbu_pairs(given)] == SBU
    table.write_text(json.dumps({**columns, "captions": columns["captions"][:1]}))
    with pytest.raises(UserError, match="differ at entry 1"):
        list(sbu_pairs([table]))


#: What an address of a list answers -> why its row is refused; "" for a pair.
ANSWERS = {
    "good": "",
    "png": "",
    "moved": "",
    "flaky": "",
    "missing": "http 404",
    "html": "not a picture",
    "busy": "http 503",
    "cut": "cut off",
    "half": "cut off",
    "pixel": "picture too small",
    "flood": "too many bytes",
    "silent": "timed out",
    "drip": "timed out",
    "huge": "too many bytes",
}


def test_a_list_of_addresses_becomes_shards_and_every_failure_is_counted(tmp_path):
    limits = Limits(
        idle_seconds=0.5, total_seconds=1.0, max_bytes=1_000_000, private_redirects=True
    )
    listed, out = tmp_path / "list.tsv", tmp_path / "cc3m"
    with HostileServer() as server:
        urls = [
            server.url(kind, n) for n, kind in enumerate(kind for kind in ANSWERS for _ in "12")
        ]
        listed.write_text("".join(f"caption {n}\t{url}\n" for n, url in enumerate([*urls, ""])))
        report = made("cc3m", out, [listed], limits=limits)
        asked = server.requests.total()
        assert made("cc3m", out, [listed], limits=limits)["rows"] == report["rows"]
        assert server.requests.total() == asked
    failures = Counter(reason for reason in ANSWERS.values() for _ in "12" if reason)
    refused = {reason: entry["rows"] for reason, entry in report["refused"].items()}
    assert refused == failures | {"no picture named": 1}
    texts = {sample.files["txt"].decode() for sample in samples_of(out / "train")}
    assert texts == {f"caption {n}" for n in range(8)}
    (source,) = parse_sources(str(out))
    assert (source.name, source.num_samples) == ("cc3m", 8)


# --------------------------------------------------------------------------------------------------- Visual Genome


def region(number: int, phrase: str, width: int, height: int) -> dict:
    return {"region_id": number, "x": 0, "y": 0, "width": width, "height": height, "phrase": phrase}


def test_vg_takes_the_five_largest_boxes(tmp_path):
    regions = [region(i, f"phrase {i}", i + 1, 10) for i in range(50)]
    regions += [
        region(60, " Phrase  with spaces ", 500, 1),
        region(61, "phrase 3", 40, 10),
        region(62, "", 999, 999),
    ]
    regions += [region(70, "same area b", 450, 1), region(69, "same area a", 450, 1)]
    images = [
        {"image_id": 7, "regions": regions},
        {"id": 8, "regions": []},
        {"id": 9, "regions": [regions[0]]},
    ]
    file = tmp_path / "region_descriptions.json"
    file.write_text(json.dumps(images))
    # 500 x 1, 50 x 10 (lower id first on a tie), 49 x 10, 48 x 10, 47 x 10; 450 x 1 comes after them
    five = ["phrase 49", "Phrase with spaces", *(f"phrase {n}" for n in (48, 47, 46))]
    assert dict(largest_phrases(file, file.name)) == {7: five, 9: ["phrase 0"]}
    eight = [*five, "phrase 45", "phrase 44", "same area a"]
    assert dict(largest_phrases(file, file.name, limit=8))[7] == eight
    file.write_text('[{"image_id": 7, "regions": [{"phrase": "x"}]}]')
    with pytest.raises(UserError, match="entry 0 of .* is not an image with regions"):
        list(largest_phrases(file, file.name))


def test_vg_end_to_end_from_zips(tmp_path):
    phrases = {i: [f"image {i} region {r}" for r in range(6)] for i in range(1, 41)}
    annotations = [
        {"id": i, "regions": [region(i * 10 + r, phrases[i][r], 9 - r, 9) for r in range(6)]}
        for i in phrases
    ]
    listed = {"region_descriptions.json": json.dumps(annotations).encode()}
    pictures = {i: photo(i) for i in phrases if i != 13}
    half = {f"VG_100K/{i}.jpg": pictures[i] for i in pictures if i <= 20}
    (tmp_path / "VG_100K_2").mkdir()
    for i in range(21, 41):
        (tmp_path / "VG_100K_2" / f"{i}.jpg").write_bytes(pictures[i])
    source = [
        zipped(tmp_path / "region_descriptions.json.zip", listed),
        zipped(tmp_path / "images.zip", half),
        tmp_path / "VG_100K_2",
    ]
    report = made("vg", tmp_path / "vg", source, shard_size=25)
    assert (report["pictures"], report["captions"]) == (39, 195)
    assert report["refused"]["picture missing"]["rows"] == 1
    texts = [sample.captions for sample in samples_of(tmp_path / "vg/train")]
    assert sorted(texts) == sorted(phrases[i][:5] for i in pictures)
    (source,) = parse_sources(str(tmp_path / "vg"))  # each phrase is shown in turn
    assert (source.num_samples, source.captions) == (39, "one-per-epoch")


# ------------------------------------------------------------------------------------------------- COCO and Flickr30K


def karpathy(tmp_path: Path, *, coco: bool = True) -> tuple[Path, Path]:
    """Karpathy's file in its true form, and a folder of pictures; image 3 has seven captions."""
    splits = ["train", "restval", "val", "test", "test", "train"]
    images, folder = [], tmp_path / "pictures"
    for i, split in enumerate(splits):
        name = f"COCO_val2014_{i + 100:012d}.jpg" if coco else f"{1000 + i}.jpg"
        (folder / "val2014").mkdir(parents=True, exist_ok=True)
        (folder / "val2014" / name).write_bytes(photo(i, 400, 300))
        sentences = [
            {
                "tokens": ["a"],
                "raw": f'image {i}, caption {k} "quoted"\n',
                "imgid": i,
                "sentid": 10 * i + k,
            }
            for k in range(7 if i == 3 else 5)
        ]
        image = {
            "filename": name,
            "imgid": i,
            "split": split,
            "sentids": [],
            "sentences": sentences,
        }
        images.append(image | ({"filepath": "val2014", "cocoid": i + 100} if coco else {}))
    dataset = "coco" if coco else "flickr30k"
    file = tmp_path / f"dataset_{dataset}.json"
    file.write_text(json.dumps({"images": images, "dataset": dataset}))
    return file, folder


def test_coco_becomes_training_pairs_and_test_sets(tmp_path):
    file, folder = karpathy(tmp_path)
    annotations = zipped(
        tmp_path / "caption_datasets.zip",
        {"dataset_flickr8k.json": b"{}", file.name: file.read_bytes()},
    )
    out = tmp_path / "coco"
    report = made("coco", out, [annotations, folder], shard_size=4)
    counts = {each["split"]: (each["pictures"], each["captions"]) for each in report["written"]}
    assert counts == {"train": (3, 15), "val": (1, 5), "test": (2, 12)}
    texts = {
        line for s in samples_of(out / "train") for line in s.files["txt"].decode().split("\n")
    }
    assert texts == {f'image {i}, caption {k} "quoted"' for i in (0, 1, 5) for k in range(5)}
    found = open_retrieval_set(out)
    assert sorted(len(s.captions) for s in found.samples) == [5, 7]
    assert sum(map(len, found.captions(5))) == 10
    assert len(open_retrieval_set(out, "val")) == 1
    originals = {
        (folder / "val2014" / f"COCO_val2014_{103 + n:012d}.jpg").read_bytes() for n in (0, 1)
    }
    assert {s.files["jpg"] for s in samples_of(out / "test")} == originals  # not shrunk
    sizes = {Image.open(io.BytesIO(s.files["jpg"])).size for s in samples_of(out / "train")}
    assert sizes == {(341, 256)}
    for split in ("train", "test", "val"):
        assert not check_shards(out / split, hashes=True, progress=False).faults


@pytest.mark.parametrize("fault", ["broken picture", "is missing"])
def test_a_test_set_that_lacks_a_picture_is_refused(tmp_path, fault):
    file, folder = karpathy(tmp_path)
    picture = folder / "val2014" / f"COCO_val2014_{104:012d}.jpg"
    picture.write_bytes(picture.read_bytes()[:500])
    if fault == "is missing":
        picture.unlink()
    for _ in range(2):  # and not taken for a whole one by the next call
        with pytest.raises(UserError, match=rf"of coco lack 1 of 3 pictures \(.*{fault}\)"):
            made("coco", tmp_path / "coco", [file, folder])
        with pytest.raises(UserError, match="is not a retrieval set|does not exist"):
            open_retrieval_set(tmp_path / "coco")


@pytest.mark.parametrize(
    "change",
    [
        {"split": "extra"},
        {"sentences": []},
        {"filename": None, "sentences": "x"},
        {"sentences": [{}]},
    ],
)
def test_broken_karpathy_files_are_named(tmp_path, change):
    file, folder = karpathy(tmp_path)
    content = json.loads(file.read_text())
    content["images"][2].update(change)
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"entry 2 of .*dataset_coco.json"):
        made("coco", tmp_path / "coco", [file, folder])
