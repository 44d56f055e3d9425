"""`make paper-weights`: converted, verified, scored with the paper's transform, beside the paper's numbers."""

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import functional as TF

from scripts.paper import weights
from scripts.paper.weights import MEASURED, PAPER, SIZES, Comparison, main, table_of
from support.released import IMAGE_MODEL, Reference, saved
from support.tiny_clip import write_bert, write_retrieval_set


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("weights") / "bert")


def by_the_definition(
    reference, folder: Path, captions: list[list[str]], mean: float, std: float
) -> dict[str, float]:
    """Recalls of the released forward, with torchvision's resize and crop and a sort of all scores."""
    pictures = []
    for shard in sorted(folder.glob("test/*.tar")):
        with tarfile.open(shard) as tar:
            for member in sorted(m.name for m in tar if not m.name.endswith(".txt")):
                image = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")
                side = round(160 * 256 / 224)  # the fixture's tower takes 160 px
                pictures.append(
                    TF.to_tensor(TF.center_crop(TF.resize(image, [side, side]), [160, 160]))
                )
    kept = [own[:5] for own in captions]
    of = torch.tensor([i for i, own in enumerate(kept) for _ in own])
    images, texts = reference(
        (torch.stack(pictures) - mean) / std, [text for own in kept for text in own]
    )
    scores = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
    found = {}
    for k in (1, 5, 10):
        right = (
            of[scores.argsort(dim=1, descending=True)[:, :k]] == torch.arange(len(images))[:, None]
        )
        found[f"image_to_text_R@{k}"] = 100 * right.any(1).float().mean().item()
        right = scores.T.argsort(dim=1, descending=True)[:, :k] == of[:, None]
        found[f"text_to_image_R@{k}"] = 100 * right.any(1).float().mean().item()
    return {**found, "rsum": sum(found.values())}


def test_the_released_layout_is_converted_verified_and_scored(tmp_path, bert, capsys):
    reference = Reference(bert)
    checkpoint = saved(tmp_path / "zerovl_100m.pth", reference.state_dict(), epoch=20)
    captions = write_retrieval_set(
        tmp_path / "coco", [5, 6, 7, 5] * 4, extensions=("png",)
    )  # more than five count as five
    write_retrieval_set(tmp_path / "f30k", [5] * 3)
    out = tmp_path / "out"
    given = [
        f"100m={checkpoint}",
        "--coco",
        str(tmp_path / "coco"),
        "--f30k",
        str(tmp_path / "f30k"),
    ]
    given += [
        "--text-model",
        str(bert),
        "--image-model",
        IMAGE_MODEL,
        "--out",
        str(out),
        "--workers",
        "0",
    ]
    assert main(given) == 1  # other sets than the paper's
    shown = capsys.readouterr().out
    assert "100m: converted and verified" in shown and "squash 256, crop 224" in shown
    assert (
        "100m on coco: cannot be compared: 16 images and 80 captions; the paper's test set has 5,000 and 25,000."
        in shown
    )
    coco, f30k = json.loads((out / "paper-weights.json").read_text())
    assert (coco["set"], f30k["set"], f30k["ours"]["captions"]) == ("coco", "f30k", 15)
    expected = by_the_definition(reference, tmp_path / "coco", captions, mean=0.5, std=0.5)
    for name, value in expected.items():
        assert coco["ours"][name] == pytest.approx(value, abs=1e-3), name
    # Negative control: the other weights' normalisation gives other recalls here.
    assert expected != pytest.approx(
        by_the_definition(reference, tmp_path / "coco", captions, mean=0.45, std=0.225)
    )
    config = json.loads((out / "zerovl-100m" / "open_clip_config.json").read_text())
    assert config["preprocess_cfg"]["mean"] == [0.5] * 3
    assert (out / "paper-weights.md").read_text() in shown


def ours(weights_name: str, set_name: str, **changed: float) -> Comparison:
    images, captions = SIZES[set_name]
    values = {
        **dict(zip(MEASURED, PAPER[weights_name][set_name], strict=True)),
        "images": images,
        "captions": captions,
    }
    return Comparison(weights_name, set_name, {**values, **changed})


def test_the_verdict_keeps_its_margins():
    assert (
        ours("14m", "coco").verdict() == "agrees: RSUM within 1, each recall within 0.5"
        and ours("14m", "coco").agrees
    )
    assert ours("14m", "coco", rsum=426.04).agrees and not ours("14m", "coco", rsum=426.06).agrees
    assert not ours("14m", "coco", rsum=423.94).agrees
    apart = ours("100m", "f30k", **{"image_to_text_R@1": 88.6, "rsum": 540.0})
    assert (
        apart.verdict() == "DIFFERS in I2T R@1, RSUM (margins: RSUM 1, recalls 0.5)"
        and not apart.agrees
    )
    assert not ours("14m", "coco", captions=25_010).agrees
    assert "25,010 captions" in ours("14m", "coco", captions=25_010).verdict()
    table = table_of([ours("14m", "coco", rsum=424.4), apart])
    assert "|    424.4 |" in table and "|     -0.6 |" in table and "|    536.2 |" not in table
    assert len({len(line) for line in table.splitlines() if line.startswith("|")}) == 1


def test_each_missing_file_gives_one_sentence(tmp_path, capsys):
    assert (
        main(
            [
                f"14m={tmp_path}/a.pth::100m={tmp_path}/b.pth",
                "--coco",
                f"{tmp_path}/k.json@{tmp_path}/pictures",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(line.startswith("weights.py: error: ") for line in said)
    assert (
        "the 14m checkpoint" in said[0]
        and "k.json of COCO" in said[2]
        and "pictures of COCO" in said[3]
    )


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            ["zerovl_14m.pth", "--coco", "c"],
            "'zerovl_14m.pth' does not say which weights it is: write 14m=FILE or 100m=FILE",
        ),
        (["14m=a::14m=b", "--coco", "c"], "14m is given twice (a and b)"),
        (["14m=a"], "no test set is given"),
    ],
)
def test_a_wrong_call_gives_a_sentence(given, sentence, capsys):
    assert main(given) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_that_is_not_a_checkpoint_gives_a_sentence(tmp_path, bert, capsys):
    (tmp_path / "bad.pth").write_bytes(b"<html>404</html>")
    write_retrieval_set(tmp_path / "f30k", [5])
    given = [f"14m={tmp_path}/bad.pth", "--f30k", str(tmp_path / "f30k"), "--text-model", str(bert)]
    assert main([*given, "--image-model", IMAGE_MODEL, "--out", str(tmp_path / "out")]) == 2
    assert (
        "bad.pth" in capsys.readouterr().err
        and not (tmp_path / "out" / "paper-weights.json").exists()
    )


def test_make_passes_its_words_on():
    root = Path(weights.__file__).parents[2]
    words = [
        "CHECKPOINT=14m=a::100m=b",
        "COCO=c.json@d e",
        "F30K=f",
        "TEXT_MODEL=g",
        "ARGS=--device cpu",
    ]
    line = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "paper-weights", *words], cwd=root, capture_output=True, text=True,
        env={**os.environ, "MAKEFLAGS": ""}, check=True,
    ).stdout  # fmt: skip
    assert (
        "-m scripts.paper.weights '14m=a::100m=b' --coco 'c.json@d e' --f30k 'f' --text-model 'g' --device cpu"
        in line
    )
