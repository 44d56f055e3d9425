"""Encoded pictures, found, read and opened in the same way everywhere: one list of formats, one way to upright 8-bit RGB.

Pillow goes by a picture's bytes, not its name: a `.jpg` may be EPS, for which Pillow starts Ghostscript. Only FORMATS are
opened; all of them are decoded in this process. HEIC, which phones write, is opened where the package pillow-heif is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, PngImagePlugin

from open_clip_zerovl.core.files import regular_file
from open_clip_zerovl.shards.texts import Fault, check_open_files

LARGEST_PICTURE_BYTES = 1 << 30

HAS_HEIF = importlib.util.find_spec("pillow_heif") is not None
#: Endings of pictures that are not read here -> what to do.
UNREAD = dict.fromkeys(
    () if HAS_HEIF else ("heic", "heif"), "(pip install pillow-heif, or convert)"
)
#: Pillow's names of the formats that are opened. JPEG includes MPO, which phones write.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO"),
    *(("HEIF",) if HAS_HEIF else ()),
)

#: Endings of the names of pictures, in folders and in tars; the format of a file is found from its bytes. A sample of a tar
#: with several pictures gives the first in this order, which begins as that of open_clip's pipeline.
IMAGE_EXTENSIONS = tuple(
    ending
    for ending in (
        *("jpg", "png", "jpeg", "webp", "jpe", "jfif", "mpo", "gif", "bmp", "tif", "tiff", "avif"),
        *("apng", "jp2", "j2k", "jpx", "ppm", "pgm", "pbm", "pnm", "ico", "heic", "heif"),
    )
    if ending not in UNREAD
)
PICTURE_WORDS = "jpg, png, webp, gif, tif, avif ..."  # for messages
PICTURE_SUFFIXES = frozenset(f".{extension}" for extension in IMAGE_EXTENSIONS)

_TURNS = {  # EXIF's orientation -> how to turn the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The beginning of a JPEG's segments, and the kind of its pixels' segment
_MARKER, _SCAN = b"\xff", b"\xda"
# The pixels; EXIF and XMP; a filling byte; the end of the file
_SCAN_OR_METADATA = (_SCAN, b"\xe1", _MARKER, b"")
_LARGEST_TEXT_BYTES = 64 << 20  # of a PNG: programs that draw pictures store their settings there
_ORIENTATION = 0x112  # EXIF's number of the tag

Result = TypeVar("Result")


def walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, its files) of a folder and those below it, in order, without hidden ones and links to a folder above."""
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
    """Yield the pictures of a folder and of those below it, in order."""
    for folder, names in walk(path):
        yield from (
            Path(folder, name)
            for name in names
            if os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES
        )


class Listing(NamedTuple):
    """The files of a folder and of those below it: pictures, other files, and links that leave the folder."""

    pictures: list[Path]
    others: list[Path]
    leaving: list[Path]


def list_pictures(path: Path, root: Path | None = None) -> Listing:
    """List the files of a folder and of those below it, in order.

    Args:
        root: the folder that links may not leave; None for the folder itself.
    """
    listing, top = Listing([], [], []), os.path.realpath(root or path)

    def leaves(place: str) -> bool:
        return os.path.commonpath((top, os.path.realpath(place))) != top

    for folder, names in walk(path):
        outside = leaves(folder)
        for name in names:
            file = Path(folder, name)
            if outside or (file.is_symlink() and leaves(str(file))):
                listing.leaving.append(file)
            elif file.suffix.lower() in PICTURE_SUFFIXES:
                listing.pictures.append(file)
            else:
                listing.others.append(file)
    return listing


def notes_of(listed: Mapping[str, Listing], used: Collection[Path] = ()) -> list[str]:
    """Say what was given and is not read.

    Args:
        listed: class -> its files.
        used: files that are no pictures and are read, such as texts.
    """
    others = [str(file) for each in listed.values() for file in each.others if file not in used]
    leaving = [file for each in listed.values() for file in each.leaving]
    empty = [repr(name) for name, each in listed.items() if name and not each.pictures]
    notes = [f"left out: {left_out(others)}"] if others else []
    if leaving:
        notes.append(
            f"left out: {len(leaving):,} links that lead out of the folder, first {leaving[0]} (copy the files there)"
        )
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        notes.append(f"no picture: class {', '.join(empty[:5])}{more}")
    return notes


def left_out(names: Iterable[str]) -> str:
    """Count files that are not read by their endings: "8 .heic (pip install pillow-heif, or convert), 1 .mp4"."""
    counts = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in names)
    words = []
    for suffix, count in counts.most_common():
        words.append(f"{count:,} {suffix} {UNREAD.get(suffix.removeprefix('.'), '')}".rstrip())
    return ", ".join(words)


class BadFile(Fault):
    """A file that cannot be used."""


def read_foreign(path: str | os.PathLike[str], most_bytes: int = LARGEST_PICTURE_BYTES) -> bytes:
    """Read a regular file. A pipe, a device, a folder and a file beyond the limit are refused before they are read.

    Raises:
        BadFile: any fault of the file or of its name.
        UserError: the process has as many files open as it may, which is not the file's fault.
    """
    try:
        with regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most_bytes + 1) if size <= most_bytes else b""
    except FileNotFoundError as error:
        raise BadFile("file missing", f"{path} does not exist") from error
    except OSError as error:
        check_open_files(error)
        raise BadFile(
            "file cannot be read", f"{path} cannot be read ({error.strerror or error})"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise BadFile("file missing", f"{path!r} cannot be the name of a file") from error
    if size > most_bytes or len(content) > most_bytes:
        raise BadFile("file too large", f"{path} has more than {most_bytes >> 20} MiB")
    return content


class BadPicture(Fault):
    """A picture that cannot be shown."""


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


def orientation_of(image: Image.Image) -> int:
    """Return EXIF's orientation of an opened picture, 1 for upright and for EXIF that cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises SyntaxError, struct.error, KeyError ... for corrupt EXIF
        return 1
    return orientation if orientation in _TURNS else 1


def upright(image: Image.Image) -> Image.Image:
    """Decode an opened picture, and turn it as its EXIF tag says."""
    image.load()  # TIFFs are turned by it
    turn = _TURNS.get(orientation_of(image))
    return image if turn is None else image.transpose(turn)


def is_upright(jpeg: bytes) -> bool:
    """Return whether a JPEG is shown as it is stored. One without EXIF and XMP before its scan is not opened for it.

    Raises:
        BadPicture: it cannot be opened.
    """
    at = 2
    while jpeg[at : at + 1] == _MARKER and jpeg[at + 1 : at + 2] not in _SCAN_OR_METADATA:
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg[at : at + 2] == _MARKER + _SCAN or decoded(jpeg, orientation_of) == 1


def rgb(image: Image.Image) -> Image.Image:
    """Return the picture in RGB without its transparency, samples of 16 bits scaled to 8 (Pillow would clip them to white).

    Raises:
        ValueError: floating-point pixels, or integers of more than 16 bits, which have no defined white.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("F"):
        raise ValueError("floating-point pixels have no defined white")
    if image.mode.startswith("I"):
        values = np.asarray(image).clip(0)
        largest = int(values.max())
        if largest > 0xFFFF:
            raise ValueError(f"integer pixels of up to {largest} have no defined white")
        # A TIFF of 32-bit integers may hold a picture of 8 bits.
        wide = image.mode != "I" or largest > 0xFF
        return Image.fromarray((values >> 8 if wide else values).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def has_transparency(image: Image.Image) -> bool:
    """Return whether a picture may have transparent pixels. Pillow cannot blend more than 8 bits a channel."""
    return image.mode in ("RGBA", "LA", "PA") or (
        "transparency" in image.info and not image.mode.startswith(("I", "F"))
    )


def as_shown(image: Image.Image) -> Image.Image:
    """Return the picture in RGB as a web page shows it: turned by its EXIF tag, on white. ValueError as `rgb`."""
    image = upright(image)
    if has_transparency(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return rgb(image)


def stock_reads_alike(image: Image.Image, shown: Image.Image) -> bool:
    """Return whether open_clip's own readers see a decoded picture as it is shown: they drop its tag and its transparency.

    Args:
        image: the picture as Pillow opens it.
        shown: `as_shown` of it.
    """
    if orientation_of(image) != 1:
        return False
    if image.mode in ("RGB", "L") and not has_transparency(image):
        return True
    return image.convert("RGB").tobytes() == shown.tobytes()


def forget_other_formats() -> None:
    """Let Pillow open FORMATS only, in all of this process and its forks: for open_clip's own readers, which name none."""
    _known()
    for name in set(Image.OPEN) - set(FORMATS):
        del Image.OPEN[name]
        Image.ID.remove(name)


def _known() -> Any:
    Image.init()
    PngImagePlugin.MAX_TEXT_CHUNK = _LARGEST_TEXT_BYTES
    if HAS_HEIF and "HEIF" not in Image.OPEN:
        importlib.import_module("pillow_heif").register_heif_opener()
    # Pillow may be built without AVIF or JPEG 2000
    return [name for name in FORMATS if name in Image.OPEN]
