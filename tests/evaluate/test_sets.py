"""Retrieval sets: CLIP_benchmark's layout, shards, Karpathy's annotations, tables; what is not one is refused."""

from __future__ import annotations

import json
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import IndexedSet, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.prepare.door import sets_as_shards
from support.scoring import COUNTS
from support.tars import write_tar
from support.tiny_clip import picture, write_retrieval_set

PNG = picture(np.random.default_rng(0))


def karpathy(root: Path) -> str:
    return f"{root / 'dataset_coco.json'}@{root / 'coco'}"


def through_the_door(where: object) -> IndexedSet:
    (place,) = parse_retrieval_data(sets_as_shards(str(where))).values()
    return open_retrieval_set(place)


def by_caption(dataset: IndexedSet) -> dict[tuple[str, ...], bytes]:
    return {s.captions: dataset.image(n).tobytes() for n, s in enumerate(dataset.samples)}


def rewrite_shard(folder: Path, members: list[tuple[str, bytes]]) -> Path:
    (folder / "test" / "nshards.txt").write_text("1")
    write_tar(folder / "test" / "0.tar", members)
    return folder


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "empty entry"),
        ("a=/x::", "empty entry"),
        ("a=", "empty entry"),
        ("a=/x::a=/y", "two sets are named 'a'"),
        ("/x/coco::/y/coco", "two sets are named 'coco'"),
    ],
)
def test_a_set_without_a_name_of_its_own_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_retrieval_data(spec)


def test_the_forms_of_one_set_hold_the_same(tmp_path, sets):
    first, other = (open_retrieval_set(where) for where in (sets / "wds", karpathy(sets)))
    assert len(first) == len(COUNTS)
    assert sum(map(len, first.captions())) == sum(COUNTS)
    assert sum(map(len, first.captions(5))) == sum(min(count, 5) for count in COUNTS)
    assert [s.captions for s in other.samples] == [s.captions for s in first.samples]
    assert [s.key for s in other.samples] == [s.key for s in first.samples]
    for i in range(len(first)):
        assert other.image(i).tobytes() == first.image(i).tobytes()
    assert [s.key for s in open_retrieval_set(karpathy(sets), "train").samples] == ["1014"]
    assert by_caption(
        through_the_door(f"{sets / 'valid_anno.csv'}@{sets / 'coco/val2014'}")
    ) == by_caption(first)
    with tarfile.open(sets / "wds/test/0.tar") as tar:  # as training reads them
        members = [(each.name, tar.extractfile(each).read()) for each in tar]
    for shard in range(3):
        write_tar(tmp_path / f"{shard:05d}.tar", members[10 * shard : 10 * shard + 10])
    for where in (tmp_path, f"{tmp_path}/{{00000..00002}}.tar"):
        assert by_caption(open_retrieval_set(where)) == by_caption(first)


def test_pictures_of_annotations_are_not_told_apart_by_chance(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    beside, other = picture(rng), picture(rng)
    (tmp_path / "1.png").write_bytes(beside)
    (tmp_path / "images/1.png").write_bytes(other)
    annotations = tmp_path / "pairs.json"
    one = {
        "filename": "1.png",
        "split": "test",
        "cocoid": 1,
        "sentences": [{"raw": "a cat", "sentid": 1}],
    }
    annotations.write_text(json.dumps({"images": [one]}))
    with pytest.raises(
        UserError, match="1 of the 1 pictures .* are in two folders with different contents"
    ):
        open_retrieval_set(annotations)
    (tmp_path / "images/1.png").write_bytes(beside)
    assert open_retrieval_set(annotations).samples[0].file == tmp_path / "1.png"


def test_no_sample_of_a_shard_is_lost_without_a_word(tmp_path):
    """Samples with equal keys stay two, as in training; a tar that is cut off between two samples is named."""
    write_retrieval_set(tmp_path / "set", [1, 1])
    said = [("a", "a cat"), ("a", "a dog"), ("b", "a bird"), ("a", "a fish")]
    members = [
        member
        for key, text in said
        for member in ((f"{key}.png", PNG), (f"{key}.txt", text.encode()))
    ]
    shard = rewrite_shard(tmp_path / "set", members) / "test" / "0.tar"
    samples = open_retrieval_set(tmp_path / "set").samples
    assert [(s.key, s.captions[0]) for s in samples] == said
    with tarfile.open(shard) as tar:
        ends = [each.offset_data + 512 for each in tar.getmembers() if each.name.endswith("txt")]
    shard.write_bytes(shard.read_bytes()[: ends[1]])  # after two whole samples
    cut = r"0\.tar is not a readable, uncompressed tar \(it is cut off after \d+ bytes"
    with pytest.raises(UserError, match=cut):
        open_retrieval_set(tmp_path / "set")


def in_shard(**files: bytes):
    """A set whose shard has these members, KEY_ENDING."""
    members = [(name.replace("_", "."), content) for name, content in files.items()]

    def make(root: Path, _: Path) -> Path:
        write_retrieval_set(root / "set", [1, 1])
        return rewrite_shard(root / "set", members)

    return make


def annotations(content: dict):
    def make(root: Path, _: Path) -> str:
        (root / "set.json").write_text(json.dumps(content))
        return f"{root}/set.json@{root}"

    return make


# Python's reader accepts Infinity as a number, and an id cannot be infinite.
INFINITE = {"filename": "x.jpg", "split": "test", "cocoid": math.inf} | {
    "sentences": [{"raw": "x", "sentid": 1}]
}
REFUSED = {  # sentence -> where the set is, or, behind the door of tables, its opening
    "holds no sample": in_shard(),
    r"0\.tar: sample 'a' has no \.txt; .* its members begin with a\.png": in_shard(a_png=PNG),
    "sample 'a' has an empty caption": in_shard(a_png=PNG, a_txt=b" \n"),
    "'a' has a caption that is not UTF-8": in_shard(a_png=PNG, a_txt=b"caf\xe9"),
    r"0\.tar: sample 'a' has no image .jpg, png": in_shard(a_svg=PNG, a_txt=b"a cat"),
    r"0\.tar: sample 'a' has no image": in_shard(a_json=b"{}"),
    r"0\.tar: sample 'b' has no .txt": in_shard(b_png=PNG, a_png=PNG, b_txt=b"1", a_txt=b"2"),
    "nowhere does not exist": lambda root, _: root / "nowhere",
    "set.json does not exist": lambda root, _: through_the_door(root / "set.json"),
    r"set\.json cannot be read .*'annotations'": lambda root, _: through_the_door(
        annotations({"images": [{"id": 1}]})(root, _)
    ),
    r"entry 0 of .*does not have the form of Karpathy's images \(OverflowError": annotations(
        {"images": [INFINITE]}
    ),
    r"13 pictures of .* are not in .*none": lambda _, sets: (
        f"{sets / 'dataset_coco.json'}@{sets / 'none'}"
    ),
    r"13 of the 13 pictures .* \(first: COCO_val2014_0+\.jpg\)": lambda _, sets: (
        f"{sets / 'dataset_coco.json'}@{sets / 'wds'}"
    ),
    r"00001\.tar does not exist": lambda root, _: f"{root}/{{00001..00003}}.tar",
    "is remote, and its images are read by position": lambda *_: "https://example.org/0.tar",
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_no_retrieval_set_is_refused_by_a_sentence(tmp_path, sets, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        open_retrieval_set(REFUSED[sentence](tmp_path, sets))
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", ["fifo", "zero"])
def test_a_pipe_or_device_among_the_pictures_is_refused_without_a_wait(tmp_path, odd):
    """Also one that a picture has become since it was looked up."""
    file = tmp_path / "train2014" / "a.png"
    file.parent.mkdir()
    image = {"filename": "a.png", "split": "test", "imgid": 3}
    image["sentences"] = [{"raw": "a cat", "sentid": 1}]
    (tmp_path / "set.json").write_text(json.dumps({"images": [image]}))
    file.write_bytes(b"x")
    found = open_retrieval_set(f"{tmp_path}/set.json@{tmp_path}")
    file.unlink()
    os.mkfifo(file) if odd == "fifo" else file.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="1 of the 1 pictures .* are not in"):
        open_retrieval_set(f"{tmp_path}/set.json@{tmp_path}")
    with pytest.raises(UserError, match="it is not a regular file but a pipe"):
        found.image(0)
