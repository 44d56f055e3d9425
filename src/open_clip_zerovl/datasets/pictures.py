"""A picture as the training shards keep it (section 2.1): shorter side 256 pixels, its own shape, JPEG quality 95.

Nothing is padded and nothing is enlarged. Turned as its EXIF tag says, and transparency laid on white, so that what is
stored looks as the page showed it.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps

from open_clip_zerovl.tar.pictures import BadPicture, decoded, rgb

#: Formats whose bytes may be stored as they came, and the extension that webdataset and CLIP_benchmark look for.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_REASONS = {"undecodable image": "broken picture", "oversized image": "picture too large"}


class Failure(Exception):
    """Why a pair did not come: `reason` is a short constant phrase to count by; `transient` says that a retry may help."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


@dataclass(frozen=True)
class Encoding:
    """How pictures are stored.

    Attributes:
        shorter_side_px: a longer one is shrunk to it; None keeps the picture's bytes as they came (of JPEG, PNG and WebP).
        quality: JPEG quality.
        min_side_px: a picture with a shorter side below it is no picture (tracking pixels, blank place holders).
        max_pixels: width times height beyond which a picture is refused before it is decoded.
    """

    shorter_side_px: int | None = 256
    quality: int = 95
    min_side_px: int = 16
    max_pixels: int = 150_000_000


def encode_picture(content: bytes, encoding: Encoding) -> tuple[str, bytes]:
    """The picture as it is stored: its extension and bytes.

    Raises:
        Failure: not an image, a broken or truncated one, too small, or too many pixels.
    """

    def use(image: Image.Image) -> tuple[str, bytes]:
        width, height = image.size
        if min(width, height) < encoding.min_side_px:
            raise BadPicture("picture too small", "")
        if width * height > encoding.max_pixels:
            raise BadPicture("picture too large", "")
        if encoding.shorter_side_px is None and image.format in _EXTENSIONS:
            image.load()  # to the end: a truncated picture must not pass
            return _EXTENSIONS[image.format], content
        return "jpg", _shrunk_jpeg(image, encoding)

    try:
        with warnings.catch_warnings():
            # Pillow's warnings of a possible bomb and of odd EXIF: the limit here is `max_pixels`.
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
            # A JPEG decodes at half, a quarter, an eighth of its size for a fraction of the time; twice the target is kept
            # for the filter to work on.
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
