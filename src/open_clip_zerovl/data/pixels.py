"""The pixel path on arrays: encoded bytes -> uint8 rows -> the transform's picture, by libjpeg-turbo's and torch's kernels.

    bytes --decode_pixels--> (H, W, 3) uint8 --PixelTransform--> (3, S, S) uint8 in channels-last memory

For the same random draws the picture is that of PIL and torchvision to rounding: at most 2 grey levels in 99.9 % of the pixels
(`tests/data/test_pixels.py`). Resizing is torch's antialiased kernel on uint8 rows, three to six times as fast as PIL's.
`simplejpeg` decodes upright JPEGs in grey or colour. Everything else (turned by EXIF, CMYK, PNG, WebP, torn files) goes through
`images.decode_image`, and so the same pictures are refused on both paths.

AutoAugment draws as torchvision's, with tables that are made once for each picture size instead of for each picture. Its
operations on single bytes (invert, posterize, solarize) run on the tensor. PIL computes the other
operations: torch's nearest-neighbour rotation and shear pick other pixels, its blends round differently, and its histograms are
no faster.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from open_clip.transform import MaybeConvertMode
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.transforms import (
    AutoAugment,
    CenterCrop,
    InterpolationMode,
    PILToTensor,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from torchvision.transforms.autoaugment import _apply_op
from torchvision.transforms.functional import _compute_resized_output_size

from open_clip_zerovl.data.images import MIN_SIDE_PX, Crop, ToBytes, decode_image
from open_clip_zerovl.shards.pictures import is_upright

try:
    import simplejpeg
except ImportError:  # no wheel for this machine
    simplejpeg = None

_MODES = {InterpolationMode.BICUBIC: "bicubic", InterpolationMode.BILINEAR: "bilinear"}
_JPEG = b"\xff\xd8\xff"

Step = Callable[[torch.Tensor], torch.Tensor]
#: Operations of AutoAugment on single bytes, which torchvision computes alike on tensors and on PIL images.
_ON_BYTES = frozenset(("Invert", "Posterize", "Solarize"))


@cache
def has_decoder() -> bool:
    """Return whether the fast JPEG decoder is installed, and warn once if it is missing."""
    if simplejpeg is None:
        logging.warning("simplejpeg is not installed: pictures are decoded and resized by PIL.")
    return simplejpeg is not None


def decode_pixels(data: bytes, crop: Crop | None = None) -> np.ndarray:
    """Decode the RGB picture of encoded bytes, (H, W, 3) uint8, as `images.decode_image` decodes it.

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
    transform: Any, path: str
) -> tuple[Callable[[Any], torch.Tensor], Callable[[bytes, Crop | None], Any]]:
    """Return (transform, decoder) of a pixel path, of which the transform takes the decoder's output.

    Where "arrays" is not possible, a warning says so and the pair is that of "pil".

    Args:
        transform: PIL image -> tensor (C, H, W).
        path: one of PIXEL_PATHS.
    """
    if path == "pil" or not has_decoder():
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
        transforms: the PIL transform's steps, for `images.crop_of`.
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
    """Return a PIL transform that ends in uint8 (`images.split_normalize`) on arrays, None if a step has no such form."""
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
