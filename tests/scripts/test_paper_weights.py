"""`make paper-weights`: converted, verified, scored with the paper's transform, beside the paper's numbers."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import functional as TF

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
    given = f"100m={checkpoint} --coco {tmp_path / 'coco'} --f30k {tmp_path / 'f30k'}".split()
    given += f"--text-model {bert} --image-model {IMAGE_MODEL} --out {out} --workers 0".split()
    assert main(given) == 1  # other sets than the paper's
    shown = capsys.readouterr().out
    assert "100m: converted and verified" in shown and "squash 256, crop 224" in shown
    assert (
        "100m on coco: cannot be compared: 16 images and 80 captions; the paper's test set has 5,000 and 25,000."
        in shown
    )
    assert "100m on f30k: cannot be compared: 3 images and 15 captions;" in shown
    expected = by_the_definition(reference, tmp_path / "coco", captions, mean=0.5, std=0.5)
    cells = [f"{expected[name]:.1f}" for name in MEASURED]
    assert ["100m", "coco", "ours", *cells] in [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()
    ]
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
    def verdict(weights: str, set_name: str, **changed: float) -> str:
        return ours(weights, set_name, **changed).verdict()

    agrees = "agrees: RSUM within 1, each recall within 0.5"
    assert verdict("14m", "coco") == verdict("14m", "coco", rsum=426.04) == agrees
    assert agrees not in (verdict("14m", "coco", rsum=rsum) for rsum in (426.06, 423.94))
    apart = ours("100m", "f30k", **{"image_to_text_R@1": 88.6, "rsum": 540.0})
    assert apart.verdict() == "DIFFERS in I2T R@1, RSUM (margins: RSUM 1, recalls 0.5)"
    assert "25,010 captions" in verdict("14m", "coco", captions=25_010)
    table = table_of([ours("14m", "coco", rsum=424.4), apart])
    assert "| 424.4 |" in table and "| -0.6 |" in table and "| 536.2 |" not in table
