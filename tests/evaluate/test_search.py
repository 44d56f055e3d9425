"""`zerovl search`: pictures are embedded once, changes noticed, bad ones counted; ranks are those of the model's cosines."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.evaluate.search import SearchSettings, nearest, run_search
from open_clip_zerovl.features import embed
from support.tars import add_file
from support.tiny_clip import picture

COUNT = 9


@pytest.fixture
def home(bert_runs) -> list[str]:
    """Two checkpoints of one small model."""
    return bert_runs


@pytest.fixture
def photos(tmp_path) -> Path:
    """Pictures in a folder and one below it, a broken one, an empty one, and a file that is not a picture."""
    rng = np.random.default_rng(0)
    (tmp_path / "photos" / "below").mkdir(parents=True)
    for i in range(COUNT):
        (
            tmp_path / "photos" / ("below" if i % 3 else ".") / f"{i}.{'png' if i % 2 else 'JPG'}"
        ).write_bytes(picture(rng, "PNG" if i % 2 else "JPEG"))
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    (tmp_path / "photos" / "empty.png").write_bytes(b"")
    (tmp_path / "photos" / "notes.txt").write_text("a cat")
    return tmp_path / "photos"


def search(
    home: list[str],
    data: Path | str,
    cache: Path,
    *,
    seed: int = 0,
    words: str = "a cat",
    batch_size: int = 4,
    **more,
):
    encoder = Encoder(
        home[seed], device="cpu", batch_size=batch_size, workers=more.pop("workers", 0)
    )
    results, text = run_search(
        {"model": encoder}, str(data), SearchSettings(words, cache=cache, **more)
    )
    print(text)
    return results["model"]


def expected(
    home: list[str], photos: Path, words: str = "a cat", image: Path | None = None
) -> list[tuple[str, float]]:
    """Names and cosines, computed one by one."""
    model, transform, tokenizer = load_model(home[0])
    found = []
    with torch.no_grad():
        query = (
            F.normalize(model.encode_text(tokenizer([words])), dim=-1)[0]
            if words
            else torch.zeros(24)
        )
        if image is not None:
            query = (
                query
                + F.normalize(
                    model.encode_image(transform(Image.open(image).convert("RGB"))[None]), dim=-1
                )[0]
            )
        for path in photos.rglob("[0-9]*"):
            feature = model.encode_image(transform(Image.open(path).convert("RGB"))[None])[0]
            score = torch.dot(F.normalize(feature, dim=0), F.normalize(query, dim=0))
            found.append((str(path.relative_to(photos)), float(score)))
    return sorted(found, key=lambda pair: -pair[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_are_those_of_the_models_own_cosines(home, photos, tmp_path, workers):
    (photos / "gone.jpg").symlink_to("/nowhere/gone.jpg")  # ended the search of the whole folder
    found = search(home, photos, tmp_path / "cache", best=20, workers=workers)
    wanted = expected(home, photos)
    assert [hit.picture for hit in found.hits] == [name for name, _ in wanted]
    assert [hit.score for hit in found.hits] == pytest.approx(
        [score for _, score in wanted], abs=1e-5
    )
    assert (found.pictures, found.bad, found.computed) == (COUNT, 3, COUNT + 2)
    query = photos / "0.JPG"
    both = search(home, photos, tmp_path / "cache", image=query, best=20)
    assert [hit.picture for hit in both.hits] == [
        name for name, _ in expected(home, photos, image=query)
    ]
    alone = search(home, photos, tmp_path / "cache", words="", image=query, best=1)
    assert alone.hits[0].picture == "0.JPG" and alone.hits[0].score == pytest.approx(1, abs=1e-5)


def test_pictures_are_embedded_once_and_changes_are_noticed(home, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "LONGEST_RUN", 1)
    first = search(home, photos, tmp_path / "cache")
    again = search(home, photos, tmp_path / "cache")
    assert again.computed == 0 and again.hits == first.hits and again.bad == 2
    # Another picture under an old name: it is embedded again, and found at its own place; one that is gone is gone.
    Image.new("RGB", (40, 40), "red").save(photos / "3.png")
    (photos / "6.JPG").unlink()
    changed = search(home, photos, tmp_path / "cache", words="", image=photos / "3.png", best=20)
    assert changed.computed == 1 and changed.hits[0].score == pytest.approx(1, abs=1e-5)
    assert "6.JPG" not in {hit.picture for hit in changed.hits}
    # Another model finds nothing of the first, nor takes its place.
    assert search(home, photos, tmp_path / "cache", seed=1).computed == COUNT + 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_shards_and_rows_are_searched_too(home, photos, tmp_path, capsys):
    alone = search(home, photos, tmp_path / "cache", best=3)
    (tmp_path / "shards").mkdir()
    good = sorted(path for path in photos.rglob("*") if path.stem.isdigit())
    for shard in range(2):
        with tarfile.open(tmp_path / "shards" / f"{shard}.tar", "w") as tar:
            for path in good[shard::2]:
                add_file(tar, f"{path.stem}.{path.suffix[1:].lower()}", path.read_bytes())
                add_file(tar, f"{path.stem}.txt", f"picture {path.stem}\nin other words".encode())
    found = search(home, f"mine={tmp_path / 'shards'}", tmp_path / "cache", best=3)
    wanted = [Path(hit.picture) for hit in alone.hits]
    assert (found.pictures, found.bad) == (COUNT, 0)
    for path, hit in zip(wanted, found.hits, strict=True):
        assert hit.picture.startswith("mine/") and Path(hit.picture).name == path.stem
    assert [hit.caption for hit in found.hits] == [f"picture {path.stem}" for path in wanted]
    assert search(home, f"mine={tmp_path / 'shards'}", tmp_path / "cache").computed == 0
    (tmp_path / "rows").mkdir()  # a set of the hub: pictures and the numbers of their classes
    features = {"class": {"names": ["hat", "shoe"], "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    cells = [{"img": path.read_bytes(), "class": n % 2} for n, path in enumerate(good)]
    rows = pyarrow.Table.from_pylist(cells).replace_schema_metadata(about)
    pyarrow.parquet.write_table(rows, tmp_path / "rows/0.parquet")
    asked = ["--device", "cpu", "--cache", str(tmp_path / "cache")]
    capsys.readouterr()
    assert main(["search", home[0], str(tmp_path / "rows"), "a cat", *asked]) == 0
    assert f"{COUNT} pictures" in capsys.readouterr().out
    assert main(["zero-shot", home[0], "--data", f"h={tmp_path}/rows", *asked]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line]
    assert ["h", f"{COUNT}", "2"] in lines and [line[0] for line in lines[-2:]] == ["hat", "shoe"]


def test_the_command_shows_models_side_by_side_and_writes_its_files(home, photos, tmp_path, capsys):
    """Names that are no text, or no words of a page, are shown escaped."""
    content = (photos / "0.JPG").read_bytes()
    odd = {b"\xff.jpg": "\\udcff.jpg", b"a\x1b[2J.jpg": "a\\x1b[2J.jpg", b"<b>.jpg": "<b>.jpg"}
    for name in odd:
        Path(os.fsdecode(os.fsencode(photos) + b"/" + name)).write_bytes(content)
    files = ["--page", str(tmp_path / "page.html"), "--output", str(tmp_path / "found.json")]
    command = ["search", f"one={home[0]}", f"two={home[1]}", str(photos), "a small cat", *files]
    command += ["--best", "20", "--device", "cpu", "--cache", str(tmp_path / "cache")]
    assert main(command) == 0
    out = capsys.readouterr().out
    out.encode("utf-8")  # as a terminal does
    assert all(shown in out for shown in odd.values()) and "\x1b" not in out
    bad = "2 that cannot be decoded or are not there"
    assert f"one: {COUNT + 3} pictures and {bad}; 0 of all known" in out
    data = json.loads((tmp_path / "found.json").read_text())
    assert list(data["models"]) == ["one", "two"] and data["words"] == "a small cat"
    for model in data["models"].values():
        names = {hit["picture"] for hit in model["hits"]}
        assert len(names) == COUNT + 3 and {os.fsdecode(name) for name in odd} <= names
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 2 * (COUNT + 3) and 'src="data:image/jpeg' in page
    assert "<b>.jpg" not in page and "\\udcff.jpg" in page and "http" not in page
    assert main(command) == 0
    assert f"{COUNT + 5} of all known from before" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_an_impossible_search_gives_a_sentence(home, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(photos)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "1.jpg").write_bytes(b"x")
    os.mkfifo("pipe")
    for words, sentence in (
        ([".", " "], "there is nothing to search for"),
        ([".", "", "--image", "broken.jpg"], "has an image that cannot be decoded"),
        ([".", "", "--image", "pipe"], "not a regular file but a pipe"),
        ([".", "", "--image", "/dev/zero"], "not a regular file but a"),
        (["../bad", "a"], "none of the 1 pictures"),
    ):
        assert main(["search", home[0], *words, "--cache", str(tmp_path / "cache")]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1, error


def test_equal_scores_keep_their_order():
    features = F.normalize(torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 1]]), dim=-1)
    blocks = [
        features[:2],
        torch.zeros(1, 2),
        features[2:],
    ]  # a picture that cannot be shown is never among the nearest
    assert [row for row, _ in nearest(blocks, torch.tensor([1.0, 0]), 9)] == [0, 3, 4, 1]
