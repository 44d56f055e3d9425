"""The paper's linear probe: LARS, resuming, and the sets of Tables 11 and 12."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms import ToTensor

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import image_transform_train
from open_clip_zerovl.data.sets import IndexedSet
from open_clip_zerovl.evaluate.probe import probed_model
from open_clip_zerovl.features.encoder import tower_before_projection
from scripts.paper.probe import Settings, lars, linear_head, open_set, probe, train_lars
from scripts.program import program
from support.colours import COLOURS, MeanColour, colour_set, write_folder
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("clip")
    name = register(folder, "probe-clip", NATIVE_VISION, CLIP_TEXT)
    return str(write_run(folder / "run", random_model(name), {"model": name}))


def fit_colours(
    folder: Path,
    train: IndexedSet,
    settings: Settings,
    tower: nn.Module | None = None,
    transform=None,
) -> tuple[nn.Linear, list[dict[str, float]]]:
    transform = transform or ToTensor()
    return train_lars(
        probed_model(tower or MeanColour(), transform),
        train,
        transform,
        list(COLOURS),
        settings,
        state_file=folder / "state.pt",
        evaluate=lambda head: 0.0,
    )


def test_lars_step_equals_one_by_hand():
    """As in the released code, both parameters are adapted."""
    head = linear_head(4, 3).double()
    generator = torch.Generator().manual_seed(1)
    optimizer = lars(head)
    for group in optimizer.param_groups:
        group["lr"] = 6.4
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    for _ in range(3):
        x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (10,), generator=generator)
        F.cross_entropy(head(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        # The gradient of softmax regression in closed form.
        error = ((x @ weight.T + bias).softmax(1) - F.one_hot(y, 3)) / 10
        gradient_w, gradient_b = error.T @ x, error.sum(0)
        velocity_w = 0.9 * velocity_w + 0.001 * weight.norm() / gradient_w.norm() * gradient_w
        velocity_b = 0.9 * velocity_b + 0.001 * bias.norm() / gradient_b.norm() * gradient_b
        weight, bias = weight - 6.4 * velocity_w, bias - 6.4 * velocity_b
    # timm adds eps = 1e-8 to the gradient's norm.
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(head.bias.detach(), bias, rtol=1e-6, atol=1e-9)


def test_micro_batches_do_not_change_the_step(tmp_path: Path):
    heads = [
        fit_colours(
            tmp_path / str(micro_batch),
            colour_set(96),
            Settings(epochs=3, batch_size=48, lr=1.0, micro_batch=micro_batch),
        )[0].state_dict()
        for micro_batch in (48, 7)
    ]
    for name in heads[0]:
        torch.testing.assert_close(heads[0][name], heads[1][name], rtol=1e-5, atol=1e-7)


class PowerCut(Exception):
    pass


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, checkpoint):
    """Bit for bit, with a real tower and AutoAugment; cut in the middle of the third epoch."""
    tower = tower_before_projection(load_model(checkpoint)[0].visual)
    transform = image_transform_train(32, area=(0.08, 1.0), auto_augment="imagenet")
    settings = Settings(epochs=3, batch_size=12, lr=3.0, micro_batch=5)
    train = colour_set(30)
    whole, history = fit_colours(tmp_path / "whole", train, settings, tower, transform)

    reads = 0

    def failing_read(index: int) -> Image.Image:
        nonlocal reads
        reads += 1
        # one for the width of the features, two epochs of two batches, a part of one
        if reads == 1 + 2 * 24 + 10:
            raise PowerCut
        return train.read(index)

    cut = replace(train, read=failing_read)
    with pytest.raises(PowerCut):
        fit_colours(tmp_path / "cut", cut, settings, tower, transform)
    torch.randn(17)  # the process's own generator must not matter
    resumed, resumed_history = fit_colours(tmp_path / "cut", train, settings, tower, transform)
    assert resumed_history == history
    for key, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key]), key
    other = fit_colours(tmp_path / "other", train, replace(settings, seed=1), tower, transform)[0]
    assert not torch.equal(other.weight, whole.weight)
    for changed in (replace(settings, lr=2.0), replace(settings, micro_batch=4)):
        with pytest.raises(UserError, match="was begun with other settings, data or weights"):
            fit_colours(tmp_path / "cut", train, changed, tower, transform)


BIRDS = [
    "001.Black_footed_Albatross/a.jpg",
    "001.Black_footed_Albatross/b.jpg",
    "002.Laysan_Albatross/c.jpg",
]
INAT17 = {
    "images": [{"id": 7, "file_name": "val/a.jpg"}],
    "annotations": [{"image_id": 7, "category_id": 3}],
    "categories": [{"id": 3, "name": "Pica pica"}],
}
# dataset -> split, labels wanted, files with their text, pictures
DATASETS = {
    "food101": ("train", ["pho"], {
        "food-101/meta/train.json": '{"pho": ["pho/1"], "waffles": []}',
        "food-101/meta/test.json": '{"pho": ["pho/2"], "waffles": []}',
    }, ["food-101/images/pho/1.jpg", "food-101/images/pho/2.jpg"]),
    "pets": ("test", ["New Pug", "Abyssinian"], {
        "oxford-iiit-pet/annotations/trainval.txt": "Abyssinian_1 1 1 1\nnew_pug_7 2 2 1\n",
        "oxford-iiit-pet/annotations/test.txt": "new_pug_8 2 2 1\nAbyssinian_2 1 1 1\n",
    }, ["oxford-iiit-pet/images/new_pug_8.jpg"]),
    "aircraft": ("train", ["727-200"], {
        "fgvc-aircraft-2013b/data/variants.txt": "707-320\n727-200\n",
        "fgvc-aircraft-2013b/data/images_variant_trainval.txt": "0000001 727-200\n",
    }, ["fgvc-aircraft-2013b/data/images/0000001.jpg"]),
    "cub": ("train", ["001.Black_footed_Albatross", "002.Laysan_Albatross"], {
        "CUB_200_2011/images.txt": "".join(f"{i} {file}\n" for i, file in enumerate(BIRDS, start=1)),
        "CUB_200_2011/train_test_split.txt": "1 1\n2 0\n3 1\n",
    }, [f"CUB_200_2011/images/{file}" for file in BIRDS]),
    "inat17": ("test", ["Pica pica"], {"val2017.json": json.dumps(INAT17)}, ["val/a.jpg"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_that_bring_their_split(tmp_path: Path, kind: str):
    split, labels, texts, pictures = DATASETS[kind]
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    for red, file in enumerate(pictures):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (50 * red, 0, 0)).save(tmp_path / file)
    found = open_set(f"{kind}:{tmp_path}", split)
    assert found.labels == labels and found.image(0).size == (8, 8)
    if kind == "cub":  # a folder's own path, and the other split: file b
        other = open_set(f"cub:{tmp_path / 'CUB_200_2011'}", "test")
        assert other.image(0).getpixel((0, 0))[0] in range(45, 56) and len(other) == 1


def test_the_program(tmp_path: Path, checkpoint, capsys):
    """By default with the paper's settings."""
    assert astuple(Settings())[:4] == (90, 16_384, 6.4, 0.0)
    train, test = (
        write_folder(tmp_path / f"set{seed}", colour_set(n, seed=seed))
        for seed, n in enumerate((30, 12))
    )
    out = tmp_path / "out"
    words = [checkpoint, *f"--train {train} --test {test} --out {out} --device cpu".split()]
    words += ["--epochs", "3", "--batch-size", "15", "--micro-batch", "8", "--lr", "5"]
    assert program(probe, words) == 0
    result = json.loads((out / "linear_probe.json").read_text())
    assert len(result["history"]) == 3 and result["settings"]["lr"] == 5
    assert result["history"][-1]["test_accuracy"] == result["top1"]
    assert "linear probe, 3 classes, 12 test images: top-1" in capsys.readouterr().out
