"""DDP's buckets get their final layout before the first step, compiled or not."""

import pytest
import torch
from torch import nn

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
