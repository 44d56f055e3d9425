"""Labelled pictures of three colours, and a tower whose features are their mean colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from open_clip_zerovl.core.files import digest_of
from open_clip_zerovl.data.sets import IndexedSet, Picture

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@dataclass(frozen=True)
class Drawn(IndexedSet):
    """Pictures that a function makes."""

    read: Callable[[int], Image.Image] | None = None

    def image(self, index: int) -> Image.Image:
        return self.read(index)

    def contents(self) -> list[str]:
        return [digest_of(self.path, number) for number in range(len(self))]


def colour_set(count: int, *, seed: int = 0) -> Drawn:
    """Make noisy pictures of three colours, whose mean separates the classes."""
    rng = np.random.default_rng(seed)
    labels = [list(COLOURS)[i % 3] for i in range(count)]
    pictures = []
    for label in labels:
        pixels = np.array(COLOURS[label]) + rng.integers(-30, 31, size=(40, 40, 3))
        pictures.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    samples = [Picture("", "", label=label) for label in labels]
    return Drawn(f"colours-{seed}", samples, read=pictures.__getitem__)


class MeanColour(nn.Module):
    """A frozen tower whose features are the three mean colours."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))


def write_folder(root: Path, images: IndexedSet) -> Path:
    for i, label in enumerate(images.labels):
        (root / label).mkdir(parents=True, exist_ok=True)
        images.image(i).save(root / label / f"{i:03d}.png")
    return root
