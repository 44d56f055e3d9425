"""Features of a frozen image tower before its projection, for the linear probe (section 5.3, A.7): computed, and cached.

Legend: `N` images of a set, `b` images of one micro-batch, `F` width of the features.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import save_atomically
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.labelled import ProbeSet
from open_clip_zerovl.data.workers import ItemSet, read_batches

PART_SAMPLES = 8192  # images per cache file: an interrupted call loses at most the features of so many

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class TowerSettings:
    """How the frozen tower is run over images.

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


class _TimmFeatures(nn.Module):
    """A timm trunk up to its pooled, normalised features, without its classifier (which some towers use as projection)."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, images: Tensor) -> Tensor:
        return self.trunk.forward_head(self.trunk.forward_features(images), pre_logits=True)


class _FirstOutput(nn.Module):
    """The pooled output of a tower that also returns its tokens (CoCa)."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, images: Tensor) -> Tensor:
        output = self.tower(images)
        return output[0] if isinstance(output, tuple) else output


def tower_before_projection(visual: nn.Module) -> nn.Module:
    """The image tower without its projection: images (b, 3, H, W) -> features (b, F). It shares the weights of `visual`.

    Args:
        visual: `model.visual` of an open_clip model: a timm tower, open_clip's own ViT (CoCa's too), or CLIP's ResNet. Of a
            ResNet's attention pool only the output projection is left out.

    Raises:
        UserError: another kind of tower; a timm tower whose attention pool ends in a projection of its own.
    """
    kind = type(visual).__name__
    if kind == "TimmModel":
        if hasattr(visual.head, "pool"):
            raise UserError(
                "this timm tower pools by attention into the shared space, so that it has no features before the "
                "projection; probe a tower with timm_pool token, avg or map"
            )
        return _TimmFeatures(visual.trunk)
    if kind == "VisionTransformer":
        # A shallow copy: the given model keeps its projection.
        tower = copy.copy(visual)
        tower._parameters = {**visual._parameters, "proj": None}
        return _FirstOutput(tower)
    if kind == "ModifiedResNet":
        tower = copy.copy(visual)
        pool = copy.copy(visual.attnpool)
        width = pool.c_proj.in_features
        identity = nn.Linear(width, width).to(pool.c_proj.weight)
        with torch.no_grad():
            identity.weight.copy_(torch.eye(width))
            identity.bias.zero_()
        pool._modules = {**pool._modules, "c_proj": identity}
        tower._modules = {**visual._modules, "attnpool": pool}
        return tower
    raise UserError(f"a linear probe knows timm towers, open_clip's ViT and CLIP's ResNets, and this tower is a {kind}")


class TransformedSet(ItemSet):
    """Transformed images with their class index.

    Args:
        transform: image -> (3, H, W); what it draws for image i depends on (seed, epoch, i) alone.
        targets: (N,) class index of each image.
        seed: (seed, epoch) of the draws; None for a transform that draws nothing.
    """

    def __init__(
        self, images: ProbeSet, transform: Transform, targets: Sequence[int], seed: tuple[int, int] | None
    ) -> None:
        self.images, self.transform, self.targets, self.seed = images, transform, targets, seed

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> tuple[Tensor, int]:
        """(transformed image, class index). UserError where the image cannot be read."""
        image = self.images.image(index)
        if self.seed is None:
            return self.transform(image), self.targets[index]
        with torch.random.fork_rng(devices=[]):
            seed, epoch = self.seed
            torch.default_generator.manual_seed(stream_seed(seed, Purpose.PROBE_IMAGE, epoch, index))
            return self.transform(image), self.targets[index]


def _collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in items]), torch.tensor([target for _, target in items])


def class_indices(images: ProbeSet, classes: Sequence[str]) -> list[int]:
    """(N,) index in `classes` of each image's class."""
    index_of = {label: i for i, label in enumerate(classes)}
    return [index_of[label] for label in images.labels]


def tower_features(
    tower: nn.Module, data: TransformedSet, batches: Sequence[Sequence[int]], settings: TowerSettings
) -> Iterator[tuple[Tensor, Tensor]]:
    """(features (b, F) float32, targets (b,)) of each micro-batch, both on the device.

    Args:
        tower: images (b, 3, H, W) -> features (b, F), in eval mode on the device.
        batches: the indices of the images of each micro-batch.

    Raises:
        UserError: an image that cannot be read.
    """
    device = torch.device(settings.device)
    for images, targets in read_batches(data, _collate, batch_sampler=batches, num_workers=settings.workers):
        context = torch.autocast(device.type, torch.bfloat16) if settings.amp else nullcontext()
        with torch.no_grad(), context:
            features = tower(images.to(device))
        yield features.float(), targets.to(device)


def cached_features(
    tower: nn.Module,
    images: ProbeSet,
    transform: Transform,
    classes: Sequence[str],
    folder: Path,
    settings: TowerSettings | None = None,
    *,
    name: str = "features",
) -> tuple[Tensor, Tensor]:
    """Features (N, F) and class indices (N,) of a set, on the CPU; computed once and kept in `folder`.

    The cache is written in parts of 8192 images, each whole or not there. Its folder's name is a hash of the tower's weights,
    the set, the transform and the precision. A call after an interruption computes the missing parts.

    Args:
        tower: see `tower_features`.
        classes: the names of the classes in the order of their indices.
        name: of the set, for the folder and the progress bar.

    Raises:
        UserError: an image that cannot be read.
    """
    settings = settings or TowerSettings()
    targets = class_indices(images, classes)
    parts_of = [tower_fingerprint(tower), images.fingerprint(), transform_fingerprint(transform), settings.amp]
    key = hashlib.sha256(json.dumps(parts_of).encode()).hexdigest()[:16]
    folder = Path(folder) / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    data = TransformedSet(images, transform, targets, None)
    parts = []
    with tqdm(total=len(images), desc=f"{name} features", unit="images") as bar:
        for start in range(0, len(images), PART_SAMPLES):
            part = range(start, min(start + PART_SAMPLES, len(images)))
            file = folder / f"{start // PART_SAMPLES:05d}.pt"
            if not file.is_file():
                size = settings.micro_batch
                batches = [part[low : low + size] for low in range(0, len(part), size)]
                done = []
                for features, _ in tower_features(tower, data, batches, settings):
                    done.append(features.cpu())
                    bar.update(len(features))
                save_atomically(torch.cat(done), file)
            else:
                bar.update(len(part))
            parts.append(torch.load(file, weights_only=True))
    return torch.cat(parts), torch.tensor(targets)


def tower_fingerprint(tower: nn.Module) -> str:
    """A hash of the tower's layers, and of the names and values of all its tensors."""
    digest = hashlib.sha256(
        transform_fingerprint(tower).encode()
    )  # layers without tensors differ, too: GELU, QuickGELU
    for name, tensor in sorted(tower.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def transform_fingerprint(transform: Transform | nn.Module) -> str:
    """The `repr` of a transform or a tower, without the memory addresses of functions in it."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(transform))
