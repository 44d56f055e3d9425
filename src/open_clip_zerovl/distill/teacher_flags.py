"""The flags of `zerovl teacher`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from open_clip_zerovl.core.flags import flag, key_value, part, positive, seed
from open_clip_zerovl.data.names import AUTO_AUGMENTS, PIXEL_PATH, PIXEL_PATHS, POLICIES

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class TeacherViewFlags:
    """Flags of the augmentation, which are those of the later training, and of the stored embeddings.

    Attributes:
        views: V.
        part: (i, n): do every n-th unit from number i on, so that n calls share the work.
    """

    views: int = flag(4, "augmentations of each picture", kind=positive, metavar="V")
    image_size: int = flag(
        224, "side of the student's pictures in pixels", kind=positive, metavar="PX"
    )
    interpolation: str = flag(
        "bicubic",
        "as in training",
        option="--image-interpolation",
        choices=("bicubic", "bilinear", "random"),
    )
    aug_cfg: dict[str, Any] = flag(
        dict,
        "as in training: open_clip's, such as scale=(0.6,1.0)",
        kind=key_value,
        nargs="*",
        metavar="KEY=VALUE",
    )
    auto_augment: str | None = flag(
        None, "as in training: AutoAugment policy after the crop", choices=AUTO_AUGMENTS
    )
    pixel_path: str = flag(PIXEL_PATH, "as in training", choices=PIXEL_PATHS)
    captions: str | None = flag(
        None,
        "as in training: several captions of an image; all are embedded",
        metavar="{one-per-epoch,all}|FIELD=SHARE,...|FIELD+FIELD",
    )
    on_bad_sample: str = flag("replace", "as in training", choices=POLICIES)
    seed: int = flag(0, "seed of the augmentations", kind=seed)
    dtype: str = flag("float16", "number format of the embeddings", choices=DTYPES)
    amp: bool = flag(False, "run the teachers in bf16")
    part: tuple[int, int] = flag(
        (0, 1), "do every N-th part: N calls share a folder", kind=part, metavar="I/N"
    )
