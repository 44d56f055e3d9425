"""Near-duplicates: training pictures that are copies of test pictures, found by perceptual hashes.

A picture's hash is imagehash's pHash of 16 x 16 = 256 bits: the signs of its lowest frequencies. The distance of two pictures
is the number of bits that differ. Measured on altered copies of 1,000 photographs, and on their pairs (docs/data.md):

    distance    copies
    0 to 28     JPEG at quality 30 to 75, half, quarter or double size, squashed to a square, grey, brighter, mirrored
    up to 56    99.6 of 100 in a border of 3 %, 99 turned by 2 degrees, 100 and 87 cropped by 2 and 5 % of the sides
    126 +- 10   distinct photographs

Legend: `n` pictures asked about, `T` test pictures, 4 words of 64 bits a hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import BadPicture, as_shown, decoded

SIDE = 16
BITS = SIDE * SIDE
#: Default of the largest distance of a copy: 87 of 100 copies cropped by 5 % are found; distinct photographs, whose distance
#: is 126 +- 10, are 7 standard deviations away.
NEAR = 56
PICTURES_AT_ONCE = 256  # that are in memory
_WORDS = BITS // 64
# JPEGs are decoded at the smallest scale that is not below it; pHash shrinks to 4 * SIDE
_DRAFT_PX = 8 * SIDE
_BORDER_SPREAD = 24  # grey levels within a row of a uniform border, as JPEG leaves it
_BLOCK_PAIRS = 1 << 21  # pairs compared at once, 8 bytes each

Hashes = NDArray[np.uint64]
Key = TypeVar("Key")


def picture_hashes(content: bytes) -> Hashes:
    """(2, 4) the hashes of an encoded picture and of its mirror image; (4, 4) if it has uniform borders.

    The last two are those without the borders. A plain background counts as one, and a few pixels decide where it ends: so both
    pairs are of use. The picture is turned by its EXIF tag, on white if it is transparent.

    Raises:
        BadPicture: it cannot be decoded.
    """
    import imagehash

    def hashed(image: Image.Image) -> Hashes:
        image.draft("L", (_DRAFT_PX, _DRAFT_PX))
        grey = as_shown(image).convert("L")
        inner = _without_borders(grey)
        bits = []
        for picture in (grey,) if inner.size == grey.size else (grey, inner):
            # as phash does by itself
            small = picture.resize((4 * SIDE, 4 * SIDE), Image.Resampling.LANCZOS)
            bits += [
                imagehash.phash(side, hash_size=SIDE).hash.ravel()
                for side in (small, ImageOps.mirror(small))
            ]
        return np.packbits(bits, axis=1).view(np.uint64)

    return decoded(content, hashed)


def _without_borders(grey: Image.Image) -> Image.Image:
    """The picture without the rows and columns at its edges in which all pixels have nearly one value."""
    pixels = np.asarray(grey)
    box = [0, 0, *grey.size]
    for axis in (1, 0):  # rows, then columns of the rows that are left
        spread = pixels.max(axis=axis).astype(np.int16) - pixels.min(axis=axis)
        (varied,) = np.nonzero(spread > _BORDER_SPREAD)
        if not len(varied) or varied[-1] + 1 - varied[0] < SIDE:
            return grey
        box[axis], box[axis + 2] = int(varied[0]), int(varied[-1]) + 1
        pixels = pixels[varied[0] : varied[-1] + 1] if axis else pixels
    return grey.crop((box[0], box[1], box[2], box[3]))


def hashes_or_none(content: bytes) -> Hashes | None:
    """`picture_hashes`, or None for a picture that cannot be decoded."""
    try:
        return picture_hashes(content)
    except BadPicture:
        return None


def hash_all(
    pictures: Iterable[tuple[Key, bytes]], threads: int = 4
) -> Iterator[list[tuple[Key, bytes, Hashes | None]]]:
    """(key, content, `hashes_or_none`) of each (key, encoded picture), in order, in blocks of PICTURES_AT_ONCE."""
    source = iter(pictures)
    with ThreadPoolExecutor(threads) as pool:
        while block := list(islice(source, PICTURES_AT_ONCE)):
            hashed = pool.map(hashes_or_none, (content for _, content in block))
            yield [
                (key, content, hashes) for (key, content), hashes in zip(block, hashed, strict=True)
            ]


class NearIndex:
    """Hashes of test pictures, asked for the nearest one.

    All T hashes are compared with all n asked ones, block by block.
    """

    def __init__(self, hashes: Sequence[Hashes] | Hashes) -> None:
        """
        Args:
            hashes: (T, 4).

        Raises:
            UserError: no hash.
        """
        if not len(hashes):
            raise UserError("the test set holds no picture that can be compared")
        self.words = np.ascontiguousarray(np.stack(list(hashes)).T)  # (4, T)

    def __len__(self) -> int:
        """T."""
        return self.words.shape[1]

    def nearest(
        self, hashes: Sequence[Hashes] | Hashes, within: int = NEAR
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of the nearest test picture of each hash (n, 4), the first of equally near ones, and its distance.

        Returns:
            (n,) numbers, -1 where none is within the distance; (n,) distances, BITS + 1 there.
        """
        asked = np.asarray(hashes, dtype=np.uint64).reshape(-1, _WORDS)
        number = np.full(len(asked), -1, dtype=np.int64)
        distance = np.full(len(asked), BITS + 1, dtype=np.int64)
        rows_at_once = max(1, _BLOCK_PAIRS // len(self))
        for start in range(0, len(asked), rows_at_once):
            block = asked[start : start + rows_at_once]
            away = np.zeros((len(block), len(self)), dtype=np.uint16)
            for word in range(_WORDS):
                away += np.bitwise_count(block[:, word, None] ^ self.words[word])
            least = away.min(axis=1)
            rows = np.flatnonzero(least <= within)
            number[start + rows], distance[start + rows] = away[rows].argmin(axis=1), least[rows]
        return number, distance
