"""Models and losses that are not open_clip's: one tower for two texts, adapters on frozen towers, LoRA, losses that learn."""

from __future__ import annotations

import open_clip
import torch
from open_clip.loss import ClipLoss
from torch import nn
from torch.nn.functional import normalize

from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import CONTEXT, VOCABULARY, bert_clip


class TextText(nn.Module):
    """One text tower for both sides; each side a tensor of tokens, or what `tokens` finds in it."""

    def __init__(self, tokens=lambda side: side, *, pair=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(12, 8)
        self.tokens, self.pair = tokens, pair
        if not pair:
            self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, side):
        return normalize(self.out(self.drop(self.embedding(self.tokens(side)))).mean(1), dim=-1)

    def forward(self, left, right):
        features = self.encode(left), self.encode(right)
        if self.pair:
            return features
        return {"image_features": features[0], "text_features": features[1], "logit_scale": self.scale.exp()}


def token_batches(sizes, wrap=lambda tokens: tokens):
    generator = torch.Generator().manual_seed(3)
    draw = lambda size: torch.randint(1, VOCABULARY, (size, CONTEXT), generator=generator)  # noqa: E731
    return [(wrap(draw(size)), wrap(draw(size))) for size in sizes]


def seeded(make):
    torch.manual_seed(0)
    return make().double().train()


# The method by which open_clip's forward runs the image tower: in open_clip 4 `_encode_image`, which `encode_image` calls.
ENCODE_IMAGE = "_encode_image" if hasattr(open_clip.CustomTextCLIP, "_encode_image") else "encode_image"


class WithAdapter(open_clip.CustomTextCLIP):
    """An adapter at the top level, behind an overridden method that runs the image tower."""


def _encode_with_adapter(self, image, normalize: bool = False):
    features = self.adapter(getattr(super(WithAdapter, self), ENCODE_IMAGE)(image))
    return nn.functional.normalize(features, dim=-1) if normalize else features


setattr(WithAdapter, ENCODE_IMAGE, _encode_with_adapter)


def adapter_in_encode_image():
    model = bert_clip()
    model.__class__ = WithAdapter
    model.visual.requires_grad_(False)
    model.adapter = nn.Linear(16, 16).double()
    return model


def adapter_in_a_hook():
    model = bert_clip()
    model.visual.requires_grad_(False)
    model.adapter = nn.Linear(16, 16).double()
    model.visual.register_forward_hook(lambda module, inputs, output: model.adapter(output))
    return model


class Projection(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, features):
        return features @ self.weight


def shared_projection():
    model = bert_clip()
    model.text.requires_grad_(False)
    model.text.proj = Projection(model.visual.proj)
    return model


class Metric(ContrastiveLoss):
    """InfoNCE on features that the loss itself projects, with a temperature of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.matrix = nn.Parameter(torch.eye(16, dtype=torch.float64) + 0.1)
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, image_features, text_features, logit_scale, output_dict=False):
        sides = (normalize(side @ self.matrix, dim=-1) for side in (image_features, text_features))
        return super().forward(*sides, logit_scale * self.log_scale.exp(), output_dict=output_dict)


def noisy(image_features, text_features, logit_scale, output_dict):
    """A loss that drops features at random."""
    sides = (normalize(nn.functional.dropout(side, 0.3), dim=-1) for side in (image_features, text_features))
    return ClipLoss()(*sides, logit_scale, output_dict=output_dict)


class LoRA(nn.Module):
    """The layer that peft puts in place of a linear one: the frozen layer, and a dropout and two thin matrices beside it."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Parameter(0.1 * torch.randn(rank, layer.in_features, dtype=layer.weight.dtype))
        self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, rank, dtype=layer.weight.dtype))

    def forward(self, inputs):
        return self.base_layer(inputs) + self.dropout(inputs) @ self.down.T @ self.up.T


def lora_on(towers):
    """`bert_clip` of which only low-rank matrices in `towers` ("text", "image") and the scale learn."""
    model = bert_clip()
    model.requires_grad_(False)
    model.logit_scale.requires_grad_(True)
    torch.manual_seed(0)
    if "text" in towers:
        for layer in model.text.transformer.encoder.layer:
            layer.attention.self.query = LoRA(layer.attention.self.query)
    if "image" in towers:
        for block in model.visual.transformer.resblocks:
            block.mlp.c_fc = LoRA(block.mlp.c_fc)
    return model
