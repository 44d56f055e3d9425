"""Encoded pictures to RGB images and to uint8 tensors, as open_clip decodes and transforms them, but faster.

- `decode_image` decodes a JPEG at a half, a quarter or an eighth of its size, which skips most of the work. It does so only
  where every crop that the transform may draw still has at least as many pixels as it is resized to (`Crop.reduction`).
- `split_normalize` leaves the transform's last two steps (ToTensor, Normalize) to the device, so that the loader moves a
  quarter of the bytes.
- `with_auto_augment` and `image_transform_train` augment as the paper does (sections 2.2 and A.9): training crops 60-100 % of
  the area and applies AutoAugment's ImageNet policy to the crop. Draws come from torch's default generator, as in torchvision;
  the data pipeline seeds it for each sample (`randomness.reseed`).
- `pictures` takes the path on arrays, by libjpeg-turbo's and torch's kernels:

    bytes --decode_pixels--> (H, W, 3) uint8 --PixelTransform--> (3, S, S) uint8 in channels-last memory

For the same random draws its picture is that of PIL and torchvision to rounding: at most 2 grey levels in 99.9 % of the pixels
(`tests/data/test_images.py`). Resizing is torch's antialiased kernel on uint8 rows, three to six times as fast as PIL's.
`simplejpeg` decodes upright JPEGs in grey or colour. Everything else (turned by EXIF, CMYK, PNG, WebP, torn files) goes through
`decode_image`, and so the same pictures are refused on both paths.

AutoAugment draws as torchvision's, with tables that are made once for each picture size instead of for each picture. Its
operations on single bytes (invert, posterize, solarize) run on the tensor. PIL computes the other operations: torch's
nearest-neighbour rotation and shear pick other pixels, its blends round differently, and its histograms are no faster.

    B  micro-batch      C, H, W  channels, rows and columns of an image
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from open_clip.transform import MaybeConvertMode
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.nn.functional import interpolate
from torchvision.transforms import (
    AutoAugment,
    AutoAugmentPolicy,
    CenterCrop,
    Compose,
    InterpolationMode,
    Normalize,
    PILToTensor,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from torchvision.transforms.autoaugment import _apply_op
from torchvision.transforms.functional import _compute_resized_output_size

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import (
    BadPicture,
    as_shown,
    decoded,
    is_upright,
    orientation_of,
)

try:
    import simplejpeg
except ImportError:  # no wheel for this machine
    simplejpeg = None

MIN_SIDE_PX = 2  # tracking pixels and placeholders of web pages have a side of one pixel
_SCALES = (8, 4, 2)  # libjpeg decodes at 1/8, 1/4 and 1/2
_MODES = {InterpolationMode.BICUBIC: "bicubic", InterpolationMode.BILINEAR: "bilinear"}
_JPEG = b"\xff\xd8\xff"

Step = Callable[[torch.Tensor], torch.Tensor]
#: Operations of AutoAugment on single bytes, which torchvision computes alike on tensors and on PIL images.
_ON_BYTES = frozenset(("Invert", "Posterize", "Solarize"))


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
    return (
        Compose([*steps[:-2], ToBytes()]),
        tuple(map(float, normalize.mean)),
        tuple(map(float, normalize.std)),
    )


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


@lru_cache(maxsize=8)
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


def with_auto_augment(transform: Compose, policy: str = "imagenet") -> Compose:
    """Put AutoAugment into open_clip's training transform right after its random crop, on the cropped RGB image.

    Args:
        transform: the second value of `create_model_and_transforms`, with or without `--aug-cfg`.
        policy: of AUTO_AUGMENTS.

    Raises:
        UserError: a transform without a random resized crop.
    """
    augment = AutoAugment(AutoAugmentPolicy(policy))
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
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    *,
    area: tuple[float, float] = (0.6, 1.0),
    auto_augment: str | None = None,
) -> Compose:
    """Make the paper's training transform (A.9): random resized crop, AutoAugment, normalisation (PIL image -> (3, S, S)).

    It resizes bilinearly, as the released code does; open_clip's own transform is bicubic.

    Args:
        size_px: side S of the resulting square.
        area: smallest and largest share of the image's area that a crop has.
        auto_augment: a policy of AUTO_AUGMENTS.
    """
    crop = RandomResizedCrop(size_px, scale=area, interpolation=InterpolationMode.BILINEAR)
    augment = [AutoAugment(AutoAugmentPolicy(auto_augment))] if auto_augment is not None else []
    return Compose([crop, MaybeConvertMode(), *augment, ToTensor(), Normalize(mean, std)])


def paper_eval_transform(
    size_px: int,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
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


# ---------------------------------------------------------------------------------------------------------------------
# The path on arrays
# ---------------------------------------------------------------------------------------------------------------------


def decode_pixels(data: bytes, crop: Crop | None = None) -> np.ndarray:
    """Decode the RGB picture of encoded bytes, (H, W, 3) uint8, as `decode_image` decodes it.

    Raises:
        BadPicture: as `decode_image`.
    """
    pixels = _decode_jpeg(data, crop) if data.startswith(_JPEG) else None
    return np.asarray(decode_image(data, crop)) if pixels is None else pixels


def _decode_jpeg(data: bytes, crop: Crop | None) -> np.ndarray | None:
    """Decode a JPEG, None for files that PIL decodes: turned, unusual colour spaces, sizes that may be refused, torn."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        limit = Image.MAX_IMAGE_PIXELS
        if (
            colours not in ("YCbCr", "Gray")
            or min(width, height) < MIN_SIDE_PX
            or (limit and width * height > limit)
            or not is_upright(data)
        ):
            return None
        scale = crop.reduction(width, height) if crop is not None else 1
        # The decoder picks the smallest scale that gives at least this size: the one reduced by `scale`.
        least = (-(-height // scale), -(-width // scale)) if scale > 1 else (0, 0)
        return simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1])
    except (
        ValueError,
        KeyError,
    ):  # KeyError: a colour space that the header's reader does not know
        return None


def pictures(
    transform: Any,
) -> tuple[Callable[[Any], torch.Tensor], Callable[[bytes, Crop | None], Any]]:
    """Return (transform, decoder) on arrays, of which the transform takes the decoder's output.

    Where the decoder is not installed, or a step takes PIL images only, a warning says so and the pair is PIL's.

    Args:
        transform: PIL image -> tensor (C, H, W).
    """
    if simplejpeg is None:
        logging.warning("simplejpeg is not installed: pictures are decoded and resized by PIL.")
        return transform, decode_image
    arrays = on_arrays(transform)
    if arrays is None:
        logging.warning(
            "The image transform has a step that takes PIL images only: pictures are decoded and resized by PIL."
        )
        return transform, decode_image
    return arrays, decode_pixels


class PixelTransform:
    """A PIL transform on arrays, (H, W, 3) uint8 -> (3, S, S) uint8, with the same steps and the same draws.

    Args:
        transform: the PIL transform.
        steps: its steps on tensors.

    Attributes:
        transforms: the PIL transform's steps, for `crop_of`.
    """

    def __init__(self, transform: Any, steps: list[Step]) -> None:
        self.transforms = list(getattr(transform, "transforms", None) or [transform])
        self.steps = steps

    def __call__(self, pixels: np.ndarray) -> torch.Tensor:
        # Arrays of PIL images are read-only, and torch wants writable ones.
        picture = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(
            2, 0, 1
        )
        for step in self.steps:
            picture = step(picture)
        return picture


def on_arrays(transform: Any) -> PixelTransform | None:
    """Return a PIL transform that ends in uint8 (`split_normalize`) on arrays, None if a step has no such form."""
    steps: list[Step] = []
    for step in getattr(transform, "transforms", None) or [transform]:
        if isinstance(step, MaybeConvertMode | ToBytes | PILToTensor):
            continue  # pictures are RGB and uint8 tensors already
        array_step = _step(step)
        if array_step is None:
            return None
        steps.append(array_step)
    return PixelTransform(transform, steps)


def _step(step: Any) -> Step | None:
    kind = type(step)  # a subclass may do anything
    if kind is RandomResizedCrop and step.interpolation in _MODES:
        return _RandomResizedCrop(step)
    if kind is Resize and step.interpolation in _MODES:
        return _Resize(step)
    if kind is AutoAugment:
        return ArrayAutoAugment(step)
    if kind in (CenterCrop, RandomHorizontalFlip):
        return step  # the same on tensors as on PIL images
    return None


def _fp32(value: float) -> float:
    """Round a value to fp32."""
    return ctypes.c_float(value).value


def _resized(
    picture: torch.Tensor, size: tuple[int, int], interpolation: InterpolationMode
) -> torch.Tensor:
    if tuple(picture.shape[1:]) == size:
        return picture
    mode = _MODES[interpolation]
    # the strides of a channels-last batch of one
    rows = picture.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    # which the fast kernel needs; copies a crop
    rows = rows.contiguous(memory_format=torch.channels_last)
    return interpolate(rows, size=size, mode=mode, antialias=True, align_corners=False)[0]


class _RandomResizedCrop:
    def __init__(self, step: RandomResizedCrop) -> None:
        self.step = step
        self.size = (int(step.size[0]), int(step.size[1]))
        self.area = (_fp32(step.scale[0]), _fp32(step.scale[1]))
        self.log_ratio = torch.log(torch.tensor(step.ratio)).tolist()

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        top, left, height, width = self.box(int(picture.shape[1]), int(picture.shape[2]))
        return _resized(
            picture[:, top : top + height, left : left + width], self.size, self.step.interpolation
        )

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) as `RandomResizedCrop.get_params`, by the same draws, in a third of the time.

        torchvision makes about ten tensors for each attempt, and half of the attempts do not fit a picture of 3 : 2. Here an
        attempt is one draw of two numbers u, scaled as torch's `uniform_(a, b)` does: u (b - a) + a in fp64, rounded to fp32.
        """
        (least, most), (low, high) = self.area, self.log_ratio
        pair = torch.empty(2)
        for _ in range(10):
            u, v = pair.uniform_().tolist()
            area = height * width * _fp32(u * (most - least) + least)
            ratio = _fp32(math.exp(_fp32(v * (high - low) + low)))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                top = torch.randint(0, height - down + 1, size=(1,)).item()
                return (
                    int(top),
                    int(torch.randint(0, width - across + 1, size=(1,)).item()),
                    down,
                    across,
                )
        # No attempt fitted: the largest central crop of an allowed ratio, without draws.
        narrowest, widest = min(self.step.ratio), max(self.step.ratio)
        across, down = width, height
        if width < height * narrowest:
            down = round(width / narrowest)
        elif width > height * widest:
            across = round(height * widest)
        return (height - down) // 2, (width - across) // 2, down, across


class _Resize:
    def __init__(self, step: Resize) -> None:
        self.step = step

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        size = [self.step.size] if isinstance(self.step.size, int) else list(self.step.size)
        height, width = int(picture.shape[1]), int(picture.shape[2])
        if len(size) == 1:
            size = _compute_resized_output_size((height, width), size, self.step.max_size)
        return _resized(picture, (int(size[0]), int(size[1])), self.step.interpolation)


class ArrayAutoAugment:
    """AutoAugment on pictures (3, H, W) uint8.

    Args:
        step: torchvision's AutoAugment.
    """

    def __init__(self, step: AutoAugment) -> None:
        self.step = step
        self._sizes: dict[tuple[int, int], list[list[tuple[str, float, float, bool]]]] = {}

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        number, chances, signs = self.step.get_params(len(self.step.policies))
        shown: torch.Tensor | Image.Image = picture
        operations = self._policies(int(picture.shape[1]), int(picture.shape[2]))[number]
        for (name, probability, strength, signed), chance, sign in zip(
            operations, chances.tolist(), signs.tolist(), strict=True
        ):
            if chance > probability:
                continue
            strength = -strength if signed and sign == 0 else strength
            shown = _tensor(shown) if name in _ON_BYTES else _image(shown)
            shown = _apply_op(shown, name, strength, self.step.interpolation, self.step.fill)
        return _tensor(shown)

    def _policies(self, height: int, width: int) -> list[list[tuple[str, float, float, bool]]]:
        """List the operations of each policy: (name, probability, strength, whether the strength has a random sign)."""
        policies = self._sizes.get((height, width))
        if policies is None:
            space: dict[str, Any] = self.step._augmentation_space(10, (height, width))
            policies = self._sizes[height, width] = [
                [
                    (
                        name,
                        float(np.float32(probability)),  # the draws are fp32
                        0.0 if level is None else float(space[name][0][level].item()),
                        space[name][1],
                    )
                    for name, probability, level in policy
                ]
                for policy in self.step.policies
            ]
        return policies


def _tensor(shown: torch.Tensor | Image.Image) -> torch.Tensor:
    """Return (3, H, W) in channels-last memory."""
    return (
        torch.from_numpy(np.array(shown)).permute(2, 0, 1)
        if isinstance(shown, Image.Image)
        else shown
    )


def _image(shown: torch.Tensor | Image.Image) -> Image.Image:
    if isinstance(shown, Image.Image):
        return shown
    _, height, width = shown.shape
    rows = shown.permute(1, 2, 0).contiguous()
    return Image.frombuffer("RGB", (width, height), rows.numpy(), "raw", "RGB", 0, 1)
