"""`zerovl retrieval`: encoding, one model or several on the same pairs, over ranks, and its files: JSON, the gallery."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import socket
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.data.images import paper_transform_of
from open_clip_zerovl.data.sets import open_retrieval_set, retrieval_batches
from open_clip_zerovl.evaluate import retrieval
from open_clip_zerovl.evaluate.metrics import (
    Measure,
    interval,
    resampled,
    retrieval_metrics,
    rsum_over_pictures,
)
from open_clip_zerovl.evaluate.retrieval import (
    GallerySet,
    encode_retrieval,
    gallery_of,
    rsum_difference,
)
from support.scoring import COUNTS, score_checkpoint
from support.tiny_clip import write_retrieval_set

# -- a model on a set ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(export):
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{export}")
    return model, preprocess, open_clip.get_tokenizer(f"local-dir:{export}")


def metrics_of(model, preprocess, tokenizer, dataset, *, workers=0, batch_size=64, **how) -> dict:
    batches = retrieval_batches(dataset, preprocess, batch_size=batch_size, num_workers=workers)
    return retrieval_metrics(*encode_retrieval(model, batches, tokenizer, **how))


def test_encoding_is_in_eval_mode_and_restores_the_modes(tmp_path, stock):
    model, *_ = stock
    write_retrieval_set(tmp_path / "set", [2, 1, 3])
    dataset = open_retrieval_set(tmp_path / "set")
    alone = metrics_of(*stock, dataset)
    model.train()
    model.text.transformer.eval()  # a tower frozen in eval, as open_clip's BERT starts
    before = {name: module.training for name, module in model.named_modules()}
    seen = []
    watch = model.visual.register_forward_hook(lambda tower, *_: seen.append(tower.training))
    assert metrics_of(*stock, dataset) == alone and seen == [False]
    assert {name: module.training for name, module in model.named_modules()} == before
    watch.remove()
    model.eval()


def test_workers_and_batch_size_do_not_change_the_numbers(tmp_path, stock, export):
    """A model in half precision, as in training, is evaluated too."""
    write_retrieval_set(tmp_path / "set", [3] * 20)
    dataset = open_retrieval_set(tmp_path / "set")
    alone = metrics_of(*stock, dataset)
    assert metrics_of(*stock, dataset, workers=2, batch_size=7) == pytest.approx(alone, abs=1e-6)
    half, _, _ = open_clip.create_model_and_transforms(f"local-dir:{export}", precision="pure_bf16")
    pure = metrics_of(half, *stock[1:], dataset, input_dtype=torch.bfloat16)
    assert alone.keys() == pure.keys()


def test_the_papers_transform_squashes_and_crops(export, sets):
    """Equal to pictures squashed to 37 x 37 and cropped to 32 by hand (256 / 224 of 32 px); unlike the checkpoint's own."""
    model, preprocess, _ = load_model(export)
    image = open_retrieval_set(sets / "wds").image(0)
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


# -- two models ------------------------------------------------------------------------------------------------------


def scored(noise: float, seed: int = 0, pictures: int = 150) -> GallerySet:
    """A set of two captions a picture, by a model with some noise."""
    rng = torch.Generator().manual_seed(7)
    links = torch.arange(pictures).repeat_interleave(2)
    images = F.normalize(torch.randn(pictures, 16, generator=rng), dim=1)
    blur = torch.randn(len(links), 16, generator=torch.Generator().manual_seed(seed))
    texts = F.normalize(images[links] + noise * blur, dim=1)
    captions = [(f"a {i}", f"b {i}") for i in range(pictures)]
    return GallerySet.scored("s", captions, lambda image: None, (images, texts, links))


def measure_of(of_set: GallerySet) -> Measure:
    return rsum_over_pictures(of_set.ranks, of_set.text_to_image)


def test_the_difference_is_that_of_rsum_and_its_interval_is_paired():
    first, second = scored(0.5), scored(0.45)  # of one seed: nearly the same captions are found
    counts = measure_of(first).counts  # a picture is drawn with its two captions
    assert counts.sum(axis=1).tolist() == [150, 300] and np.ptp(counts[1]) == 0
    found = rsum_difference(first, second)
    wanted = second.metrics["rsum"] - first.metrics["rsum"]
    assert found["difference"] == pytest.approx(wanted) and found["low"] < wanted < found["high"]
    # Unpaired, by draws of their own, the interval is far wider.
    alone = [
        resampled({"m": measure_of(one)}, 1000, n)["m"] for n, one in enumerate((first, second))
    ]
    low, high = interval(alone[1] - alone[0])
    assert high - low > 1.5 * (found["high"] - found["low"])
    same = rsum_difference(first, first)
    assert same == {"difference": 0, "low": 0, "high": 0}


# -- the gallery -----------------------------------------------------------------------------------------------------


def test_a_picture_with_the_same_caption_is_right(monkeypatch):
    """The best come first, and a query that has found another picture with its caption is no miss."""
    monkeypatch.setattr(retrieval, "thumbnail", lambda image: image.getpixel((0, 0)))
    monkeypatch.setattr(retrieval, "MISSED_BEYOND", 1)
    images = torch.eye(4)
    texts = images[[1, 1, 2, 0]]  # the model finds picture 1 for "a person"; its own is picture 0
    captions = [[caption] for caption in ("a person", "a person", "a dog", "a cat")]
    shown = GallerySet.scored(
        "s", captions, lambda n: Image.new("L", (9, 9), n), (images, texts, torch.arange(4))
    )
    hits, misses, *_ = gallery_of([shown])["sections"][0]["parts"]
    assert [(card["words"], card["picture"], card["top"]) for card in hits["cards"]] == [
        ("a person", 1, [(1, True)]), ("a dog", 2, [(2, True)])
    ]  # fmt: skip
    assert [(card["words"], card["picture"], card["top"]) for card in misses["cards"]] == [
        ("a cat", 3, [(0, False)])
    ]
    assert (misses["found"], misses["of"]) == (2, 4)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_models_side_by_side(tmp_path, clip_runs, export, sets, capsys):
    """Also a folder beside a checkpoint; a model against itself does not differ."""
    write_retrieval_set(tmp_path / "b", [2] * 12)
    data = f"coco={sets / 'dataset_coco.json'}@{sets / 'coco'}::b={tmp_path / 'b'}"
    files = {name: tmp_path / f"out/o.{name}" for name in ("json", "html")}
    more = ["--data", data, "--device=cpu", "--workers=1", f"--output={files['json']}"]
    models = [f"one={clip_runs[0]}", f"two={clip_runs[1]}", f"again={clip_runs[0]}", str(export)]
    more += [f"--gallery={files['html']}"]
    assert main(["retrieval", *models, *more]) == 0
    printed = capsys.readouterr().out
    assert "b, two" in printed and "two - one" in printed and "Another seed of training" in printed
    report = json.loads(files["json"].read_text())
    differences = report["rsum_differences_from_the_first"]
    assert differences["coco"]["again"] == {"difference": 0, "low": 0, "high": 0}
    assert list(report["models"]) == ["one", "two", "again", "export"]
    assert report["models"]["one"]["captions_per_image"] == 5
    rsum = {name: model["results"]["coco"]["rsum"] for name, model in report["models"].items()}
    assert differences["coco"]["two"]["difference"] == pytest.approx(rsum["two"] - rsum["one"])
    # Each model has its own scores: those of a call with it alone.
    assert main(["retrieval", clip_runs[1], *more]) == 0
    printed = capsys.readouterr().out.splitlines()
    results = json.loads(files["json"].read_text())["results"]
    coco = results["coco"]
    assert coco["rsum"] == rsum["two"]
    assert (coco["images"], coco["captions"]) == (13, sum(min(count, 5) for count in COUNTS))
    cells = ["coco", "13", f"{coco['captions']}", f"{100 * coco['image_to_text_R@1']:.1f}"]
    assert printed[1].split()[:4] == cells
    assert printed[1].split()[-2:] == [f"{coco['rsum']:.1f}", f"{coco['rsum_chance']:.1f}"]
    check_gallery(files["html"].read_text(), coco)


def check_gallery(html: str, row: dict) -> None:
    """Pictures are embedded, nothing is loaded from elsewhere; hits of the page are hits of the metric, R@1 without ties."""
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(links) > 20 and all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert "http" not in re.sub(r"data:[^\"]+", "", html)
    assert "<script" not in html and "&lt;script&gt;0&lt;/script&gt; &amp; x" in html
    first = Image.open(io.BytesIO(base64.b64decode(links[0].partition(",")[2])))
    assert (first.format, first.size) == ("JPEG", (48, 40))
    for title, total, way in (
        ("Caption to picture", row["captions"], "text_to_image"),
        ("Picture to captions", row["images"], "image_to_text"),
    ):
        assert int(re.search(rf"{title}: hits <small>(\d+)", html)[1]) == round(
            row[f"{way}_R@1"] * total
        )
    assert 'class="example large hit"' in html and 'class="example large miss"' in html


def test_two_models_of_one_name_are_refused(tmp_path, clip_runs, capsys):
    write_retrieval_set(tmp_path / "s", [1] * 4)
    models = [f"a={run}" for run in clip_runs]
    assert main(["retrieval", *models, "--data", f"s={tmp_path}/s"]) == 2
    assert "needs a name of its own" in capsys.readouterr().err


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
    data = f"{sets / 'dataset_coco.json'}@{sets / 'coco'}"
    alone = score_checkpoint(str(export), f"s={data}")["s"]
    shutil.copytree(sets / "coco/val2014", tmp_path / "broken")
    (tmp_path / "broken" / "COCO_val2014_000000000012.jpg").write_bytes(
        b"no picture"
    )  # of the second rank
    commands = [
        f"retrieval {export} --data s={place} --device cpu --output {tmp_path / output}".split()
        for place, output in (
            (data, "0.json"),
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
