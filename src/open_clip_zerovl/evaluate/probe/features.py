"""Features of a frozen image tower before its projection, for the linear probe (section 5.3, A.7): computed, and cached.

Legend: `N` images of a set, `b` images of one micro-batch, `F` width of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.indexed import IndexedSet, picture_batches
from open_clip_zerovl.embeddings.encoder import FrozenModel, autocast, split_transform
from open_clip_zerovl.embeddings.fingerprint import module_digest
from open_clip_zerovl.evaluate.accuracy import class_indices
from open_clip_zerovl.evaluate.embedded import picture_features

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class TowerSettings:
    """Batches, device and precision of the frozen tower.

    Attributes:
        micro_batch: images in the tower at once.
        workers: loader processes; 0 reads in this one.
        device: where the tower lies.
        amp: run the tower in bf16.
    """

    micro_batch: int = 256
    workers: int = 0
    device: str | torch.device = "cpu"
    amp: bool = False


def tower_features(
    tower: nn.Module,
    images: IndexedSet,
    transform: Transform,
    batches: Sequence[Sequence[int]],
    settings: TowerSettings,
    seed: tuple[int, int],
) -> Iterator[tuple[Tensor, list[int]]]:
    """(features (b, F) float32 on the device, indices (b,)) of each micro-batch.

    Args:
        tower: images (b, 3, H, W) -> features (b, F), in eval mode on the device.
        transform: image -> (3, H, W); its random numbers for image i depend on (seed, epoch, i) alone.
        batches: the indices of the images of each micro-batch.
        seed: (seed, epoch) of the draws.

    Raises:
        UserError: an image that cannot be read.
    """
    model = _frozen(tower, settings)
    for pixels, rows in picture_batches(
        images,
        transform,
        seed_of=lambda index: stream_seed(seed[0], Purpose.PROBE_IMAGE, seed[1], index),
        batch_sampler=batches,
        num_workers=settings.workers,
    ):
        yield model.images(pixels), rows


def _frozen(tower: nn.Module, settings: TowerSettings) -> FrozenModel:
    device = torch.device(settings.device)
    return FrozenModel(
        "probed", tower, device=device, context=autocast(device, settings.amp), unit_length=False
    )


def cached_features(
    tower: nn.Module,
    images: IndexedSet,
    transform: Transform,
    classes: Sequence[str],
    folder: Path,
    settings: TowerSettings | None = None,
    *,
    name: str = "features",
) -> tuple[Tensor, Tensor]:
    """Features (N, F) and class indices (N,) of a set, on the CPU; computed once and kept in `folder` (`embeddings.store`).

    The name of the cache's folder has a hash of the tower's weights, the set, the transform and the precision. A call after an
    interruption computes the missing features.

    Args:
        tower: see `tower_features`.
        classes: the names of the classes in the order of their indices.
        name: the name of the set, for the folder and the progress bar.

    Raises:
        UserError: an image that cannot be read, features that are not finite.
    """
    settings = settings or TowerSettings()
    model = _frozen(tower, settings)
    model.picture_transform, model.mean, model.std = split_transform(transform)
    model.fingerprints = {"image": tower_digest_of(tower, transform, settings)}
    features = picture_features(
        model, images, folder, batch_size=settings.micro_batch, workers=settings.workers, name=name
    )
    return features, class_indices(images.labels, classes)


def tower_digest_of(tower: nn.Module, transform: Transform, settings: TowerSettings) -> str:
    """A digest of a tower, of the transform of its images and of the precision in which it runs."""
    return module_digest(tower, inputs=transform, precision="amp_bf16" if settings.amp else "fp32")
