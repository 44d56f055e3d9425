"""From the official annotation files, in their true forms and broken ones, to rows and shards."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.prepare.public.karpathy import prepare_karpathy
from open_clip_zerovl.prepare.public.lists import prepare_list, sbu_rows, tsv_rows
from open_clip_zerovl.prepare.public.pairs import shuffled_apart
from open_clip_zerovl.prepare.public.vg import largest_phrases, prepare_vg
from open_clip_zerovl.prepare.settings import Work
from open_clip_zerovl.shards.members import read_samples
from support.hostile_server import photo

WORK = Work(threads=4, progress=False)


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
    expected = [
        ("000000000", "a dog", pairs[0][1]),
        ("000000001", "two cats , \u00e9", pairs[1][1]),
    ]
    headed = "caption\turl\n" + caption_first, "url\tcaption\n" + address_first
    for text in (caption_first, address_first, *headed, caption_first.replace("\n", "\r\n")):
        (tmp_path / "list.tsv").write_bytes(text.encode())
        assert list(tsv_rows(tmp_path / "list.tsv")) == expected
    (tmp_path / "list.tsv.gz").write_bytes(gzip.compress(address_first.encode()))
    assert list(tsv_rows(tmp_path / "list.tsv.gz")) == expected


def test_a_broken_line_keeps_its_number_and_a_broken_list_is_refused(tmp_path):
    listed = tmp_path / "list.tsv"
    listed.write_bytes(
        b"a dog\thttp://a.example/1.jpg\nno tab\n\xff\xfe bytes\thttp://a.example/3.jpg\n"
    )
    rows = list(tsv_rows(listed))
    assert [row.key for row in rows] == ["000000000", "000000001", "000000002"]
    assert rows[1].caption == "" and rows[2].where == "http://a.example/3.jpg"
    for content in (b"<html><body>Sign in</body></html>\n", b"", b"a\tb\nc\td\n"):
        listed.write_bytes(content)
        with pytest.raises(UserError, match="is not a list of captions and addresses"):
            list(tsv_rows(listed))
    listed.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"is broken|is no list"):
        list(tsv_rows(listed.rename(tmp_path / "list.tsv.gz")))


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
        assert [(row.where, row.caption) for row in sbu_rows(given)] == SBU
    table.write_text(json.dumps({**columns, "captions": columns["captions"][:1]}))
    with pytest.raises(UserError, match="differ at entry 1"):
        list(sbu_rows([table]))
    with pytest.raises(UserError, match="hold neither"):
        list(sbu_rows(texts[:1]))
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes((tmp_path / "sbu-captions-all.tar.gz").read_bytes()[:80])
    with pytest.raises(UserError, match="broken"):
        list(sbu_rows([broken]))


def test_what_needs_a_person_says_so(tmp_path):
    with pytest.raises(UserError, match=r"CC3M's list asks for a sign-in.*--source"):
        prepare_list("cc3m", tmp_path / "out", work=WORK)
    with pytest.raises(UserError, match=r"form.*dataset_flickr30k.json"):
        prepare_karpathy("f30k", tmp_path / "out", work=WORK)


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
    found = dict(largest_phrases(file, file.name))
    # 500 x 1, 50 x 10 (lower id first on a tie), 49 x 10, 48 x 10, 47 x 10; 450 x 1 comes after them
    assert found == {
        7: ["phrase 49", "Phrase with spaces", *(f"phrase {n}" for n in (48, 47, 46))],
        9: ["phrase 0"],
    }
    assert dict(largest_phrases(file, file.name, limit=8))[7][5:] == [
        "phrase 45",
        "phrase 44",
        "same area a",
    ]
    for broken in (
        '[{"image_id": 7}]',
        '[{"image_id": 7, "regions": [{"phrase": "x"}]}]',
        "[[1]]",
        '[{"regions": []}]',
    ):
        file.write_text(broken)
        with pytest.raises(UserError, match="entry 0 of .* is not an image with regions"):
            list(largest_phrases(file, file.name))


def test_a_zip_that_has_lost_its_first_byte_is_broken(tmp_path):
    """Its directory then points before its beginning, which is neither a BadZipFile nor a disk's fault."""
    path = zipped(tmp_path / "region_descriptions.json.zip", {"region_descriptions.json": b"[]"})
    path.write_bytes(path.read_bytes()[1:])
    with pytest.raises(
        UserError,
        match=r"region_descriptions.json.zip cannot be read \(Invalid argument\): check the path, or fetch it",
    ):
        list(largest_phrases(path, "region_descriptions.json"))


def test_vg_end_to_end_from_zips(tmp_path):
    images = range(1, 41)
    annotations = [
        {
            "id": i,
            "regions": [region(i * 10 + r, f"image {i} region {r}", 9 - r, 9) for r in range(6)],
        }
        for i in images
    ]
    pictures = {i: photo(i) for i in images if i != 13}
    half = {f"VG_100K/{i}.jpg": pictures[i] for i in pictures if i <= 20}
    (tmp_path / "VG_100K_2").mkdir()
    for i in pictures:
        if i > 20:
            (tmp_path / "VG_100K_2" / f"{i}.jpg").write_bytes(pictures[i])
    listed = {"region_descriptions.json": json.dumps(annotations).encode()}
    zips = (
        zipped(tmp_path / "region_descriptions.json.zip", listed),
        zipped(tmp_path / "images.zip", half),
    )
    source = [*map(str, zips), str(tmp_path / "VG_100K_2")]
    result = prepare_vg(tmp_path / "vg", source=source, shard_size=25, work=WORK)
    assert (result["rows"], result["pairs"], result["failures"]) == (
        200,
        195,
        {"picture missing": 5},
    )
    samples = [s for shard in sorted((tmp_path / "vg").glob("*.tar")) for s in read_samples(shard)]
    assert {s.files["txt"].decode() for s in samples} == {
        f"image {i} region {r}" for i in pictures for r in range(5)
    }
    assert all(s.key.split("_")[0] == s.files["txt"].decode().split()[1] for s in samples)
    # Another call is given the missing picture.
    (tmp_path / "VG_100K_2" / "13.jpg").write_bytes(photo(13))
    again = Work(threads=4, progress=False, retry_failed=True)
    assert prepare_vg(tmp_path / "vg", source=source, shard_size=25, work=again)["pairs"] == 200
    whole = prepare_vg(tmp_path / "fresh", source=source, shard_size=25, work=WORK)
    assert whole["shards"] == json.loads((tmp_path / "vg/manifest.json").read_text())["shards"]
    with pytest.raises(UserError, match="No pictures beside the annotations: give VG_100K"):
        prepare_vg(tmp_path / "none", source=source[:1], work=WORK)


@pytest.mark.parametrize("counts", [[5] * 100, [5, 1, 0, 3] * 30, [2], []])
def test_samples_of_one_picture_lie_far_apart(counts):
    order = shuffled_apart(counts, seed=3)
    assert sorted(order) == [(i, t) for i, count in enumerate(counts) for t in range(count)]
    assert order == shuffled_apart(counts, seed=3) and (
        len(counts) < 50 or order != shuffled_apart(counts, seed=4)
    )
    if len(set(counts)) == 1 and len(counts) > 1:
        last: dict[int, int] = {}
        for place, (picture, _) in enumerate(order):
            assert place - last.get(picture, -(10**9)) > len(counts) // 2 - 1
            last[picture] = place


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
    result = prepare_karpathy(
        "coco", out, source=[str(annotations), str(folder)], shard_size=4, work=WORK
    )
    assert {split: m["pairs"] for split, m in result.items()} == {"test": 2, "val": 1, "train": 15}
    texts = {
        s.files["txt"].decode()
        for shard in (out / "train").glob("*.tar")
        for s in read_samples(shard)
    }
    assert texts == {f'image {i}, caption {k} "quoted"' for i in (0, 1, 5) for k in range(5)}

    found = open_retrieval_set(out)
    assert [len(s.captions) for s in found.samples] == [7, 5] and found.num_captions(5) == 10
    assert result["test"]["captions"] == 12
    assert found.image(0).size == (400, 300)  # the original, not shrunk
    (sample, _) = read_samples(out / "test" / "0.tar")
    assert sample.files["jpg"] == (folder / "val2014" / f"COCO_val2014_{103:012d}.jpg").read_bytes()
    assert len(open_retrieval_set(out, "val")) == 1
    assert Image.open(
        io.BytesIO(next(read_samples(out / "train/00000.tar")).files["jpg"])
    ).size == (341, 256)

    with open(out / "zerovl" / "valid_anno.csv", newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["image", "image_id", "caption", "caption_id"]
    assert len(rows) == 10 and [row["caption_id"] for row in rows[:6]] == [
        "30",
        "31",
        "32",
        "33",
        "34",
        "40",
    ]
    assert rows[0]["image_id"] == "103" and rows[0]["caption"] == 'image 3, caption 0 "quoted"'
    for split in ("train", "test", "val"):
        assert not check_shards(out / split, hashes=True, progress=False).faults


def test_clip_benchmark_reads_the_test_set(tmp_path):
    from clip_benchmark.datasets.builder import build_dataset

    file, folder = karpathy(tmp_path, coco=False)
    prepare_karpathy("f30k", tmp_path / "f30k", source=[str(file), str(folder)], work=WORK)
    dataset = build_dataset(
        "wds/f30k",
        root=str(tmp_path / "f30k"),
        split="test",
        transform=None,
        task="zeroshot_retrieval",
    )
    samples = list(dataset)
    assert [len(captions) for _, captions in samples] == [7, 5] and samples[0][0].size == (400, 300)


def test_a_test_set_that_lacks_a_picture_is_refused(tmp_path):
    file, folder = karpathy(tmp_path)
    picture = folder / "val2014" / f"COCO_val2014_{104:012d}.jpg"
    content = picture.read_bytes()
    picture.write_bytes(content[:500])
    out, source = tmp_path / "coco", [str(file), str(folder)]
    with pytest.raises(
        UserError, match=r"test set of coco lacks 1 of 2 pictures \(broken picture 1\)"
    ):
        prepare_karpathy("coco", out, source=source, work=WORK)
    picture.unlink()
    with pytest.raises(UserError, match=r"picture missing 1"):
        prepare_karpathy("coco", tmp_path / "missing", source=source, work=WORK)
    with pytest.raises(UserError, match="is not a retrieval set"):
        open_retrieval_set(tmp_path / "missing")
    picture.write_bytes(content)
    again = Work(threads=2, progress=False, retry_failed=True)
    prepare_karpathy("coco", tmp_path / "missing", source=source, work=again)
    assert len(open_retrieval_set(tmp_path / "missing")) == 2


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
        prepare_karpathy("coco", tmp_path / "coco", source=[str(file), str(folder)], work=WORK)


# --------------------------------------------------------------------------------------------------------- a long list

LONG = """
import importlib.util, resource, sys, types
# Without the package's own __init__, which loads torch: the list's memory shall be measured, not torch's.
package = types.ModuleType("open_clip_zerovl")
package.__path__ = importlib.util.find_spec("open_clip_zerovl").submodule_search_locations
sys.modules["open_clip_zerovl"] = package
from open_clip_zerovl.prepare.public import lists
from open_clip_zerovl.prepare.public.pairs import shuffled_apart
from open_clip_zerovl.prepare.public.pictures import Failure
from open_clip_zerovl.prepare.settings import Work

class Nothing:
    def __init__(self, limits): pass
    def __call__(self, url): raise Failure("http 404")
    def close(self): pass

lists.Downloader = Nothing
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = lists.prepare_list("cc12m", sys.argv[1], source=[sys.argv[2]], work=Work(threads=2, part=(3, 10), progress=False))
print(result["rows"], sum(result["failures"].values()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin)
"""


def test_a_long_list_in_bounded_memory(tmp_path):
    """A list of 30 MB: all of it read, one part in ten worked through; the process grows by less than a shard's rows need."""
    listed = tmp_path / "cc12m.tsv"
    line = "https://photos.example.org/a/fairly/long/path/{:07d}.jpg\ta caption of the usual length , on many hosts {:07d}\n"
    with open(listed, "w", encoding="utf-8") as file:
        file.writelines(line.format(i, i) for i in range(300_000))
    assert listed.stat().st_size > 30_000_000  # as rows in memory it would take 100 MB
    done = subprocess.run(
        [sys.executable, "-c", LONG, str(tmp_path / "out"), str(listed)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows, failed, grown_kib = (int(number) for number in done.stdout.split())
    assert rows == failed == 30_000
    assert grown_kib < 40_000, f"grew by {grown_kib} KiB"
