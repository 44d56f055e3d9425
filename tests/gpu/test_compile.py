"""On a GPU: a compiled model's step draws the same masks in both passes, and compiles nothing after its first step."""

from __future__ import annotations

import pytest
import torch
from open_clip.loss import ClipLoss
from torch._dynamo.utils import counters

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import TOLERANCE, batches, bert_clip, error, gradients, one_graph

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_compiled(device, to_device):
    torch._dynamo.reset()
    model, micro_batches = (
        torch.compile(bert_clip(torch.float32).to(device)),
        batches([4, 4, 4], torch.float32),
    )
    dga = DecoupledGradientAccumulation(
        model, ContrastiveLoss(chunk_size=5), check="always", retain=1
    )
    torch.manual_seed(5)
    dga.backward(micro_batches)
    found = gradients(model)
    torch.manual_seed(5)
    _, wanted = one_graph(
        model, ClipLoss(), micro_batches, prepare=to_device
    )  # compiled too: eager masks differ
    assert error(found, wanted) <= TOLERANCE[torch.float32]
    graphs = counters["stats"]["unique_graphs"]
    for seed in range(3):
        torch.manual_seed(seed)
        dga.backward(micro_batches)
    assert counters["stats"]["unique_graphs"] == graphs
