"""`zerovl align` from encoders to a folder that a process without this package loads."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer

import open_clip_zerovl.api as zerovl
from open_clip_zerovl.align import alignment
from open_clip_zerovl.align.alignment import run_align
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.retrieval import run_retrieval
from open_clip_zerovl.features.encoder import FrozenModel
from support import warm
from support.tars import encoded, write_tar

TEXTS = ["a red house of blue sun", "the green tree and the red cat"]
# Run by a bare interpreter: open_clip alone, no network.
STRANGER = """
import json, sys
import open_clip, torch
name = "local-dir:" + sys.argv[1]
model, _, _ = open_clip.create_model_and_transforms(name)
tokenizer = open_clip.get_tokenizer(name)
assert not any(name.startswith("open_clip_zerovl") for name in sys.modules)
model.eval()
with torch.no_grad():
    text = model.encode_text(tokenizer(json.loads(sys.argv[2])), normalize=True)
    image = model.encode_image(torch.linspace(-1, 1, 3 * 160 * 160).reshape(1, 3, 160, 160), normalize=True)
print(json.dumps({"image": image.tolist(), "text": text.tolist()}))
"""

TRANSFORMERS_STRANGER = """
import json, sys
import torch
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
texts = tokenizer(json.loads(sys.argv[2]), padding=True, return_tensors="pt")
with torch.no_grad():
    found = model(**texts, pixel_values=torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32))
assert not any(name.startswith("open_clip_zerovl") for name in sys.modules)
print(json.dumps({"image": found.image_embeds.tolist(), "text": found.text_embeds.tolist()}))
"""


def embeddings_of_a_stranger(folder, tmp_path, script=STRANGER):
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "no-cache"),
        "PYTHONPATH": "",
    }
    command = [warm.python(), "-c", script, str(folder), json.dumps(TEXTS)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_folder_has_the_recall_of_the_training_and_a_stranger_loads_it(
    request_of, home, colours, tmp_path
):
    """Features in fp32: pictures and captions through the whole model rank as the stored rows through the heads."""
    said = []
    request = request_of(tmp_path / "out", dtype="float32", epochs=10, batch_size=32, lr=1e-2)
    (result,) = run_align(request, said.append)
    folder = tmp_path / "out" / "model"
    scored = run_retrieval(Encoder(str(folder)), f"held={home / 'held'}")["held"]
    for name, value in result.outcome.metrics.items():
        assert scored[name] == pytest.approx(value, abs=1e-5), name
    assert scored["rsum"] > scored["rsum_chance_upper"]

    found = embeddings_of_a_stranger(folder, tmp_path)
    model, _, tokenizer = load_model(folder)
    with torch.no_grad():
        expected = model.encode_text(tokenizer(TEXTS), normalize=True)
        image = model.encode_image(
            torch.linspace(-1, 1, 3 * 160 * 160).reshape(1, 3, 160, 160), normalize=True
        )
    assert torch.allclose(torch.tensor(found["text"]), expected, rtol=0, atol=1e-6)
    assert torch.allclose(torch.tensor(found["image"]), image, rtol=0, atol=1e-6)
    record = json.loads((tmp_path / "out" / "align.json").read_text())
    assert record["pairings"][0]["metrics"] == result.outcome.metrics
    check_gallery((tmp_path / "out" / "align.html").read_text(), colours)


def check_gallery(page, rgb):
    """A caption names the colours of the upper and the lower half of its picture."""
    shown = 0
    for card in re.findall(r"<article.*?</article>", page, re.DOTALL):
        caption = re.search(r'class="query"><span>(.*?) <small>', card)
        jpeg = re.search(r'class="thumb right" src="data:image/jpeg;base64,(.*?)"', card)
        if caption and jpeg:
            picture = Image.open(BytesIO(b64decode(jpeg[1])))
            halves = [picture.getpixel((20, y)) for y in (10, 30)]
            seen = [min(rgb, key=lambda name: math.dist(rgb[name], half)) for half in halves]
            assert seen == [word for word in caption[1].split() if word in rgb]
            shown += 1
    assert shown >= 5


def test_the_command_writes_a_model_for_transformers_and_for_training(
    home, tmp_path, capsys, monkeypatch
):
    """Native towers of open_clip: linear heads become CLIP's own projections."""
    loaded = []
    monkeypatch.setattr(
        alignment, "load_model", lambda name: loaded.append(name) or load_model(name)
    )
    checkpoint = str(home / "native" / "checkpoints" / "epoch_1.pt")
    words = [
        "--image",
        checkpoint,
        "--text",
        checkpoint,
        "--data",
        f"a={home / 'a'}",
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--epochs", "2", "--batch-size", "16", "--embed-dim", "24", "--device", "cpu"]
    assert main(["align", *words]) == 0, capsys.readouterr().err
    assert loaded == [checkpoint]  # once for both towers
    folder = tmp_path / "out" / "model"
    given = {"image": checkpoint, "text": checkpoint, "data": words[5], "out": tmp_path / "out"}
    given |= {"embed_dim": 24, "epochs": 2, "batch_size": 16, "device": "cpu"}
    aligned = zerovl.align(**given)  # the same call: nothing is trained again
    assert Path(aligned) == folder and aligned.page().path == tmp_path / "out" / "align.html"
    assert aligned.scores["rsum"] == max(rsum for _, rsum, _ in aligned.curve)
    assert main(["export", str(folder), str(tmp_path / "hf"), "--format", "transformers"]) == 0, (
        capsys.readouterr().err
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["projection_dim"] == 24
    from open_clip_zerovl.recipe.build import init_from

    model, _, _ = load_model(folder)
    report = init_from(model, folder)
    assert report.left == {} and "text projection" in report.loaded


def embeddings_here(folder, tmp_path, script):
    """As a stranger makes them, in this process."""
    dual, texts = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    with torch.no_grad():
        found = dual(**texts(TEXTS, padding=True, return_tensors="pt"), pixel_values=pixels)
    return {"image": found.image_embeds.tolist(), "text": found.text_embeds.tolist()}


@pytest.mark.parametrize(
    "open_folder",
    [
        embeddings_here,
        pytest.param(
            embeddings_of_a_stranger,
            marks=pytest.mark.slow(reason="another process of imports"),
        ),
    ],
)
def test_vision_models_of_transformers_become_its_dual_encoder(
    request_of, home, tmp_path, open_folder
):
    said = []
    given = {"images": (f"hf:{home / 'dinov2'}",), "texts": (f"hf:{home / 'bert'}",), "epochs": 1}
    (result,) = run_align(request_of(tmp_path / "out", **given), said.append)
    found = open_folder(tmp_path / "out" / "model", tmp_path, TRANSFORMERS_STRANGER)
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    heads, task, tower = result.outcome.heads.cpu(), result.task, result.image.module
    with torch.no_grad():
        image = heads.image(tower(pixels) * task.images.scale)
        text = heads.text(result.text.module(result.text.tokenizer(TEXTS)) * task.texts.scale)
    for own, name in ((image, "image"), (text, "text")):
        expected = torch.nn.functional.normalize(own, dim=-1)
        assert torch.allclose(torch.tensor(found[name]), expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"model is for another library; give another"):
        run_align(request_of(tmp_path / "out"), said.append)


def test_a_sweep_ranks_the_pairings_and_a_second_run_reads_the_rows(
    request_of, home, tmp_path, monkeypatch
):
    checkpoint = str(home / "native" / "checkpoints" / "epoch_1.pt")
    images = (f"timm:{home / 'timm'}", checkpoint)
    texts = (f"hf:{home / 'bert-mean'}", checkpoint)
    said = []
    request = request_of(tmp_path / "out", images=images, texts=texts, seeds=2)
    results = run_align(request, said.append)
    assert {(one.image.name, one.text.name) for one in results} == {
        (a, b) for a in images for b in texts
    }
    scores = [one.rsum for one in results]
    assert scores == sorted(scores, reverse=True)
    for one in results:
        assert (
            one.interval[0] <= one.rsum <= one.interval[1]
            and max(one.of_seeds) == one.rsum
            and len(one.of_seeds) == 2
        )
    verdict = next(line for line in said if "Best: " in line)
    assert f"Best: {results[0].name}" in verdict and f"before {results[1].name}" in verdict
    assert ("counts" in verdict) != ("may turn the order round" in verdict)
    model, _, _ = load_model(tmp_path / "out" / "model")
    assert model.visual(torch.zeros(1, 3, *results[0].image.preprocess_cfg["size"])).shape == (
        1,
        16,
    )

    def encoded(*_):
        raise AssertionError("the rows are stored")

    monkeypatch.setattr(FrozenModel, "_encoded", encoded)
    said.clear()
    run_align(
        request_of(tmp_path / "other", images=images, texts=texts, lr=1e-2),
        said.append,
    )
    assert sum("the features of its" in line for line in said) == 4


def test_pictures_of_classes_have_their_top1_and_no_pair_of_a_class_as_a_negative(
    request_of, colours, tmp_path
):
    """Three classes of one colour each; RSUM is capped by captions that pictures share, top-1 is not."""
    rng, members = np.random.default_rng(0), []
    for number in range(60):
        name, colour = list(colours.items())[number % 3]
        pixels = np.clip(rng.integers(-30, 30, (40, 40, 3)) + colour, 0, 255).astype(np.uint8)
        caption = f"a {name} house".encode()
        members += [(f"{number}.png", encoded(Image.fromarray(pixels))), (f"{number}.txt", caption)]
    write_tar(tmp_path / "train" / "0.tar", members)
    (tmp_path / "train" / "classnames.txt").write_text("\n".join(colours) + "\n")
    said = []
    given = {"train_data": f"c={tmp_path / 'train'}", "held_out": "", "rows": None}
    (result,) = run_align(
        request_of(tmp_path / "out", **given, epochs=20, lr=1e-2, batch_size=32), said.append
    )
    assert result.recipe.positives == "caption" and result.top1 == 1.0 and result.rsum < 500
    record = json.loads((tmp_path / "out" / "align.json").read_text())
    assert record["pairings"][0]["top1"] == 1.0


def test_a_training_with_other_held_out_pictures_is_another_training(request_of, tmp_path):
    """Seed 1 of two seeds from 0 on was trained on pictures that a call with --seed 1 holds out."""
    said: list[str] = []
    given = {"held_out": "", "rows": tmp_path / "rows"}
    run_align(request_of(tmp_path / "out", **given, seeds=2), said.append)
    again, alone = (
        run_align(request_of(tmp_path / out, **given, seed=1), said.append)[0]
        for out in ("out", "alone")
    )
    assert again.outcome.scores == alone.outcome.scores and again.rsum == alone.rsum
    # Each source is scored alone.
    assert {*again.of_sources} == {"a", "b"} and sum("alone: RSUM" in line for line in said) == 6
    assert sum(scores["images"] for scores in again.of_sources.values()) == len(
        again.task.pairs.held_out.images
    )


def test_parts_are_encoded_by_several_calls(request_of, tmp_path, monkeypatch):
    said = []
    for number in range(2):  # of torchrun's two ranks, the second by its flag
        with monkeypatch.context() as patch:
            for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2 - number}.items():
                patch.setenv(name, str(value))
            part = (number, 1 + number)
            assert run_align(request_of(tmp_path / "out", rows=None, part=part), said.append) == []
        assert said[-1].startswith(f"part {number}/2 is encoded") and not any(
            "the features of its" in line for line in said
        )
    run_align(request_of(tmp_path / "out", rows=None), said.append)
    assert sum("the features of its" in line for line in said) == 2


def test_cut_captions_and_rows_on_the_disk_are_announced(request_of, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(alignment, "available_bytes", lambda device: 1)
    monkeypatch.setattr("open_clip_zerovl.data.sources.Source.folder", None)  # on a server
    run_align(request_of(tmp_path / "out", rows=None, context_length=8), said.append)
    assert "image/jpeg" not in (tmp_path / "out" / "align.html").read_text()
    assert any("120 of 240 captions are longer than its 8 tokens" in line for line in said)
    assert (
        sum(
            "does not fit in memory: each step reads its rows from the disk" in line
            for line in said
        )
        == 2
    )
