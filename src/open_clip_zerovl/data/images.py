"""Encoded pictures to RGB images and to uint8 tensors, as open_clip decodes and transforms them, but faster.

- `decode_image` decodes a JPEG at a half, a quarter or an eighth of its size, which skips most of the work. It does so only
  where every crop that the transform may draw still has at least as many pixels as it is resized to (`Crop.reduction`).
- `split_normalize` leaves the transform's last two steps (ToTensor, Normalize) to the device, so that the loader moves a
  quarter of the bytes.

- `with_auto_augment` and `image_transform_train` augment as the paper does (sections 2.2 and A.9): training crops 60-100 % of
  the area and applies AutoAugment's ImageNet policy to the crop. Draws come from torch's default generator, as in torchvision;
  the data pipeline seeds it for each sample (`randomness.reseed`).

    B  micro-batch      C, H, W  channels, rows and columns of an image
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from open_clip.transform import MaybeConvertMode
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import (
    AutoAugment,
    AutoAugmentPolicy,
    CenterCrop,
    Compose,
    InterpolationMode,
    Normalize,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import AUTO_AUGMENTS
from open_clip_zerovl.models.configs import IMAGENET_MEAN, IMAGENET_STD
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
        """Return lower bounds, in px, of the width and of the height of any crop of an image of this size."""
        low, high = self.ratio
        area = self.min_area * width_px * height_px
        # Where no drawn crop fits, torchvision takes the largest central one of an allowed ratio.
        width = min(width_px, math.sqrt(area * low), height_px * high)
        height = min(height_px, math.sqrt(area / high), width_px / low)
        return width - 1, height - 1  # sides are rounded, and a reduced image's sides once more

    def reduction(self, width_px: int, height_px: int) -> int:
        """Return the largest of 8, 4, 2, 1 by which an image may be reduced so that no crop of it has to be enlarged."""
        width, height = self.smallest(width_px, height_px)
        for scale in _SCALES:
            if width >= self.width_px * scale and height >= self.height_px * scale:
                return scale
        return 1


def crop_of(transform: Any) -> Crop | None:
    """Return the random resized crop that a training transform begins with, None if it begins with something else."""
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
    """Decode the upright RGB image of encoded bytes, `pictures.as_shown`. An animation gives its first frame.

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
    """PIL image -> uint8 tensor (C, H, W) with channels last in memory, as ToTensor without the division by 255."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        pixels = np.array(image)  # (H, W, C); a copy, since torch needs writable memory
        return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)


def split_normalize(transform: Any) -> tuple[Compose, tuple[float, ...], tuple[float, ...]]:
    """Split a training transform into one that yields uint8 tensors, and the normalisation that is left to the device.

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
    """Normalise uint8 images (B, C, H, W) on their device, contiguous, in `dtype`.

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
    """Make (C, 1, 1) each, once a device, because copying numbers to a GPU makes the host wait."""
    scale = torch.tensor([1 / (255 * value) for value in std], device=device).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(
        -1, 1, 1
    )
    return scale, shift


def batch_layout(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a meta tensor (B, C, H, W) with the type and memory layout of the batch of these images (C, H, W).

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
    """Copy images (C, H, W), each once, into one tensor (B, C, H, W) in their own memory layout.

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


# ---------------------------------------------------------------------------------------------------------------------
# The paper's transforms
# ---------------------------------------------------------------------------------------------------------------------

AUTO_AUGMENT_POLICIES = {name: AutoAugmentPolicy(name) for name in AUTO_AUGMENTS}

Transform = Callable[[Image.Image], torch.Tensor]


def with_auto_augment(transform: Compose, policy: str = "imagenet") -> Compose:
    """Put AutoAugment into open_clip's training transform right after its random crop, on the cropped RGB image.

    Args:
        transform: the second value of `create_model_and_transforms`, with or without `--aug-cfg`.
        policy: of AUTO_AUGMENT_POLICIES.

    Raises:
        UserError: a transform without a random resized crop.
    """
    augment = _auto_augment(policy)
    steps = list(getattr(transform, "transforms", ()))
    crops = [
        index
        for index, step in enumerate(steps)
        if isinstance(step, RandomResizedCrop | RandomResizedCropAndInterpolation)
    ]
    if len(crops) != 1:
        raise UserError(
            "AutoAugment goes after the random resized crop of the training transform, and this one has "
            f"{len(crops) or 'none'} ({', '.join(type(step).__name__ for step in steps) or type(transform).__name__}); "
            "use open_clip's own training transform."
        )
    after = crops[0] + 1
    if after < len(steps) and isinstance(steps[after], MaybeConvertMode):
        after += 1  # AutoAugment takes RGB images
    return Compose([*steps[:after], augment, *steps[after:]])


def image_transform_train(
    size_px: int,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    *,
    area: tuple[float, float] = (0.6, 1.0),
    auto_augment: str | None = None,
) -> Compose:
    """Make the paper's training transform (A.9): random resized crop, AutoAugment, normalisation (PIL image -> (3, S, S)).

    It resizes bilinearly, as the released code does; open_clip's own transform is bicubic.

    Args:
        size_px: side S of the resulting square.
        area: smallest and largest share of the image's area that a crop has.
        auto_augment: a policy of AUTO_AUGMENT_POLICIES.
    """
    crop = RandomResizedCrop(size_px, scale=area, interpolation=InterpolationMode.BILINEAR)
    augment = [_auto_augment(auto_augment)] if auto_augment is not None else []
    return Compose([crop, MaybeConvertMode(), *augment, ToTensor(), Normalize(mean, std)])


def paper_eval_transform(
    size_px: int, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> Compose:
    """Make the paper's evaluation transform: squash to 256 x 256, crop the middle 224 x 224 (both scaled to `size_px`).

    The side before the crop is `size_px * 256 / 224`, rounded. open_clip's `preprocess_cfg` cannot express this transform, so
    a checkpoint's own transform, which CLIP_benchmark applies too, differs from it.

    Args:
        size_px: side S of the resulting square; PIL image -> (3, S, S).
    """
    side = round(size_px * 256 / 224)
    resize = Resize((side, side), interpolation=InterpolationMode.BILINEAR)
    return Compose(
        [MaybeConvertMode(), resize, CenterCrop(size_px), ToTensor(), Normalize(mean, std)]
    )


def paper_transform_of(visual: Any) -> Compose:
    """Make the paper's evaluation transform (A.9) at the size, mean and deviation of an image tower (`model.visual`)."""
    config = visual.preprocess_cfg
    side = config["size"] if isinstance(config["size"], int) else config["size"][0]
    return paper_eval_transform(side, config["mean"], config["std"])


def _auto_augment(policy: str) -> AutoAugment:
    return AutoAugment(AUTO_AUGMENT_POLICIES[policy])
