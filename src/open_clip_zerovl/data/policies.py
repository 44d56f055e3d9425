"""torchvision's AutoAugment on arrays: the same draws and the same pixels as on PIL images.

torchvision makes the tables of all strengths for each picture; here they are made once for each picture size. Operations on
single bytes (invert, posterize, solarize) run on the array. The others stay PIL's, for which the picture becomes a PIL image:
torch's nearest-neighbour rotation and shear pick other pixels, its blends round differently, and its histograms are no faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import AutoAugment
from torchvision.transforms.autoaugment import _apply_op

Rows: TypeAlias = torch.Tensor  # (H, W, 3) uint8


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
        shown: Rows | Image.Image = picture.permute(1, 2, 0)
        operations = self._policies(int(picture.shape[1]), int(picture.shape[2]))[number]
        for (name, probability, strength, signed), chance, sign in zip(
            operations, chances.tolist(), signs.tolist(), strict=True
        ):
            if chance > probability:
                continue
            strength = -strength if signed and sign == 0 else strength
            if name in _ON_BYTES:
                shown = _ON_BYTES[name](_rows(shown), strength)
            else:
                shown = _apply_op(_image(shown), name, strength, self.step.interpolation, self.step.fill)
        return _rows(shown).permute(2, 0, 1)

    def _policies(self, height: int, width: int) -> list[list[tuple[str, float, float, bool]]]:
        """For each policy its operations: (name, probability, strength, whether the strength has a random sign)."""
        found = self._sizes.get((height, width))
        if found is None:
            space: dict[str, Any] = self.step._augmentation_space(10, (height, width))
            found = self._sizes[height, width] = [
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
        return found


def _rows(shown: Rows | Image.Image) -> Rows:
    if isinstance(shown, Image.Image):
        return torch.from_numpy(np.array(shown))
    return shown.contiguous()


def _image(shown: Rows | Image.Image) -> Image.Image:
    if isinstance(shown, Image.Image):
        return shown
    height, width, _ = shown.shape
    return Image.frombuffer("RGB", (width, height), shown.contiguous().numpy(), "raw", "RGB", 0, 1)


def _invert(rows: Rows, _strength: float) -> Rows:
    return 255 - rows


def _posterize(rows: Rows, strength: float) -> Rows:
    """Keep the `strength` highest bits of each byte."""
    return rows & (0xFF << (8 - int(strength)) & 0xFF)


def _solarize(rows: Rows, strength: float) -> Rows:
    """Invert the bytes from `strength` on."""
    flip = torch.ge(rows, strength).to(torch.uint8).neg_()  # 0 or 255
    return flip.bitwise_xor_(rows)


_ON_BYTES: dict[str, Callable[[Rows, float], Rows]] = {
    "Invert": _invert,
    "Posterize": _posterize,
    "Solarize": _solarize,
}
