"""Encoded pictures to RGB images and to uint8 tensors, as open_clip decodes and transforms them, but faster.

- `decode_image` decodes a JPEG at a half, a quarter or an eighth of its size, which skips most of the work. It does so only
  where every crop that the transform may draw still has at least as many pixels as it is resized to (`Crop.reduction`).
- `split_normalize` leaves the transform's last two steps (ToTensor, Normalize) to the device, so that the loader moves a
  quarter of the bytes.

    B  micro-batch      C, H, W  channels, rows and columns of an image
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from open_clip.transform import MaybeConvertMode
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import Compose, Normalize, RandomResizedCrop, ToTensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import BadPicture, as_shown, decoded, orientation_of

MIN_SIDE_PX = 2  # tracking pixels and placeholders of web pages have a side of one pixel
_SCALES = (8, 4, 2)  # libjpeg decodes at 1/8, 1/4 and 1/2


@dataclass(frozen=True)
class Crop:
    """A random resized crop.

    Attributes:
        width_px, height_px: size that a crop is resized to.
        min_area: smallest share of the image's area that a crop may have.
        ratio: smallest and largest width / height that a crop may have.
    """

    width_px: int
    height_px: int
    min_area: float
    ratio: tuple[float, float]

    def smallest(self, width_px: int, height_px: int) -> tuple[float, float]:
        """Lower bounds, in px, of the width and of the height of any crop of an image of this size."""
        low, high = self.ratio
        area = self.min_area * width_px * height_px
        # Where no drawn crop fits, torchvision takes the largest central one of an allowed ratio.
        width = min(width_px, math.sqrt(area * low), height_px * high)
        height = min(height_px, math.sqrt(area / high), width_px / low)
        return width - 1, height - 1  # sides are rounded, and a reduced image's sides once more

    def reduction(self, width_px: int, height_px: int) -> int:
        """The largest of 8, 4, 2, 1 by which an image may be reduced so that no crop of it has to be enlarged."""
        width, height = self.smallest(width_px, height_px)
        for scale in _SCALES:
            if width >= self.width_px * scale and height >= self.height_px * scale:
                return scale
        return 1


def crop_of(transform: Any) -> Crop | None:
    """The random resized crop that a training transform begins with, or None if it begins with something else."""
    steps = getattr(transform, "transforms", None) or [transform]
    step = next((step for step in steps if not isinstance(step, MaybeConvertMode)), None)
    if not isinstance(step, RandomResizedCrop | RandomResizedCropAndInterpolation):
        return None
    height, width = (step.size, step.size) if isinstance(step.size, int) else step.size
    return Crop(
        int(width),
        int(height),
        float(min(step.scale)),
        (float(min(step.ratio)), float(max(step.ratio))),
    )


def decode_image(data: bytes, crop: Crop | None = None) -> Image.Image:
    """The upright RGB image of encoded bytes, `pictures.as_shown`. An animation gives its first frame.

    Args:
        crop: the crop that follows; with it JPEGs may be decoded at a reduced size.

    Raises:
        BadPicture: the bytes cannot be decoded, or the image has a side of one pixel.
    """

    def use(image: Image.Image) -> Image.Image:
        width, height = image.size
        if min(width, height) < MIN_SIDE_PX:
            raise BadPicture("one-pixel image", f"has an image of {width} x {height} pixels")
        if crop is not None and image.format == "JPEG":
            lies = orientation_of(image) > 4  # on its side
            scale = crop.reduction(height, width) if lies else crop.reduction(width, height)
            if scale > 1:
                image.draft(None, (width // scale, height // scale))
        return as_shown(image)

    return decoded(data, use)


class ToBytes:
    """PIL image -> uint8 tensor (C, H, W) with channels last in memory; ToTensor without the division by 255."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        pixels = np.array(image)  # (H, W, C); a copy, since torch needs writable memory
        return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)


def split_normalize(transform: Any) -> tuple[Compose, tuple[float, ...], tuple[float, ...]]:
    """A training transform that yields uint8 tensors, and the normalisation that is left to the device.

    For the same random draws, `(new.float() / 255 - mean) / std` equals the old transform's image to 1e-6, where `new` is the
    new transform's image and mean and std have shape (C, 1, 1).

    Returns:
        (transform to (C, H, W) uint8, mean, std), both per channel for pixels in 0..1.

    Raises:
        UserError: the transform does not end in ToTensor and Normalize, as open_clip's do.
    """
    steps = list(getattr(transform, "transforms", ()))
    if (
        len(steps) < 2
        or not isinstance(steps[-2], ToTensor)
        or not isinstance(steps[-1], Normalize)
    ):
        names = ", ".join(type(step).__name__ for step in steps[-2:]) or type(transform).__name__
        raise UserError(
            f"normalisation on the device needs a transform that ends in ToTensor and Normalize, and this one ends in {names}"
        )
    normalize = steps[-1]
    return Compose([*steps[:-2], ToBytes()]), _floats(normalize.mean), _floats(normalize.std)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def normalize(
    images: torch.Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """uint8 images (B, C, H, W) -> normalised images in `dtype`, contiguous, on the same device.

    Args:
        mean, std: (C,), for pixels in 0..1.
    """
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)
    pixels = images.to(torch.float32, memory_format=torch.contiguous_format)
    return torch.addcmul(shift, pixels, scale).to(dtype)


@functools.lru_cache(maxsize=8)
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, 1, 1) each; cached for each device, because copying numbers to a GPU makes the host wait."""
    scale = torch.tensor([1 / (255 * value) for value in std], device=device).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(
        -1, 1, 1
    )
    return scale, shift


def batch_layout(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """A meta tensor (B, C, H, W) with the type and memory layout of the batch of these images (C, H, W).

    Raises:
        ValueError: images of different shapes.
    """
    first = images[0]
    other = next((image for image in images if image.shape != first.shape), None)
    if other is not None:
        raise ValueError(
            f"the transform made images of {tuple(first.shape)} and {tuple(other.shape)}; they must be alike"
        )
    # ToBytes yields channels-last images; changing their layout here would cost ten times the copy.
    interleaved = first.ndim == 3 and first.shape[0] > 1 and first.stride(0) == 1
    return torch.empty(
        (len(images), *first.shape),
        dtype=first.dtype,
        memory_format=torch.channels_last if interleaved else torch.contiguous_format,
        device="meta",
    )


def collate_images(
    images: Sequence[torch.Tensor], batch: torch.Tensor | None = None
) -> torch.Tensor:
    """Images (C, H, W) as one tensor (B, C, H, W) in their own memory layout; each is copied once.

    Args:
        batch: the tensor to copy into, as `batch_layout` describes; None makes one.

    Raises:
        ValueError: images of different shapes.
    """
    if batch is None:
        batch = torch.empty_like(batch_layout(images), device=images[0].device)
    for row, image in zip(batch, images, strict=True):
        row.copy_(image)
    return batch
