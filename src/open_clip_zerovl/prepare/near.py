"""Training pictures that are copies of test pictures, by perceptual hashes: `zerovl data near`, `data pack --drop-near`.

A picture's hash is imagehash's pHash of 16 x 16 = 256 bits: the signs of its lowest frequencies. The distance of two pictures
is the number of bits that differ. Measured on altered copies of 1,000 photographs, and on their pairs (docs/data.md):

    distance    copies
    0 to 28     JPEG at quality 30 to 75, half, quarter or double size, squashed to a square, grey, brighter, mirrored
    up to 56    99.6 of 100 in a border of 3 %, 99 turned by 2 degrees, 100 and 87 cropped by 2 and 5 % of the sides
    126 +- 10   distinct photographs

Legend: `n` pictures asked about, `T` test pictures, 4 words of 64 bits a hash.

near.json    settings, counts, and each pair: source, shard, key; test set, key; distance
near.html    pairs side by side, evenly chosen from the nearest to the farthest
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, digest_of, write_atomically
from open_clip_zerovl.data.components import kind_of
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sets import Picture, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.prepare.door import as_shards, sets_as_shards
from open_clip_zerovl.prepare.store import Exclusion
from open_clip_zerovl.report.pages import thumbnail, write_page
from open_clip_zerovl.shards.pictures import BadPicture, as_shown, decoded, picture_files

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

Hashes = NDArray[np.uint64]
Key = TypeVar("Key")
Place = tuple[str, str, str]  # of a training picture: source, shard, key


def picture_hashes(content: bytes) -> Hashes:
    """Hash an encoded picture and its mirror image, (2, 4), and again without uniform borders if it has some, (4, 4).

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
    """Cut off the rows and columns at the edges in which all pixels have nearly one value."""
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


def hash_all(
    pictures: Iterable[tuple[Key, bytes]], threads: int = 4
) -> Iterator[tuple[Key, bytes, Hashes | None]]:
    """Yield (key, content, its hashes, None for no picture) of each (key, encoded picture), in order."""

    def hashes_or_none(entry: tuple[Key, bytes]) -> Hashes | None:
        try:
            return picture_hashes(entry[1])
        except BadPicture:
            return None

    source = iter(pictures)
    with ThreadPoolExecutor(threads) as pool:
        while block := list(islice(source, PICTURES_AT_ONCE)):
            hashed = pool.map(hashes_or_none, block)
            yield from ((*entry, hashes) for entry, hashes in zip(block, hashed, strict=True))


def nearest(
    tests: Hashes, asked: Hashes, within: int = NEAR
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the nearest test picture (T, 4) of each hash (n, 4), the first of equally near ones, and its distance.

    Returns:
        (n,) numbers, -1 where none is within the distance. (n,) distances, BITS + 1 there.
    """
    away = np.zeros((len(asked), len(tests)), dtype=np.uint16)
    for word in range(_WORDS):
        away += np.bitwise_count(asked[:, word, None] ^ tests[:, word])
    least = away.min(axis=1)
    near = least <= within
    return np.where(near, away.argmin(axis=1), -1), np.where(near, least, BITS + 1)


# ---------------------------------------------------------------------------------- pictures of sources and of test sets

SHOWN = 100  # pairs on the page
_KEPT = 1000  # pairs whose thumbnails are kept, of which the page shows some


@dataclass(frozen=True)
class ComparedSets:
    """The pictures of one or several test sets, with their hashes.

    Attributes:
        hashes: (T, 4), of the pictures that can be decoded, with and without uniform borders.
        pictures: the picture of each hash. `source` is the set.
        counts: set -> its pictures that can be decoded.
        unreadable: pictures that cannot be decoded, left out.
    """

    hashes: Hashes
    pictures: Sequence[Picture]
    counts: dict[str, int]
    unreadable: int


@dataclass(frozen=True)
class NearPair:
    """A training picture and the test picture that it, or its mirror image, is near to.

    Attributes:
        shard: "" outside shards.
    """

    source: str
    shard: str
    key: str
    test: str
    test_key: str
    distance: int
    mirrored: bool = False


@dataclass
class Overlap:
    """The pairs of near pictures, with counts.

    Attributes:
        tests: test set -> its pictures.
        within: the largest distance of a copy.
        samples: source -> its samples with a picture.
        unreadable: source -> pictures that cannot be decoded.
        pairs: those within the distance, in the order of the sources.
        thumbnails: number of a pair -> (training picture, test picture), as data URIs.
    """

    tests: dict[str, int]
    within: int = NEAR
    samples: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    pairs: list[NearPair] = field(default_factory=list)
    thumbnails: dict[int, tuple[str, str]] = field(default_factory=dict)


def open_test_sets(
    tests: str, *, split: str = "test", threads: int = 4, progress: bool = True
) -> ComparedSets:
    """Hash the pictures of test sets.

    Args:
        tests: `NAME=SET::NAME=SET`. A set is one that `zerovl retrieval` takes, or a folder of pictures, with subfolders.
        split: of sets that have several.

    Raises:
        UserError: a set that cannot be read, or one without pictures.
    """
    pictures = [
        picture
        for name, path in parse_retrieval_data(tests).items()
        for picture in _test_pictures(name, path, split)
    ]
    hashes: list[Hashes] = []
    owners: list[Picture] = []
    counts: Counter[str] = Counter()
    bar = tqdm(pictures, desc="test sets", unit=" pictures", disable=not progress)
    for picture, _, each in hash_all(((picture, picture.content()) for picture in bar), threads):
        if each is not None:
            hashes += list(each[::2])  # not those of its mirror image
            owners += [picture] * len(each[::2])
            counts[picture.source] += 1
    if not hashes:
        raise UserError("the test set holds no picture that can be compared")
    # `nearest` compares one word of all hashes at a time, for every training picture.
    by_words = np.asfortranarray(np.stack(hashes))
    return ComparedSets(by_words, owners, dict(counts), len(pictures) - counts.total())


def _test_pictures(name: str, path: Path, split: str) -> list[Picture]:
    if kind_of(str(path)).kind == "folder" and (files := list(picture_files(path))):
        return [Picture(str(file.relative_to(path)), file, source=name) for file in files]
    (place,) = parse_retrieval_data(sets_as_shards(f"{name}={path}")).values()
    return [replace(sample, source=name) for sample in open_retrieval_set(place, split).samples]


def find_overlap(
    data: str, tests: ComparedSets, *, within: int = NEAR, threads: int = 4, progress: bool = True
) -> Overlap:
    """Compare every picture of named sources with test sets.

    Args:
        data: `name=shards::name=shards`, as `--train-data`: local shards, tables.
        within: largest distance of a copy.

    Raises:
        UserError: data that cannot be read.
    """
    overlap = Overlap(tests.counts, within)

    def pictures_of(source: Source) -> Iterator[tuple[Place, bytes]]:
        total, quiet = source.num_samples, not progress
        with tqdm(total=total, desc=source.name, unit=" pictures", disable=quiet) as bar:
            for number, shard in enumerate(source.shards):
                for sample in samples_of(source, number):
                    bar.update()
                    if (content := sample.image) is not None:
                        yield (source.name, os.path.basename(shard), sample.key), content

    say = print if progress else logging.info
    for source in parse_sources(as_shards(data, say=say), evaluation=True):
        overlap.samples[source.name] = overlap.unreadable[source.name] = 0
        match(pictures_of(source), tests, overlap, threads)
    return overlap


def match(
    pictures: Iterator[tuple[Place, bytes]], tests: ComparedSets, overlap: Overlap, threads: int = 4
) -> None:
    """Compare training pictures with test sets, and add counts, pairs and thumbnails of the first ones to `overlap`."""

    def shown(content: bytes) -> str:
        return decoded(content, lambda image: thumbnail(as_shown(image)))

    for place, content, hashes in hash_all(pictures, threads):
        overlap.samples[place[0]] += 1
        if hashes is None:
            overlap.unreadable[place[0]] += 1
            continue
        numbers, distances = nearest(tests.hashes, hashes, overlap.within)
        best = int(distances.argmin())
        if numbers[best] < 0:
            continue
        test = tests.pictures[numbers[best]]
        if len(overlap.pairs) < _KEPT:
            thumbnails = shown(content), shown(test.content())
            overlap.thumbnails[len(overlap.pairs)] = thumbnails
        distance, mirrored = int(distances[best]), bool(best % 2)
        overlap.pairs.append(NearPair(*place, test.source, test.key, distance, mirrored))


def write_overlap(overlap: Overlap, out: Path) -> None:
    """Write `near.json` and `near.html` into a folder."""
    listed = {
        "hash": f"pHash, {BITS} bits",
        "within": overlap.within,
        "tests": overlap.tests,
        "samples": overlap.samples,
        "unreadable": overlap.unreadable,
        "pairs": [asdict(pair) for pair in overlap.pairs],
    }
    write_atomically(out / "near.json", json.dumps(listed, indent=1) + "\n")
    ranked = sorted(overlap.thumbnails, key=lambda number: overlap.pairs[number].distance)
    chosen = (
        ranked if len(ranked) <= SHOWN else [ranked[i * len(ranked) // SHOWN] for i in range(SHOWN)]
    )
    write_page(
        out / "near.html",
        "near.html",
        title="Training pictures that are in test sets",
        lead=overlap_text(overlap),
        bits=BITS,
        near=NEAR,
        found=len(overlap.pairs),
        pairs=[(overlap.pairs[number], *overlap.thumbnails[number]) for number in chosen],
    )


def overlap_text(overlap: Overlap) -> str:
    """Write the findings in sentences."""
    tests = ", ".join(f"{name} ({count:,} pictures)" for name, count in overlap.tests.items())
    lines = []
    for source, count in overlap.samples.items():
        pairs = [pair for pair in overlap.pairs if pair.source == source]
        held = len({(pair.test, pair.test_key) for pair in pairs})
        lines.append(
            f"{source}: {len(pairs):,} of {count:,} pictures are copies of {held:,} test pictures."
            + (
                f" {overlap.unreadable[source]:,} could not be decoded."
                if overlap.unreadable[source]
                else ""
            )
        )
    return f"Compared with {tests}, within {overlap.within} of {BITS} bits. {' '.join(lines)}"


def run_overlap(
    data: str,
    tests: str,
    out: Path,
    *,
    split: str = "test",
    within: int = NEAR,
    threads: int = 4,
) -> str:
    """Find copies, write `near.json` and `near.html` into `out`, and return what was found in sentences.

    Raises:
        UserError: as the functions it calls.
    """
    check_writable(out, folder=True)
    opened = open_test_sets(tests, split=split, threads=threads)
    overlap = find_overlap(data, opened, within=within, threads=threads)
    write_overlap(overlap, out)
    lines = [overlap_text(overlap)]
    if opened.unreadable:
        lines.append(
            f"{opened.unreadable} test pictures could not be decoded and were not compared."
        )
    return "\n".join([*lines, f"Written: {out / 'near.html'}, {out / 'near.json'}"])


def near_exclusion(tests: str, out: Path, *, threads: int = 4, progress: bool = True) -> Exclusion:
    """Leave out training pictures that are near to a picture of test sets, but none that is held out.

    The pictures that are left out are listed in `near.json` and shown on `near.html` in the folder `out`.

    Args:
        tests: `NAME=SET::NAME=SET`, as `open_test_sets` takes them.

    Raises:
        UserError: a set that cannot be read.
    """
    sets = open_test_sets(tests, threads=threads, progress=progress)
    names = ", ".join(sets.counts)
    digest = digest_of(np.ascontiguousarray(sets.hashes.T))[:16]

    def keys(samples: Iterator[tuple[str, str, bytes]]) -> Iterator[str]:
        overlap = Overlap(sets.counts)
        bar = tqdm(samples, desc=f"comparing with {names}", unit=" pictures", disable=not progress)
        pictures = (((source, "", key), content) for source, key, content in bar)
        match(pictures, sets, overlap, threads)
        write_overlap(overlap, out)
        yield from dict.fromkeys(pair.key for pair in overlap.pairs)

    return Exclusion(
        f"near {names}",
        keys,
        f"{names}: {sum(sets.counts.values())} pictures {digest}, {BITS} bits, within {NEAR}",
    )
