"""Encoded pictures, opened in the same way everywhere: one list of formats, one error, one conversion to RGB.

Pillow goes by a picture's bytes, not its name: a `.jpg` may be EPS, for which Pillow starts Ghostscript. Only FORMATS are
opened; all of them are decoded in this process.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

#: Pillow's names of the formats that are opened. JPEG includes MPO, which phones write.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")

#: Endings of the names of pictures; the format of a file is found from its bytes.
PICTURE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"),
        *(".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm", ".ico"),
    )
)

Result = TypeVar("Result")


def walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder, its files) of a folder and those below it, in order; hidden ones and links to a folder above are left out."""
    for folder, folders, names in os.walk(path, followlinks=True):
        below = (Path(folder, name) for name in folders if not name.startswith("."))
        folders[:] = sorted(
            subfolder.name
            for subfolder in below
            if not (subfolder.is_symlink() and _leads_up(subfolder))
        )
        yield folder, sorted(name for name in names if not name.startswith("."))


def _leads_up(link: Path) -> bool:
    target = link.resolve()
    return any(above.resolve() == target for above in link.absolute().parents)


def picture_files(path: Path) -> Iterator[Path]:
    """The pictures of a folder and of those below it, in order."""
    for folder, names in walk(path):
        yield from (
            Path(folder, name)
            for name in names
            if os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES
        )


class BadPicture(Exception):
    """A picture that cannot be shown.

    Attributes:
        reason: a few words to count by ("undecodable image").
        detail: a verb phrase for messages ("has an image that cannot be decoded").
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def decoded(data: bytes, use: Callable[[Image.Image], Result]) -> Result:
    """Open a picture by its header alone, and return `use(picture)`.

    Args:
        data: encoded bytes.

    Raises:
        BadPicture: no picture of FORMATS, one that is too large, or any error in `use`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_known()) as image:
            return use(image)
    except BadPicture:
        raise
    except Image.DecompressionBombError as error:
        raise BadPicture(
            "oversized image", f"has an image that is too large to decode ({error})"
        ) from error
    except (
        Exception
    ) as error:  # for corrupt bytes decoders raise KeyError, struct.error, MemoryError ...
        words = re.sub(r"<_io[^>]*>", "its bytes", f"{type(error).__name__}: {error}")
        raise BadPicture(
            "undecodable image", f"has an image that cannot be decoded ({words})"
        ) from error


def rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB: transparency dropped, 16-bit samples scaled to 8 bits (Pillow would clip them to white).

    Raises:
        ValueError: floating-point pixels, which have no defined white.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        if image.mode.startswith("F"):
            raise ValueError("floating-point pixels have no defined white")
        values = np.asarray(image)
        return Image.fromarray((values.clip(0, 0xFFFF) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def has_transparency(image: Image.Image) -> bool:
    """True for a picture that may have transparent pixels. Pillow cannot blend more than 8 bits a channel."""
    return image.mode in ("RGBA", "LA", "PA") or (
        "transparency" in image.info and not image.mode.startswith(("I", "F"))
    )


def on_white(image: Image.Image) -> Image.Image:
    """The picture in RGB, with white where it is transparent. ValueError as `rgb`."""
    if has_transparency(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return rgb(image)


def as_shown(image: Image.Image) -> Image.Image:
    """The picture in RGB as a web page shows it: turned by its EXIF tag, `on_white`."""
    return on_white(ImageOps.exif_transpose(image))


def forget_other_formats() -> None:
    """Let Pillow open FORMATS only, in all of this process and its forks: for open_clip's own readers, which name none."""
    Image.init()
    for name in set(Image.OPEN) - set(FORMATS):
        del Image.OPEN[name]
        Image.ID.remove(name)


def _known() -> Any:
    Image.init()
    # Pillow may be built without AVIF or JPEG 2000
    return [name for name in FORMATS if name in Image.OPEN]
