"""The measured bias of the gradient without replayed masks (scripts/ablation/replay.py)."""

import json

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize

from scripts.ablation import replay
from scripts.ablation.replay import gradient_bias, set_dropout
from scripts.drawn.make import DrawnSample
from support.tiny_clip import bert_text, random_model, register, write_bert, write_run


class Towers(nn.Module):
    """Two towers of two layers with dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
            for _ in range(2)
        )
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        return {
            "image_features": normalize(self.image(images), dim=1),
            "text_features": normalize(self.text(texts), dim=1),
            "logit_scale": self.logit_scale.exp(),
        }


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 3, 6, generator=generator)) for _ in range(3)]


def test_there_is_no_bias_without_dropout_and_some_with_it(batch):
    bias, chance, cosine = gradient_bias(Towers(0.0), batch, 4)
    assert bias < 1e-6 and chance < 1e-6 and cosine == pytest.approx(1)
    model = Towers(0.3)
    assert set_dropout(model, 0.5) == 2
    bias, chance, cosine = gradient_bias(model, batch, 256)
    assert bias > 1.5 * chance and cosine < 0.9


def test_two_means_with_replay_differ_by_chance_only(batch, monkeypatch):
    """The negative control: without any bias the difference is within the chance that is taken off."""
    stock = replay.DecoupledGradientAccumulation
    monkeypatch.setattr(
        replay,
        "DecoupledGradientAccumulation",
        lambda *args, replay_rng, **kwargs: stock(*args, **kwargs),
    )
    bias, chance, _ = gradient_bias(Towers(0.5), batch, 64)
    assert bias < chance


def test_a_model_without_dropout_has_nothing_to_measure(tmp_path):
    assert set_dropout(nn.Linear(2, 2), 0.5) == 0
    with pytest.raises(replay.UserError, match=r"no epoch_N.pt: train with --save-frequency 1"):
        replay.measure([], tmp_path, [0.1], 2)


def test_a_runs_checkpoints_are_measured_as_they_are(tmp_path, monkeypatch, capsys):
    """From a training checkpoint, whose model returns a tuple of features by default, to the numbers of the page."""
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16}
    name = register(
        tmp_path / "configs", "tiny-replay", vision, bert_text(write_bert(tmp_path / "bert"))
    )
    write_run(tmp_path / "run", random_model(name), {"model": name})
    pairs = [
        DrawnSample(
            Image.new("RGB", (32, 32), (4 * n, 0, 0)), f"a red cat {n}", str(n), "s", "g", False
        )
        for n in range(64)
    ]
    monkeypatch.setattr(replay, "load_drawn_split", lambda *_: {"openmoji": pairs})
    out = tmp_path / "replay.json"
    argv = f"--run {tmp_path / 'run'} --draws 2 --dropout 0.1,0.3 --out {out}".split()
    assert replay.main(argv) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert [(one["epoch"], one["dropout"]) for one in found] == [(1, 0.1), (1, 0.3)]
    assert all(one["chance"] > 0 and one["cosine"] < 1 for one in found)
