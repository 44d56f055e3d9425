"""A teacher: a frozen model on its device, pictures and captions to embeddings.

`b` pictures or captions at once, `S` side of the teacher's own pictures, `D` width of its embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.data.images import normalize, split_normalize
from open_clip_zerovl.recipe.frozen_cache import fingerprint


@dataclass
class Teacher:
    """A frozen model on its device.

    Attributes:
        eye: PIL image -> (3, S, S) uint8, the teacher's own size; normalisation is left to `images`.
        mean, std: of its pixels in 0..1.
        description: of the manifest.
    """

    network: nn.Module
    tokenizer: Callable[[list[str]], Tensor]
    device: torch.device
    eye: Callable[[Image.Image], Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    amp: bool
    description: dict[str, Any]

    @classmethod
    def load(cls, encoder: Encoder, *, amp: bool = False) -> Teacher:
        """UserError where the model cannot be loaded, or its preprocessing is not of open_clip's kind."""
        network, preprocess, tokenizer, device = encoder.load()
        eye, mean, std = split_normalize(preprocess)
        inputs = {"image": preprocess, "text": tokenizer}
        precision = "amp_bf16" if amp else "fp32"
        digests = [fingerprint(network, tower, (), inputs=inputs[tower], precision=precision) for tower in inputs]
        teacher = cls(network, tokenizer, device, eye, mean, std, amp, {})
        width = teacher.texts(["a"]).shape[1]
        teacher.description = {"model": str(encoder.model), "width": width, "fingerprint": "-".join(digests)}
        return teacher

    @torch.inference_mode()
    def images(self, pixels: Tensor) -> Tensor:
        """(b, 3, S, S) uint8 to embeddings (b, D) of unit length, fp32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            found = self.network.encode_image(normalize(pixels.to(self.device), self.mean, self.std))
        return F.normalize(found.float(), dim=-1)

    @torch.inference_mode()
    def texts(self, captions: list[str]) -> Tensor:
        """Captions to embeddings (b, D) of unit length, fp32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            found = self.network.encode_text(self.tokenizer(captions).to(self.device))
        return F.normalize(found.float(), dim=-1)

    def seconds_of(self, pictures: int) -> tuple[float, float]:
        """Seconds that so many views and so many captions at once take, measured on made-up ones."""
        side = self.eye(Image.new("RGB", (32, 32))).shape[1:]
        pixels, captions = torch.zeros((pictures, 3, *side), dtype=torch.uint8), ["a photo of a dog"] * pictures
        self.images(pixels).cpu()
        self.texts(captions).cpu()
        begin = time.perf_counter()
        self.images(pixels).cpu()
        middle = time.perf_counter()
        self.texts(captions).cpu()
        return middle - begin, time.perf_counter() - middle
