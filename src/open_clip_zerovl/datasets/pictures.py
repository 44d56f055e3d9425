"""A picture as training shards store it (section 2.1): shorter side 256 pixels, own proportions, JPEG quality 95.

Pictures are neither padded nor enlarged. They are rotated as their EXIF tag says, and transparency becomes white, so that a
stored picture looks as on its web page.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps

from open_clip_zerovl.tar.pictures import BadPicture, decoded, rgb

#: Formats whose bytes may be stored unchanged -> the extension that webdataset and CLIP_benchmark look for.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_REASONS = {"undecodable image": "broken picture", "oversized image": "picture too large"}


class Failure(Exception):
    """Why a pair has no picture: `reason` is a short constant phrase to count by; `transient` says that a retry may help."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


@dataclass(frozen=True)
class Encoding:
    """How pictures are stored.

    Attributes:
        shorter_side_px: a picture with a longer shorter side is shrunk to it; None keeps the bytes of JPEG, PNG and WebP.
        quality: JPEG quality.
        min_side_px: a picture with a smaller side is refused (tracking pixels, blank placeholders).
        max_pixels: a picture with a larger width times height is refused before it is decoded.
    """

    shorter_side_px: int | None = 256
    quality: int = 95
    min_side_px: int = 16
    max_pixels: int = 150_000_000


def encode_picture(content: bytes, encoding: Encoding) -> tuple[str, bytes]:
    """(extension, bytes) of a picture as it is stored.

    Raises:
        Failure: no picture, or one that is broken, truncated, too small or too large.
    """

    def use(image: Image.Image) -> tuple[str, bytes]:
        width, height = image.size
        if min(width, height) < encoding.min_side_px:
            raise BadPicture("picture too small", "")
        if width * height > encoding.max_pixels:
            raise BadPicture("picture too large", "")
        if encoding.shorter_side_px is None and image.format in _EXTENSIONS:
            image.load()  # to the end, so that a truncated picture is refused
            return _EXTENSIONS[image.format], content
        return "jpg", _shrunk_jpeg(image, encoding)

    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures, for which `max_pixels` is the limit here, and of odd EXIF.
            warnings.simplefilter("ignore")
            return decoded(content, use)
    except BadPicture as error:
        if isinstance(error.__cause__, Image.UnidentifiedImageError):
            raise Failure("not a picture") from error
        raise Failure(_REASONS.get(error.reason, error.reason)) from error


def _shrunk_jpeg(image: Image.Image, encoding: Encoding) -> bytes:
    side = encoding.shorter_side_px
    if side is not None:
        scale = side / min(image.size)
        if scale < 0.5:
            # Decoding a JPEG at a half, a quarter or an eighth of its size takes a fraction of the time. At least twice the
            # target size is kept for the resize filter.
            image.draft("RGB", (round(2 * scale * image.size[0]), round(2 * scale * image.size[1])))
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        background = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(background, upright)
    picture = rgb(upright)
    if side is not None and min(picture.size) > side:
        scale = side / min(picture.size)
        size = (max(side, round(picture.size[0] * scale)), max(side, round(picture.size[1] * scale)))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    stored = io.BytesIO()
    picture.save(stored, "JPEG", quality=encoding.quality)
    return stored.getvalue()
