"""Image towers without their projection: the features that probes and heads on frozen encoders stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.embeddings.encoder import tower_before_projection
from support import tiny_clip


@pytest.mark.parametrize("kind", ["native", "timm", "timm-classifier", "resnet"])
def test_features_are_those_before_the_projection(tmp_path: Path, kind: str):
    """Projected by the tower's own projection they are its output; and the given model stays as it was."""
    vision = {
        "native": tiny_clip.NATIVE_VISION,
        "timm": tiny_clip.TIMM_VISION,
        "timm-classifier": {**tiny_clip.TIMM_VISION, "timm_proj": ""},
        "resnet": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8},
    }[kind]
    name = tiny_clip.register(tmp_path, f"probe-{kind}", vision, tiny_clip.CLIP_TEXT)
    visual = tiny_clip.random_model(name).visual
    side = vision["image_size"]
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = visual(images)
        features = tower_before_projection(visual)(images)
        projection = {
            "native": lambda x: x @ visual.proj,
            "timm": lambda x: visual.head(x),
            "timm-classifier": lambda x: visual.trunk.head(x),
            "resnet": lambda x: visual.attnpool.c_proj(x),
        }[kind]
        torch.testing.assert_close(projection(features), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(visual(images), expected)


def test_unknown_towers_are_refused():
    with pytest.raises(UserError, match="Linear"):
        tower_before_projection(nn.Linear(2, 2))
