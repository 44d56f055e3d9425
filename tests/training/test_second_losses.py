"""CoCa and `--distill-model` under the recipe's step: as open_clip's own loop trains them, and decoupled as in one batch."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.weights import read_state_dict
from open_clip_zerovl.core.errors import UserError
from support.tars import png, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from support.tiny_coca import CONFIG
from training import model as model_module
from training.main import main
from training.model import check_contrastive

CAPTIONS = ("a red cat", "the green tree by the house", "blue", "a black dog")
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0))
TEXT = {"context_length": 12, "vocab_size": 49408}  # of open_clip's tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Eight pictures of four colours in a shard and a table, models named tiny, teacher and tiny-coca, and their weights."""
    folder = tmp_path_factory.mktemp("second")
    coca = {
        key: {**value, **TEXT} if key in ("text_cfg", "multimodal_cfg") else value
        for key, value in CONFIG.items()
    }
    coca["vision_cfg"] = {**CONFIG["vision_cfg"], "patch_dropout": 0.0}
    configs = {
        "tiny": {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT},
        "teacher": {"embed_dim": 40, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT},
        "tiny-coca": {**coca, "custom_text": True},
    }
    (folder / "configs").mkdir()
    for name, config in configs.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "configs")
    for name in configs:
        torch.manual_seed(0)
        model = open_clip.create_model(name)
        if name == "tiny-coca":  # open_clip leaves it as the memory was
            torch.nn.init.normal_(model.text_decoder.text_projection, std=0.2)
        torch.save(model.state_dict(), folder / f"{name}.pt")
    (folder / "p").mkdir()
    members, rows = [], ["filepath,title"]
    for number in range(8):
        picture, caption = png(COLOURS[number % 4], 32), CAPTIONS[number % 4]
        members += [(f"{number}.png", picture), (f"{number}.txt", caption.encode())]
        (folder / "p" / f"{number}.png").write_bytes(picture)
        rows.append(f"p/{number}.png,{caption}")
    write_tar(folder / "s" / "0.tar", members)
    (folder / "s" / "sizes.json").write_text(json.dumps({"0.tar": 8}))
    (folder / "here.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture
def run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(name, words):
        shared = "--device cpu --precision fp32 --workers 0 --csv-separator , --lr 0.1 --warmup 0"
        status = main([*shared.split(), "--name", name, *words.split()])
        said = capsys.readouterr()
        return status, said.err + said.out

    return call


SECOND = {
    "captions": "--model tiny-coca --pretrained tiny-coca.pt --coca-caption-loss-weight 1.5 --coca-contrastive-loss-weight 0.5",
    "a teacher": "--model tiny --pretrained tiny.pt --distill-model teacher --distill-pretrained teacher.pt",
}
LOSSES = {"captions": "Caption_loss", "a teacher": "Distill_loss"}


@pytest.mark.line("3.3", reason="open_clip 4 shuffles and decays otherwise")
@pytest.mark.parametrize("kind", SECOND)
def test_the_weights_are_those_of_open_clips_own_loop(run, place, kind):
    """SGD on eight pairs for two epochs: open_clip's loop, and our step with two retained micro-batches and with four."""
    words = (
        f"{SECOND[kind]} --opt timm/sgd --eps 1e-8 --momentum 0.9 --epochs 2 --train-data here.csv"
    )
    weights = {}
    for name, more in {
        "theirs": "--batch-size 8",
        "ours": "--batch-size 4 --dga-steps 2 --dga-retain 2",
        "decoupled": "--batch-size 2 --dga-steps 4 --dga-check always",
    }.items():
        status, said = run(f"{name} {kind[-3:]}".replace(" ", "-"), f"{words} {more}")
        assert status == 0, said
        logs = place / "logs" / f"{name} {kind[-3:]}".replace(" ", "-")
        assert LOSSES[kind] in (logs / "out.log").read_text()
        weights[name] = read_state_dict(logs / "checkpoints" / "epoch_2.pt")
    start = torch.load(place / ("tiny-coca.pt" if kind == "captions" else "tiny.pt"))
    moved = max((weights["theirs"][name] - start[name]).abs().max() for name in start)
    for name in ("ours", "decoupled"):
        apart = max((weights["theirs"][key] - weights[name][key]).abs().max() for key in start)
        assert apart <= 1e-4 * moved, f"{name}: {apart} of {moved}"


@pytest.mark.parametrize("loss", ["", "--loss-chunk 3"])
def test_a_converted_siglip_keeps_its_scale_and_bias(run, place, loss):
    """docs/siglip2.md: training begins with the checkpoint's numbers, not with `--siglip`'s; the scale is at most 100."""
    config = {
        "embed_dim": 24, "init_logit_bias": -10, "custom_text": True, "vision_cfg": NATIVE_VISION,
        "text_cfg": {**CLIP_TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    }  # fmt: skip
    (place / "tiny-sigmoid.json").write_text(json.dumps(config))
    open_clip.add_model_config(place / "tiny-sigmoid.json")
    model = open_clip.create_model("tiny-sigmoid")
    with torch.no_grad():
        model.logit_bias.fill_(-16.5), model.logit_scale.fill_(4.7)
    torch.save(model.state_dict(), place / "sigmoid.pt")
    words = "--model tiny-sigmoid --pretrained sigmoid.pt --siglip --train-data a=s --batch-size 2 --dga-steps 4"
    name = f"sigmoid{len(loss)}"
    status, said = run(name, f"{words} --lr 1e-5 --epochs 1 {loss}")
    assert status == 0, said
    weights = read_state_dict(place / "logs" / name / "checkpoints" / "epoch_1.pt")
    assert 0 < abs(weights["logit_bias"] + 16.5) < 1e-3
    assert weights["logit_scale"] == pytest.approx(math.log(100), abs=1e-4)


def test_a_captioner_begins_with_random_weights_and_loads_in_stock_open_clip(run, place):
    """open_clip leaves the decoder's projection as the memory was, NaN included."""
    words = "--model tiny-coca --train-data a=s --batch-size 2 --dga-steps 4 --lr 0 --epochs 1"
    status, said = run("stock", f"{words} --loss-chunk 3 --positives caption")
    assert status == 0, said
    checkpoint = place / "logs" / "stock" / "checkpoints" / "epoch_1.pt"
    model = open_clip.create_model("tiny-coca", pretrained=str(checkpoint))
    projection = model.text_decoder.text_projection
    assert projection.std().item() == pytest.approx(len(projection) ** -0.5, rel=0.1)


def test_another_captioner_is_refused(monkeypatch):
    """Its caption loss would be lost; open_clip's later releases tell what a model learns."""
    check_contrastive(open_clip.CoCa(**CONFIG), "coca")
    check_contrastive(torch.nn.Linear(1, 1), "any")
    with pytest.raises(UserError, match="--model coca2 .* write captions, but not as CoCa does"):
        check_contrastive(type("CoCa2", (open_clip.CoCa,), {})(**CONFIG), "coca2")
    traits = SimpleNamespace(generative=True)
    monkeypatch.setattr(model_module.host, "get_model_traits", lambda _: traits, raising=False)
    with pytest.raises(UserError, match="--model mammut2 .* write captions"):
        check_contrastive(torch.nn.Linear(1, 1), "mammut2")
