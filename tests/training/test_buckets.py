"""DDP's buckets get their final layout before the first step, compiled or not, in whichever epoch that is."""

import pytest
import torch
from torch import nn

from support.programs import COMMON
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, register
from training import train
from training.main import main
from training.train import settle_buckets


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return {
            "image_features": self.norm(self.image(image)),
            "text_features": self.text(text),
            "logit_scale": self.logit_scale.exp(),
        }


@pytest.mark.parametrize("compiled", [False, True])
def test_the_layout_is_ready_before_the_first_step(compiled, one_rank):
    model = nn.parallel.DistributedDataParallel(Towers())
    statistics = model.module.norm.running_mean.clone()
    called = torch.compile(model, backend="eager") if compiled else model
    assert not model.reducer._rebuild_buckets()  # no backward pass has shown the order of gradients
    settle_buckets(
        called, (torch.randn(2, 4), torch.randn(2, 4)), lambda *inputs: inputs, torch.enable_grad
    )
    assert model.reducer._rebuild_buckets()  # in the next forward pass, the first that counts
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.module.norm.running_mean, statistics)


def test_a_run_that_goes_on_from_an_epochs_last_step_settles_and_keeps_what_auto_decided(
    tmp_path, monkeypatch
):
    """Nothing of the epoch is left, and its checkpoint comes before any step."""
    settled = []
    monkeypatch.setattr(train, "settle_buckets", lambda *_: settled.append(1))
    monkeypatch.chdir(tmp_path)
    register(tmp_path / "configs", "tiny", NATIVE_VISION, CLIP_TEXT)
    words = f"""--train-data a={write_source(tmp_path / "a", 0, 16, 16)} --batch-size 2 --dga-steps 4 --dga-retain auto --name x
    --workers 0 --save-every-steps 1 --keep-checkpoints 9"""
    assert main([*COMMON, *words.split(), "--epochs", "1"]) == 0
    saved = tmp_path / "logs" / "x" / "checkpoints"
    before = torch.load(saved / "epoch_1.pt", weights_only=True)["zerovl"]
    (saved / "epoch_1.pt").unlink()
    assert main([*COMMON, *words.split(), "--epochs", "2", "--resume", "latest"]) == 0
    assert len(settled) == 2 and before["retained"]
    assert torch.load(saved / "epoch_1.pt", weights_only=True)["zerovl"] == before
