"""Image transforms (sections 2.2 and A.9): AutoAugment in training, and the paper's evaluation transform.

Training crops 60-100 % of the area and applies AutoAugment's ImageNet policy to the crop. Draws come from torch's default
generator, as in torchvision; the data pipeline seeds it for each sample (`randomness.reseed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

AUTO_AUGMENT_POLICIES = {name: AutoAugmentPolicy(name) for name in AUTO_AUGMENTS}

Transform = Callable[[Image.Image], torch.Tensor]


def with_auto_augment(transform: Compose, policy: str = "imagenet") -> Compose:
    """open_clip's training transform with AutoAugment right after its random crop, on the cropped RGB image.

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
    """The paper's training transform (A.9): random resized crop, AutoAugment, normalisation; PIL image -> (3, S, S).

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
    """The paper's evaluation transform: squash to 256 x 256, crop the middle 224 x 224 (both scaled to `size_px`).

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
    """The paper's evaluation transform (A.9) at the size, mean and standard deviation of an image tower (`model.visual`)."""
    config = visual.preprocess_cfg
    side = config["size"] if isinstance(config["size"], int) else config["size"][0]
    return paper_eval_transform(side, config["mean"], config["std"])


def _auto_augment(policy: str) -> AutoAugment:
    return AutoAugment(AUTO_AUGMENT_POLICIES[policy])
