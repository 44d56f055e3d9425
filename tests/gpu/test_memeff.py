"""On a GPU: memeff's kernels as the loss of a decoupled step."""

from __future__ import annotations

import pytest
import torch
from open_clip.loss import ClipLoss

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from support.dga_reference import batches, bert_clip, error, gradients, one_graph

pytestmark = pytest.mark.gpu


def test_memeffs_kernels(device, to_device):
    memeff = pytest.importorskip("memeff")
    if device.type != "cuda":
        pytest.skip("its kernels need a CUDA device")
    kernels = memeff.MemoryEfficientCLIPLoss(temperature=0.05, stable=False)
    model = bert_clip(torch.float32).to(device)
    model.logit_scale.requires_grad_(False)
    micro_batches = batches([64, 64], torch.float32)

    def dense(image_features, text_features, logit_scale, output_dict):
        return ClipLoss()(image_features, text_features, 20.0, output_dict=True)

    torch.manual_seed(0)
    _, wanted = one_graph(model, dense, micro_batches, prepare=to_device)
    torch.manual_seed(0)
    step = DecoupledGradientAccumulation(
        model, lambda image_features, text_features, **_: kernels(image_features, text_features)
    )
    step.backward(micro_batches)
    assert error(gradients(model), wanted) <= 1e-2  # its products may run in TF32
