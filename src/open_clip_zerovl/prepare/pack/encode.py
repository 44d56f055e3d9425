"""A picture as training shards store it (section 2.1): shorter side 256 pixels, own proportions, JPEG quality 95.

Pictures are neither padded nor enlarged. They are rotated by their EXIF tag, and transparency becomes white, so that a
stored picture looks as on its web page.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image

from open_clip_zerovl.data.splits import picture_key
from open_clip_zerovl.shards.pictures import (
    BadPicture,
    as_shown,
    decoded,
    has_transparency,
    orientation_of,
    stock_reads_alike,
)

#: Formats whose bytes may be stored unchanged -> the extension that webdataset and CLIP_benchmark look for.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_REASONS = {"undecodable image": "broken picture", "oversized image": "picture too large"}


class Unannounced(bytes):
    """An answer whose length was not announced: one that was cut off ends in the same way as a whole one."""


class Failure(Exception):
    """A pair has no picture. `reason` is a short constant phrase to count by. `transient` is true if a retry may help."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


@dataclass(frozen=True)
class Encoding:
    """Limits of the size of a stored picture, and its JPEG quality.

    Attributes:
        shorter_side_px: a picture with a longer shorter side is shrunk to it. None keeps the bytes of JPEG, PNG and WebP.
        quality: JPEG quality.
        min_side_px: a picture with a smaller side is refused (tracking pixels, blank placeholders).
        max_pixels: a picture with a larger width times height is refused before it is decoded.
        longer_side_px: a picture with a longer longer side is shrunk to it.
        upright: a picture that stock open_clip reads as another one than is shown (turned by its EXIF tag, transparent, of 16
            bits) is stored as it is shown, even where its bytes could be kept.
    """

    shorter_side_px: int | None = 256
    quality: int = 95
    min_side_px: int = 16
    max_pixels: int = 150_000_000
    longer_side_px: int | None = None
    upright: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings for a manifest."""
        return asdict(self)


class Picture(NamedTuple):
    """A picture as it is stored: extension, bytes, and further facts for its spool."""

    extension: str
    content: bytes
    about: Mapping[str, Any] = MappingProxyType({})


def encode_picture(content: bytes, encoding: Encoding, *, hashed: bool = False) -> Picture:
    """Encode a picture as it is stored, decoded to its end, so that a truncated one is refused.

    Args:
        hashed: fill in `about`: width and height in pixels of the picture as it is stored, upright, 1 or 0 for "turned",
            "shrunk" and "whitened", and "key", a hash of its RGB pixels before it is shrunk, the same for all files with these
            pixels. The picture is then decoded in its whole size, even if it is stored smaller.

    Raises:
        Failure: no picture, or one that is broken, truncated, too small or too large. A broken one of which nobody knows the
            length counts as cut off, which may pass.
    """

    def use(image: Image.Image) -> Picture:
        _check_size(image, encoding)
        size = image.size
        turned = orientation_of(image) != 1
        extension = (
            _EXTENSIONS.get(image.format or "") if encoding.shorter_side_px is None else None
        )
        if extension and not (hashed or encoding.upright) and encoding.longer_side_px is None:
            image.load()
            return Picture(extension, content)
        side = encoding.shorter_side_px
        if side is not None and side / min(size) < 0.5 and not hashed:
            # Decoding a JPEG at a half, a quarter or an eighth of its size takes a fraction of the time. At least twice the
            # target size is kept for the resize filter.
            scale = 2 * side / min(size)
            image.draft("RGB", (round(scale * size[0]), round(scale * size[1])))
        picture = as_shown(image)
        alike = stock_reads_alike(image, picture)
        whitened = has_transparency(image) and not alike
        if encoding.upright and not alike:
            extension = None
        smaller = _shrunk(picture, encoding)
        shrunk = smaller.size != picture.size
        same = extension is not None and not shrunk
        about: dict[str, Any] = {}
        if hashed:
            width, height = smaller.size
            about = {"key": picture_key(picture), "width": width, "height": height}
            about |= {"turned": int(turned and not same), "shrunk": int(shrunk)}
            about["whitened"] = int(whitened and not same)
        return Picture(
            extension if extension and same else "jpg",
            content if same else _jpeg(smaller, encoding),
            about,
        )

    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures, for which `max_pixels` is the limit here, and of odd EXIF.
            warnings.simplefilter("ignore")
            return decoded(content, use)
    except BadPicture as error:
        if isinstance(error.__cause__, Image.UnidentifiedImageError):
            raise Failure("not a picture") from error
        if isinstance(content, Unannounced) and error.reason == "undecodable image":
            raise Failure("cut off", transient=True) from error
        raise Failure(_REASONS.get(error.reason, error.reason)) from error


def _check_size(image: Image.Image, encoding: Encoding) -> None:
    width, height = image.size
    if min(width, height) < encoding.min_side_px:
        raise BadPicture("picture too small", "")
    if width * height > encoding.max_pixels:
        raise BadPicture("picture too large", "")


def _shrunk(picture: Image.Image, encoding: Encoding) -> Image.Image:
    """Shrink a picture to both limits."""
    scale = 1.0
    if encoding.shorter_side_px is not None:
        scale = encoding.shorter_side_px / min(picture.size)
    if encoding.longer_side_px is not None:
        scale = min(scale, encoding.longer_side_px / max(picture.size))
    if scale >= 1.0:
        return picture
    least = 1 if encoding.longer_side_px is not None else encoding.shorter_side_px or 1
    size = (max(least, round(picture.size[0] * scale)), max(least, round(picture.size[1] * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _jpeg(picture: Image.Image, encoding: Encoding) -> bytes:
    stored = io.BytesIO()
    picture.save(stored, "JPEG", quality=encoding.quality)
    return stored.getvalue()
