"""`zerovl retrieval` on annotations beside pictures, over ranks, and its files: JSON, CSV, the gallery."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import re
import shutil
import socket
import tarfile
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import paper_transform_of
from open_clip_zerovl.data.sets import IndexedSet, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.prepare.door import sets_as_shards
from support.scoring import score_checkpoint
from support.tars import add_file
from support.tiny_clip import captions, picture

COUNTS = [5, 7, 1, 5, 3, 6, 5, 2, 5, 5, 4, 5, 5]  # captions of the test images


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """The same 13 test images as Karpathy's JSON (pictures in val2014/), ZeroVL's table (flat) and in CLIP_benchmark's
    layout; the JSON holds a val image and a restval image more."""
    root = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    (root / "coco" / "val2014").mkdir(parents=True)
    (root / "flat").mkdir()
    images, rows = [], []
    for i, count in enumerate([*COUNTS, 5, 5]):
        split = "test" if i < len(COUNTS) else ("val", "restval")[i - len(COUNTS)]
        name, data = f"COCO_val2014_{i:012d}.jpg", picture(rng, "JPEG")
        (root / "coco" / "val2014" / name).write_bytes(data)
        (root / "flat" / name).write_bytes(data)
        texts = (
            captions(rng, count) if i else [f"<script>{n}</script> & more" for n in range(count)]
        )
        sentences = [{"raw": text, "sentid": 100 * i + j} for j, text in enumerate(texts)]
        images.append(
            {
                "filename": name,
                "filepath": "val2014",
                "split": split,
                "imgid": i,
                "cocoid": 1000 + i,
            }
        )
        images[-1]["sentences"] = sentences
        if split == "test":
            rows += [(name, 1000 + i, text, 100 * i + j) for j, text in enumerate(texts)]
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    write_table(root / "valid_anno.csv", rows)
    (root / "wds" / "test").mkdir(parents=True)
    (root / "wds" / "dataset_type.txt").write_text("retrieval")
    (root / "wds" / "test" / "nshards.txt").write_text("1")
    with tarfile.open(root / "wds" / "test" / "0.tar", "w") as tar:
        for entry in images[: len(COUNTS)]:
            add_file(
                tar, f"{entry['cocoid']}.jpg", (root / "flat" / entry["filename"]).read_bytes()
            )
            add_file(
                tar,
                f"{entry['cocoid']}.txt",
                "\n".join(s["raw"] for s in entry["sentences"]).encode(),
            )
    return root


def write_table(
    file: Path, rows: list, header: tuple = ("image", "image_id", "caption", "caption_id")
) -> Path:
    with file.open("w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows([header, *rows])
    return file


def karpathy(root: Path) -> str:
    return f"{root / 'dataset_coco.json'}@{root / 'coco'}"


def table(root: Path) -> str:
    return f"{root / 'valid_anno.csv'}@{root / 'flat'}"


# -- the formats -----------------------------------------------------------------------------------------------------


def through_the_door(where: object) -> IndexedSet:
    (place,) = parse_retrieval_data(sets_as_shards(str(where))).values()
    return open_retrieval_set(place)


def by_caption(dataset: IndexedSet) -> dict[tuple[str, ...], bytes]:
    return {s.captions: dataset.image(n).tobytes() for n, s in enumerate(dataset.samples)}


def test_three_formats_of_one_set_hold_the_same(sets):
    first, other = (open_retrieval_set(where) for where in (sets / "wds", karpathy(sets)))
    assert len(first) == len(COUNTS)
    assert sum(map(len, first.captions())) == sum(COUNTS)
    assert sum(map(len, first.captions(5))) == sum(min(count, 5) for count in COUNTS)
    assert [s.captions for s in other.samples] == [s.captions for s in first.samples]
    assert [s.key for s in other.samples] == [s.key for s in first.samples]
    for i in range(len(first)):
        assert other.image(i).tobytes() == first.image(i).tobytes()
    assert by_caption(through_the_door(table(sets))) == by_caption(first)


def test_splits_of_karpathys_file(sets):
    assert [s.key for s in open_retrieval_set(karpathy(sets), "val").samples] == ["1013"]
    assert [s.key for s in open_retrieval_set(karpathy(sets), "train").samples] == ["1014"]
    with pytest.raises(UserError, match=r"has no split 'dev'; it has test, train, val"):
        open_retrieval_set(karpathy(sets), "dev")
    for pictures, words in (
        (sets / "none", r"13 pictures of .* are not in .*none"),
        (sets / "wds", r"13 of the 13 pictures .* \(first: COCO_val2014_0+\.jpg\)"),
    ):
        with pytest.raises(UserError, match=words):
            open_retrieval_set(f"{sets / 'dataset_coco.json'}@{pictures}")


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
    # A table's paths begin at its own folder.
    (tmp_path / "images/1.png").write_bytes(other)
    (tmp_path / "pairs.csv").write_text("filepath,title\n1.png,a cat\n")
    size = Image.open(io.BytesIO(beside)).convert("RGB").tobytes()
    assert through_the_door(tmp_path / "pairs.csv").image(0).tobytes() == size


# Python's reader accepts Infinity as a number, and an id cannot be infinite.
INFINITE = {
    "filename": "x.jpg",
    "split": "test",
    "cocoid": 1,
    "sentences": [{"raw": "x", "sentid": math.inf}],
}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "set.json does not exist"),
        ({"images": [{"id": 1}]}, r"set\.json cannot be read .*'annotations'"),
        (
            {"images": [INFINITE]},
            r"entry 0 of .*set\.json does not have the form of Karpathy's images \(OverflowError",
        ),
    ],
)
def test_annotations_that_do_not_fit_are_refused_by_a_sentence(tmp_path, content, sentence):
    file = tmp_path / "set.json"
    if content is not None:
        file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=sentence) as caught:
        through_the_door(file if content is None else f"{file}@{tmp_path}")
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


def test_what_training_reads_is_a_retrieval_set_too(tmp_path, sets):
    """A folder of shards and a list of them hold the same images; tables: tests/data/test_doors.py."""
    truth = open_retrieval_set(sets / "wds").samples
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard:05d}.tar", "w") as tar:
            for sample in truth[5 * shard : 5 * shard + 5]:
                image = sample.file.read_bytes()[sample.offset_bytes :][: sample.size_bytes]
                add_file(tar, f"{sample.key}.jpg", image)
                add_file(tar, f"{sample.key}.txt", "\n".join(sample.captions).encode())
    for where in (tmp_path, f"{tmp_path}/{{00000..00002}}.tar"):
        found = open_retrieval_set(where)
        assert [s.captions for s in found.samples] == [s.captions for s in truth]
        assert found.image(12).tobytes() == open_retrieval_set(sets / "wds").image(12).tobytes()
    assert len(open_retrieval_set(f"{tmp_path}/00001.tar")) == 5
    for where, words in (
        (f"{tmp_path}/{{00000..00003}}.tar", r"00003\.tar does not exist"),
        ("https://example.org/0.tar", "is remote, and its images are read by position"),
    ):
        with pytest.raises(UserError, match=words):
            open_retrieval_set(where)


def test_parts_in_order_are_the_set(sets):
    whole = open_retrieval_set(karpathy(sets))
    for world_size in (1, 2, 4, 20):
        parts = [whole.part(rank, world_size) for rank in range(world_size)]
        assert [s for part in parts for s in part.samples] == whole.samples
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_row_json_csv_and_gallery(tmp_path, export, sets, capsys):
    data = f"coco={karpathy(sets)}::f30k={table(sets)}::wds={sets / 'wds'}"
    files = {key: tmp_path / "out" / f"o.{key}" for key in ("json", "csv", "html")}
    arguments = f"--output {files['json']} --csv {files['csv']} --gallery {files['html']}".split()
    assert (
        main([*f"retrieval {export} --data {data} --device cpu --workers 1".split(), *arguments])
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    results = json.loads(files["json"].read_text())
    assert results["captions_per_image"] == 5
    assert results["transform"] == "checkpoint"
    coco = results["results"]["coco"]
    assert coco == results["results"]["f30k"] == results["results"]["wds"]
    assert (coco["images"], coco["captions"]) == (13, sum(min(count, 5) for count in COUNTS))
    assert printed[1].split()[-2:] == [f"{coco['rsum']:.1f}", f"{coco['rsum_chance']:.1f}"]
    with files["csv"].open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert [row["set"] for row in rows] == ["coco", "f30k", "wds"]
    for name, value in coco.items():
        assert float(rows[0][name]) == pytest.approx(value, abs=1e-12)

    everything = score_checkpoint(str(export), f"coco={karpathy(sets)}", captions_per_image=None)
    assert everything["coco"]["captions"] == sum(COUNTS)
    check_gallery(files["html"].read_text(), results["results"])


def check_gallery(html: str, results: dict) -> None:
    """Pictures are embedded, nothing is loaded from elsewhere; hits of the page are hits of the metric, R@1 without ties."""
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(links) > 20 and all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert "http" not in re.sub(r"data:[^\"]+", "", html)
    assert "<script" not in html and "&lt;script&gt;0&lt;/script&gt; &amp; more" in html
    first = Image.open(io.BytesIO(base64.b64decode(links[0].partition(",")[2])))
    assert (first.format, first.size) == ("JPEG", (48, 40))
    row = results["coco"]
    for title, total, way in (
        ("Caption to picture", row["captions"], "text_to_image"),
        ("Picture to captions", row["images"], "image_to_text"),
    ):
        assert int(re.search(rf"{title}: hits <small>(\d+)", html)[1]) == round(
            row[f"{way}_R@1"] * total
        )
    opened = re.findall(r"<(/?)(article|section|table|tr|td|figure|p|div)\b", html)
    for tag in {tag for _, tag in opened}:
        assert opened.count(("", tag)) == opened.count(("/", tag)), tag
    assert 'class="example large hit"' in html and 'class="example large miss"' in html


def test_the_papers_transform_squashes_and_crops(export, sets):
    """Equal to pictures squashed to 37 x 37 and cropped to 32 by hand (256 / 224 of 32 px); unlike the checkpoint's own."""
    model, preprocess, _ = load_model(export)
    image = open_retrieval_set(karpathy(sets)).image(0)
    ours = paper_transform_of(model.visual)(image)
    squashed = image.resize((37, 37), Image.Resampling.BILINEAR)
    corner = round((37 - 32) / 2)
    pixels = (
        torch.from_numpy(np.array(squashed)[corner : corner + 32, corner : corner + 32]).permute(
            2, 0, 1
        )
        / 255
    )
    cfg = model.visual.preprocess_cfg
    by_hand = (pixels - torch.tensor(cfg["mean"])[:, None, None]) / torch.tensor(cfg["std"])[
        :, None, None
    ]
    torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-6)
    assert (ours - preprocess(image)).abs().max() > 0.1
    own, paper = (
        score_checkpoint(str(export), f"s={karpathy(sets)}", paper_transform=paper)["s"]
        for paper in (False, True)
    )
    assert own.keys() == paper.keys()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def run_on_rank(rank: int, ports: list[int], commands: list[list[str]], log: Path) -> None:
    """The commands on one of two ranks, as torchrun starts them; output and exit status of each go to a file."""
    with log.open("w") as text, redirect_stdout(text), redirect_stderr(text):
        for port, command in zip(ports, commands, strict=True):
            place = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": 2,
                "RANK": rank,
                "LOCAL_RANK": rank,
            }
            os.environ.update({name: str(value) for name, value in place.items()})
            print(f"status {main(command)}")


def test_two_ranks_give_the_numbers_of_one(tmp_path, export, sets):
    """Real gloo processes; 13 images part unevenly, and a picture that one rank cannot read stops both by its name."""
    alone = score_checkpoint(str(export), f"s={karpathy(sets)}")["s"]
    shutil.copytree(sets / "flat", tmp_path / "broken")
    (tmp_path / "broken" / "COCO_val2014_000000000012.jpg").write_bytes(
        b"no picture"
    )  # of the second rank
    commands = [
        f"retrieval {export} --data s={data} --device cpu --output {tmp_path / output}".split()
        for data, output in (
            (karpathy(sets), "0.json"),
            (f"{sets / 'valid_anno.csv'}@{tmp_path / 'broken'}", "1.json"),
        )
    ]
    ports, logs = free_ports(2), [tmp_path / f"{rank}.log" for rank in range(2)]
    forks = [
        get_context("fork").Process(target=run_on_rank, args=(r, ports, commands, log))
        for r, log in enumerate(logs)
    ]
    for one in forks:
        one.start()
    for one in forks:
        one.join(120)
    said = [log.read_text() for log in logs]
    for text in said:
        assert [line for line in text.splitlines() if "status" in line] == [
            "status 0",
            "status 2",
        ], text[-2000:]
        assert text.count("has rows that cannot be used") == 1
    assert (
        "RSUM  chance" in said[0] and "RSUM  chance" not in said[1]
    )  # the first rank alone prints
    together = json.loads((tmp_path / "0.json").read_text())["results"]["s"]
    assert together == pytest.approx(alone, abs=1e-9)
    assert not (tmp_path / "1.json").exists()
