"""Models and losses that are not open_clip's: one tower for two texts, adapters on frozen towers, losses that learn."""

from __future__ import annotations

import random
from collections import namedtuple
from functools import partial

import numpy as np
import open_clip
import torch
from open_clip.loss import ClipLoss
from torch import nn
from torch.nn.functional import normalize
from transformers import BatchEncoding

from open_clip_zerovl.checkpoints.weights import is_adapter
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.towers import add_lora
from support.dga_reference import CONTEXT, FEATURES, VOCABULARY, batches, bert_clip, vit
from support.tiny_coca import padded_batches, tiny_coca


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
        return {
            "image_features": features[0],
            "text_features": features[1],
            "logit_scale": self.scale.exp(),
        }


def token_batches(sizes, wrap=lambda tokens: tokens):
    generator = torch.Generator().manual_seed(3)
    draw = lambda size: torch.randint(1, VOCABULARY, (size, CONTEXT), generator=generator)  # noqa: E731
    return [(wrap(draw(size)), wrap(draw(size))) for size in sizes]


def seeded(make):
    torch.manual_seed(0)
    return make().double().train()


# The method by which open_clip's forward runs the image tower: in open_clip 4 `_encode_image`, which `encode_image` calls.
ENCODE_IMAGE = (
    "_encode_image" if hasattr(open_clip.CustomTextCLIP, "_encode_image") else "encode_image"
)


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
    """Compute a loss that drops features at random."""
    sides = (
        normalize(nn.functional.dropout(side, 0.3), dim=-1)
        for side in (image_features, text_features)
    )
    return ClipLoss()(*sides, logit_scale, output_dict=output_dict)


def tokens_and_experts(outputs, inputs, _, weights):
    """Return a mean over counted entries with a dropout of its own, one of weighed samples, and a sum alone with the scale."""
    images, texts = outputs["image_features"], outputs["text_features"]
    noisy_images = nn.functional.dropout(images, 0.3)
    if isinstance(inputs, torch.Tensor):
        weights = weights * inputs.double().flatten(1).mean(1).sin()
    return {
        "tokens": (0.3 * (noisy_images.pow(3) * (images > 0)).sum(), (images > 0).sum()),
        "weighed": ((images[:, 0] * texts[:, 1] * weights).sum(), weights.detach().square().sum()),
        "sum": 0.1 * texts.pow(3).sum() * outputs.get("logit_scale", torch.ones(())).sum(),
    }


class Own(nn.Module):
    """Towers that are not open_clip's, with dropout and a temperature of shape (1,)."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(3 * 32 * 32, 8))
        self.text = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.2))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image, text):
        return {
            "image_features": normalize(self.image(image), dim=-1),
            "text_features": normalize(self.text(text).mean(1), dim=-1),
            "logit_scale": self.scale.exp(),
        }


class ForeignNoise(Own):
    """Random numbers of Python and NumPy."""

    def forward(self, image, text):
        return super().forward(image * (1 + random.random() + float(np.random.rand())), text)


class Tied(nn.Module):
    """One table of tokens for both sides, one of which is frozen but for it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = TextText(), TextText()
        self.right.embedding.weight = self.left.embedding.weight
        self.right.out.requires_grad_(False)

    def forward(self, left, right):
        return self.left.encode(left), self.right.encode(right)


class ImageImage(nn.Module):
    """One tower with batch norm for both sides."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 8, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8),
            nn.BatchNorm1d(8, momentum=None),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, left, right):
        sides = (normalize(self.body(side), dim=-1) for side in (left, right))
        return dict(zip(FEATURES, sides, strict=True), logit_scale=self.scale.exp())


def image_batches(sizes):
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(2, n, 3, 32, 32, generator=generator, dtype=torch.float64)) for n in sizes
    ]


def stock_clip(kind=open_clip.CLIP, *, vision=None, **text):
    """Build open_clip's own towers."""
    sizes = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 32, "heads": 2}
    sizes |= {"layers": 1, **text}
    return seeded(lambda: kind(16, vit() | (vision or {}), sizes, output_dict=True))


class Adapter(nn.Module):
    """A module around a model, as a user writes it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, texts):
        return self.model(images, texts)


class WithSecondView(Adapter):
    """A CLIP that also returns another feature of each image and of each text."""

    def forward(self, images, texts):
        outputs = self.model(images, texts)
        view, words = (outputs[name].roll(1, dims=1) * 2 for name in FEATURES)
        return {**outputs, "view": view, "words": words.sin()}


def cross(_, inputs, outputs):
    """Let image features depend on the texts of their rows."""
    mixed = outputs["image_features"] + 0.3 * outputs["text_features"]
    return outputs | {"image_features": normalize(mixed, dim=-1)}


class Crossing(open_clip.CustomTextCLIP):
    """A model with a forward of its own, which needs both inputs."""

    def forward(self, image, text):
        return cross(self, None, super().forward(image, text))


def crossing(by_hook):
    model = bert_clip()
    model.visual.requires_grad_(False)
    if by_hook:
        model.register_forward_hook(cross)
    else:
        model.__class__ = Crossing
    return model


def with_frozen(part, make=bert_clip):
    """Freeze a module or parameter of that name."""
    model = make()
    (dict(model.named_modules()) | dict(model.named_parameters()))[part].requires_grad_(False)
    return model


def with_checkpointing():
    model = bert_clip()
    model.set_grad_checkpointing()
    return model


def with_lora():
    """Add adapters to both towers, whose factors both differ from zero."""
    model = bert_clip()
    # open_clip 4's own towers keep the weights of attention outside of layers
    add_lora(model, 2, "both" if ENCODE_IMAGE == "encode_image" else "text")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if is_adapter(name):
            generator = torch.Generator().manual_seed(number)
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def norm_in_eval():
    model = seeded(ImageImage)
    model.body[1].eval()
    return model


# The scale of a loss for models that return a pair of features.
FIXED_SCALE = {"logit_scale": torch.tensor(9.0)}
Tokens = namedtuple("Tokens", "ids mask")


def masked(ids):
    return {"input_ids": ids, "attention_mask": (ids > 9).long()}


# How a side's tokens may be given: (the tower's way to them, their form).
FORMS = {
    "tensor": (lambda side: side, lambda ids: ids),
    "dict": (lambda side: side["input_ids"] * side["attention_mask"], masked),
    "BatchEncoding": (
        lambda side: side.input_ids * side["attention_mask"],
        lambda ids: BatchEncoding(masked(ids)),
    ),
    "tuple": (lambda side: side[0] * side[1], lambda ids: (ids, (ids > 9).long())),
    "named tuple": (lambda side: side.ids * side.mask, lambda ids: Tokens(ids, (ids > 9).long())),
    "nested": (lambda side: side["tokens"][0], lambda ids: {"tokens": [ids]}),
}


def text_text(form, pair):
    tokens, wrap = FORMS[form]
    return lambda: seeded(lambda: TextText(tokens, pair=pair)), lambda sizes: token_batches(
        sizes, wrap
    )


# name -> (makes the model, makes micro-batches of these sizes)
MODELS = {
    "ViT and BERT": (bert_clip, batches),
    "with a bias": (partial(bert_clip, bias=True), batches),
    "checkpointing": (with_checkpointing, batches),
    "open_clip.CLIP": (stock_clip, batches),
    "not open_clip's": (lambda: seeded(Own), batches),
    "noise of Python and NumPy": (lambda: seeded(ForeignNoise), batches),
    **{
        f"frozen {part}": (partial(with_frozen, part), batches)
        for part in ("visual", "text", "text.proj", "logit_scale")
    },
    "LoRA": (with_lora, batches),
    "a second view": (lambda: WithSecondView(bert_clip()), batches),
    "CoCa": (tiny_coca, padded_batches),
    "crossing": (partial(crossing, False), batches),
    "crossing in a hook": (partial(crossing, True), batches),
    "adapter in encode_image": (adapter_in_encode_image, batches),
    "adapter in a hook": (adapter_in_a_hook, batches),
    "shared projection": (shared_projection, batches),
    "tied embeddings": (lambda: seeded(Tied), token_batches),
    "two images": (lambda: seeded(ImageImage), image_batches),
    "two images, norm in eval": (norm_in_eval, image_batches),
    **{f"two texts, {form}": text_text(form, False) for form in FORMS},
    "two texts, a pair": text_text("tensor", True),
}


def loss_for(model, loss):
    """Make the loss, with a scale of its own if the model has none."""
    return (
        partial(loss, **FIXED_SCALE)
        if isinstance(model, Tied) or getattr(model, "pair", False)
        else loss
    )
