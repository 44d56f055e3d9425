"""open_clip's own training cases (tests/test_training_simple.py of v3.3.0) with --dga-steps 2 added, on tiny models.

The same flags and synthetic data. The mT5 tower is built from a config: its weights are on the hub only.
"""

from __future__ import annotations

import pytest
import torch

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, register
from training.main import main

# Whole trainings; the unlocked layers are tested in tests/recipe, --torchscript stands in the table of test_every_flag.
pytestmark = pytest.mark.slow
OF_3 = pytest.mark.line("3.3", reason="open_clip 4 has no --torchscript")
FLAGS = [
    "--save-frequency", "1", "--zeroshot-frequency", "1", "--dataset-type", "synthetic", "--train-num-samples", "16",
    "--warmup", "1", "--batch-size", "4", "--lr", "1e-3", "--wd", "0.1", "--epochs", "1",
]  # fmt: skip


def train(folder, model: str, *extra: str) -> dict:
    """The weights that a run leaves; it must take two steps of two micro-batches."""
    name = f"run{len(list(folder.glob('logs/*')))}"
    assert (
        main([*FLAGS, "--logs", str(folder / "logs"), "--name", name, "--model", model, *extra])
        == 0
    )
    log = (folder / "logs" / name / "out.log").read_text()
    assert log.count("Train Epoch: 0") >= 1 and "nan" not in log.lower()
    return torch.load(folder / "logs" / name / "checkpoints" / "epoch_1.pt", weights_only=True)[
        "state_dict"
    ]


@OF_3
@pytest.mark.parametrize("data", ["synthetic", "named"])
def test_training_clip_with_jit(tmp_path, data):
    """A scripted model trains as the same model unscripted, to rounding."""
    name = register(tmp_path / "configs", f"own-case-jit-{data}", NATIVE_VISION, CLIP_TEXT)
    options = ["--dga-steps", "2", "--workers", "2"]
    if data == "named":
        options += [
            "--train-data",
            f"a={write_source(tmp_path / 'a', 0, 16, 8)}",
            "--dataset-type",
            "auto",
        ]
    # open_clip's synthetic pairs are all the same: their gradient is rounding, which AdamW's epsilon keeps small
    options += ["--eps", "0.1"]
    scripted, plain = (
        train(tmp_path, name, *options, "--torchscript"),
        train(tmp_path, name, *options),
    )
    assert scripted.keys() - plain.keys() == {
        "attn_mask"
    }  # a scripted model stores its constants, too
    exported = export_local_dir(
        next(tmp_path.glob("logs/run0/checkpoints/epoch_1.pt")), tmp_path / "exported"
    )
    model, *_ = load_model(exported)
    assert torch.equal(model.visual.proj, scripted["visual.proj"])
    for key, value in plain.items():
        torch.testing.assert_close(scripted[key], value, rtol=1e-5, atol=1e-6)
