"""open_clip's own training cases (tests/test_training_simple.py of v3.3.0) with --dga-steps 2 added, on tiny models.

The same flags and synthetic data. The mT5 tower is built from a config: there are no weights of it without the hub.
"""

from __future__ import annotations

import pytest
import torch
from transformers import MT5Config

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.releases import LINE_4, line_here
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, bert_text, register, write_bert
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
    assert main([*FLAGS, "--logs", str(folder / "logs"), "--name", name, "--model", model, *extra]) == 0
    log = (folder / "logs" / name / "out.log").read_text()
    assert log.count("Train Epoch: 0") >= 1 and "nan" not in log.lower()
    return torch.load(folder / "logs" / name / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]


@OF_3
@pytest.mark.parametrize("data", ["synthetic", "named"])
def test_training_clip_with_jit(tmp_path, data):
    """A scripted model trains as the same model unscripted, to rounding."""
    name = register(tmp_path / "configs", f"own-case-jit-{data}", NATIVE_VISION, CLIP_TEXT)
    options = ["--dga-steps", "2", "--workers", "2"]
    if data == "named":
        options += ["--train-data", f"a={write_source(tmp_path / 'a', 0, 16, 8)}", "--dataset-type", "auto"]
    # open_clip's synthetic pairs are all the same: their gradient is rounding, which AdamW's epsilon keeps small
    options += ["--eps", "0.1"]
    scripted, plain = train(tmp_path, name, *options, "--torchscript"), train(tmp_path, name, *options)
    assert scripted.keys() - plain.keys() == {"attn_mask"}  # a scripted model stores its constants, too
    exported = export_local_dir(next(tmp_path.glob("logs/run0/checkpoints/epoch_1.pt")), tmp_path / "exported")
    model, *_ = load_model(exported)
    assert torch.equal(model.visual.proj, scripted["visual.proj"])
    for key, value in plain.items():
        torch.testing.assert_close(scripted[key], value, rtol=1e-5, atol=1e-6)


def test_training_mt5(tmp_path):
    """`--lock-text --lock-text-unlocked-layers 2` leaves the lower layers as they were, and trains the upper two.

    open_clip 4 counts the projection as the first of the two.
    """
    mt5 = MT5Config(vocab_size=200, d_model=16, d_kv=8, d_ff=16, num_layers=4, num_heads=2)
    mt5.save_pretrained(write_bert(tmp_path / "mt5"))  # with BERT's tokenizer
    text = {**bert_text(tmp_path / "mt5"), "hf_pooler_type": "mean_pooler"}
    name = register(tmp_path / "configs", "own-case-mt5", NATIVE_VISION, text)
    whole = train(tmp_path, name, "--dga-steps", "2", "--workers", "2")
    locked = train(
        tmp_path, name, "--dga-steps", "2", "--workers", "2", "--lock-text", "--lock-text-unlocked-layers", "2"
    )
    again = train(
        tmp_path, name, "--dga-steps", "2", "--workers", "2", "--lock-text", "--lock-text-unlocked-layers", "0"
    )

    def changed(first: dict, second: dict) -> set[str]:
        """Numbers of the text tower's blocks whose weights differ."""
        return {
            key.split(".block.")[1].split(".")[0]
            for key in first
            if ".encoder.block." in key or ".transformer.block." in key
            if not torch.equal(first[key], second[key])
        }

    assert changed(locked, again) == ({"3"} if line_here() is LINE_4 else {"2", "3"})
    assert changed(whole, again) == {"0", "1", "2", "3"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "extra", [[], pytest.param(["--torchscript"], marks=OF_3), ["--lock-image", "--lock-image-unlocked-groups", "5"]]
)
def test_at_open_clips_own_size(tmp_path, extra):
    train(tmp_path, "ViT-B-32", "--dga-steps", "2", "--workers", "2", *extra)
