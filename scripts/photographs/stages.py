"""An image tower whose last two stages are trained too, on stored maps of the stage before them (study.yaml, 5).

    python -m scripts.photographs.stages --tars DIR --features DIR     # after styles.py; 2 CPU minutes

The tower is EfficientNet-Lite0, which gives a map of 112 x 6 x 6 numbers of a photograph at 96 px there. The statistics of
batch normalisations stay, as with `--freeze-norm-statistics`. The text tower is MiniLM's features under a trained head.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.files import save_atomically
from scripts.photographs.heads import Heads
from scripts.photographs.mixtures import Reduce, Store
from scripts.photographs.styles import (
    AT_ONCE,
    PICTURES,
    Pictures,
    flickr8k_split,
    image_tower,
    read_captions,
    read_pictures,
)

FROZEN_STAGES = 5  # of seven
BLOCK = 32  # maps at once: larger tensors are handed back to the kernel and faulted in again
NEEDED = {
    "train": ("plain", "framed"),
    "validation": ("plain",),
    "test": ("plain", "framed", "poster"),
}


def divided(model: Any) -> tuple[nn.Module, nn.Module]:
    """Divide an EfficientNet into the stages that stay frozen, and the others with its pooling."""
    first = nn.Sequential(model.conv_stem, model.bn1, model.blocks[:FROZEN_STAGES])
    rest = (model.blocks[FROZEN_STAGES:], model.conv_head, model.bn2, model.global_pool)
    return first, nn.Sequential(*rest)


class Stages(nn.Module):
    """The last stages of the image tower below the heads of one seed.

    Args:
        of_images: the fixed map from the tower's features to the head's inputs.
    """

    def __init__(self, stages: nn.Module, heads: Heads, of_images: Reduce) -> None:
        super().__init__()
        self.stages, self.heads, self.of_images = stages, heads, of_images

    @property
    def logit_scale(self) -> Tensor:
        return self.heads.logit_scale

    def encode(self, side: str, rows: Tensor) -> Tensor:
        """Encode maps (1, N, C, H, W) or (N, C, H, W), or texts (1, N, F) or (N, F), as (1, N, D) of unit length."""
        if side == "image":
            maps = rows.reshape(-1, *rows.shape[-3:]).float()
            blocks = maps.contiguous(memory_format=torch.channels_last).split(BLOCK)
            rows = self.of_images(torch.cat([self.stages(block) for block in blocks]))[None]
        return self.heads.encode(side, rows)


class MapStore(Store):
    """The features that `styles.py` has stored, with maps (n, 112, 6, 6) in half precision for the pictures'."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        maps = torch.load(folder / "maps.pt", weights_only=True)
        for name, of_part in maps.items():
            setattr(self, name, getattr(self, name) | {"pictures": of_part})


def encode_maps(tar: Path, features: Path) -> None:
    """Write maps.pt: {part: {style: (n, 112, 6, 6)}}."""
    encode = Pictures(divided(image_tower(features / "encoders"))[0])
    made: dict[str, dict[str, Tensor]] = {}
    for part, names in flickr8k_split(list(read_captions(tar))).items():
        pictures = read_pictures(tar, [f"flickr8k/images/{name}" for name in names])
        made[part] = {}
        for look in NEEDED[part]:
            blocks = [
                encode([PICTURES[look](each) for each in pictures[begin : begin + AT_ONCE]]).half()
                for begin in range(0, len(pictures), AT_ONCE)
            ]
            made[part][look] = torch.cat(blocks)
        print(f"{part}: {len(names):,} photographs", flush=True)
    save_atomically(made, features / "maps.pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tars", type=Path, required=True, metavar="DIR")
    parser.add_argument("--features", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    torch.set_num_threads(1)
    encode_maps(given.tars / "flickr8k.tar", given.features)


if __name__ == "__main__":
    main()
