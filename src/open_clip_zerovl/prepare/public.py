"""The paper's datasets (section 2.1, Table 2) as tables, which `pack` makes shards of.

    sbu, cc3m, cc12m     the published lists of captions and addresses
    vg                   the phrases of the five regions with the largest boxes, of about 50 an image
    coco, f30k           Karpathy's splits; training takes train and restval

    OUT.files/           the official files, and the pictures that lay in zips
    OUT.files/vg.jsonl   the table: {"image": address or path, "caption": [...], "split": ...}, a row a picture
    OUT/train, OUT/test  the shards

A picture has all its captions in one sample. With a weight of 5 each caption is shown once an epoch, a pass over all pictures
after the other, so that captions of one picture, which are false negatives of each other, lie far apart.
"""

from __future__ import annotations

import contextlib
import csv
import heapq
import itertools
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, digest_of
from open_clip_zerovl.data.sets import read_karpathy
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.rows import is_address
from open_clip_zerovl.prepare.settings import Columns, Limits, PackSettings, Work
from open_clip_zerovl.shards.fetch import fetch_file
from open_clip_zerovl.shards.files import RETRIEVAL_MARK
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES, picture_files
from open_clip_zerovl.shards.texts import BROKEN_ARCHIVE, find_member, json_array, open_member

_KARPATHY = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
_VG = "https://homes.cs.washington.edu/~ranjay/visualgenome/data/dataset"
_VG_PICTURES = "https://cs.stanford.edu/people/rak248/VG_100K_2"

#: Addresses at which the makers publish each dataset.
OFFICIAL: dict[str, tuple[str, ...]] = {
    "sbu": ("https://www.cs.rice.edu/~vo9/sbucaptions/sbu-captions-all.tar.gz",),
    "cc12m": ("https://storage.googleapis.com/conceptual_12m/cc12m.tsv",),
    "vg": (
        f"{_VG}/region_descriptions.json.zip",
        f"{_VG_PICTURES}/images.zip",
        f"{_VG_PICTURES}/images2.zip",
    ),
    "coco": (
        _KARPATHY,
        "http://images.cocodataset.org/zips/train2014.zip",
        "http://images.cocodataset.org/zips/val2014.zip",
    ),
}

#: Datasets that a person has to fetch -> how.
BY_HAND = {
    "cc3m": "CC3M's list asks for a sign-in: get Train_GCC-training.tsv from ai.google.com/research/ConceptualCaptions "
    "and give it with --source",
    "f30k": "Flickr30K's pictures ask for a form: get flickr30k-images from shannon.cs.illinois.edu/DenotationGraph and "
    f"give the folder with --source, with dataset_flickr30k.json (in {_KARPATHY})",
}

#: The annotation file of a dataset with pictures of its own.
ANNOTATIONS = {
    "vg": "region_descriptions.json",
    "coco": "dataset_coco.json",
    "f30k": "dataset_flickr30k.json",
}

PHRASES_PER_IMAGE = 5
SHORTER_SIDE_PX = 256  # of training pictures (section 2.1)
_LOOK_AT_LINES = 100
_HEADER = {"url", "caption", "image_url", "text"}  # columns of other programs


class Pair(NamedTuple):
    """A row of a table: the address or file name of a picture, its captions, its split."""

    image: str
    captions: Sequence[str]
    split: str = "train"


def prepare_public(
    dataset: str,
    out: str | Path,
    *,
    source: Sequence[str | Path] | None = None,
    shard_size: int = 10_000,
    seed: int = 0,
    limits: Limits | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """Make the shards of a dataset, or go on with an interrupted call, and return the report of `pack`.

    Args:
        dataset: a key of OFFICIAL or BY_HAND.
        source: the official files, also packed, and folders or zips of pictures. None fetches them.
        shard_size, seed, limits, work: as for `pack`.

    Raises:
        UserError: files that are missing or of another form, a held-out set that lacks a picture, or an error of `pack`.
    """
    work = work or Work()
    files = Path(f"{os.path.abspath(out)}.files")
    paths = _located(dataset, source, files, progress=work.progress)
    if dataset in ANNOTATIONS:
        pairs: Iterable[Pair] = _with_pictures(dataset, paths, files)
    else:
        pairs = sbu_pairs(paths) if dataset == "sbu" else tsv_pairs(paths)
    table = files / f"{dataset}.jsonl"
    splits = []
    with atomic_file(table) as file:
        for pair in pairs:
            row = {"image": pair.image, "caption": pair.captions, "split": pair.split}
            file.write(json.dumps(row).encode() + b"\n")
            splits.append(pair.split != "train")
    if not splits:
        raise UserError(f"{dataset} has no rows: check the files given with --source")
    settings = PackSettings(
        columns=Columns(picture="image", captions=("caption",)),
        shorter_side_px=SHORTER_SIDE_PX,
        shard_size=shard_size,
        seed=seed,
    )
    report = pack([str(table)], out, settings, limits=limits, work=work)
    with open(Path(out, "refused.csv"), newline="", encoding="utf-8") as refused:
        lost = [row["reason"] for row in csv.DictReader(refused) if splits[int(row["line"]) - 1]]
    if lost:
        Path(out, RETRIEVAL_MARK).unlink(missing_ok=True)  # which makes it a retrieval set
        raise UserError(_incomplete(dataset, len(lost), sum(splits), lost[0]))
    return report


def _incomplete(dataset: str, lost: int, count: int, reason: str) -> str:
    return (
        f"the held-out sets of {dataset} lack {lost} of {count} pictures ({reason}), and scores on a part of them cannot be "
        "compared: give all pictures with --source, and a new --out"
    )


def _located(
    dataset: str, source: Sequence[str | Path] | None, folder: Path, *, progress: bool
) -> list[Path]:
    """Return the files and folders of a dataset: those given, or the official ones, fetched into a folder."""
    if source:
        return [Path(path).expanduser() for path in source]
    if dataset in BY_HAND:
        raise UserError(f"{BY_HAND[dataset]}.")
    paths = [folder / url.rpartition("/")[2] for url in OFFICIAL[dataset]]
    advice = "give its path with --source, or try again later; the part that was fetched is kept"
    for url, path in zip(OFFICIAL[dataset], paths, strict=True):
        fetch_file(url, path, advice=advice, progress=progress)
    return paths


# ------------------------------------------------------------------------------------------------- lists of addresses


def tsv_pairs(paths: Sequence[Path]) -> Iterator[Pair]:
    """Iterate over a CC list without a header, one pair a line: CC3M's has the caption first, CC12M's the address.

    The order is found from the lines, and a header that was added for another program is skipped.

    Raises:
        UserError: several files, or first lines that are not pairs of a caption and an address.
    """
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(
            f"CC3M and CC12M are each made from one list of pairs, got {len(paths)} of --source: give the .tsv file."
        )
    member = find_member(paths, ".tsv", ".txt", ".csv") or (paths[0], paths[0].name)
    with open_member(*member) as lines:
        texts = (_text(line).rstrip("\r\n") for line in lines)
        first = list(itertools.islice(texts, _LOOK_AT_LINES))
        address_first = _address_first(paths[0], first)
        if _HEADER & {field.strip().lower() for field in first[0].split("\t")}:
            del first[0]
        for text in itertools.chain(first, texts):
            # Tabs within a caption stay on the caption's side of the split.
            if address_first:
                address, _, caption = text.partition("\t")
            else:
                caption, _, address = text.rpartition("\t")
            yield Pair(address.strip(), [" ".join(caption.split())])


def _address_first(path: Path, first: Sequence[str]) -> bool:
    """Return whether the address is the first column of a list, by its first lines."""
    fields = [text.split("\t") for text in first]
    in_front = sum(is_address(each[0].strip()) for each in fields if len(each) > 1)
    behind = sum(is_address(each[-1].strip()) for each in fields if len(each) > 1)
    if max(in_front, behind) < len(first) / 2 or not first:
        raise UserError(
            f"{path} is not a list of captions and addresses (its first line is {first[0][:80] if first else ''!r}): give the "
            "official .tsv, with one pair a line and a tab between."
        )
    return in_front >= behind


def sbu_pairs(paths: Sequence[Path]) -> Iterator[Pair]:
    """Iterate over SBU's list: `sbu-captions-all.json`, or `SBU_captioned_photo_dataset_urls.txt` and `..._captions.txt`.

    Raises:
        UserError: files that hold neither, or lists of unequal length.
    """
    with contextlib.ExitStack() as stack:
        columns: list[Iterable[Any]] = []
        if (both := find_member(paths, "captions-all.json", ".json")) is not None:
            for key in ("image_urls", "captions"):
                stream = stack.enter_context(open_member(*both))
                columns.append(json_array(stream, str(both[0]), key=key))
        else:
            for end in ("urls.txt", "captions.txt"):
                member = find_member(paths, end)
                if member is None:
                    raise UserError(
                        "SBU is made from sbu-captions-all.json, or SBU_captioned_photo_dataset_urls.txt with ..._captions.txt "
                        f"(packed or not), and {', '.join(map(str, paths))} hold neither."
                    )
                columns.append(map(_text, stack.enter_context(open_member(*member))))
        for number, (address, caption) in enumerate(itertools.zip_longest(*columns)):
            if not isinstance(address, str) or not isinstance(caption, str):
                raise UserError(
                    f"SBU's lists of addresses and captions differ at entry {number} (one is longer, or holds something else "
                    "than text): give the official files, whole."
                )
            yield Pair(address.strip(), [" ".join(caption.split())])


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


# ------------------------------------------------------------------------------------------- annotations and pictures


def _with_pictures(dataset: str, paths: Sequence[Path], folder: Path) -> list[Pair]:
    """Return the rows of a dataset with annotations, with the paths of their pictures.

    Raises:
        UserError: no annotations, no pictures, or held-out sets that lack some.
    """
    name = ANNOTATIONS[dataset]
    found = find_member(paths, name) or find_member(
        [path for path in paths if path.name.endswith((".json", ".json.gz"))], ".json"
    )
    if found is None:
        raise UserError(f"{name} is not in {', '.join(map(str, paths))}: give it with --source.")
    if dataset == "vg":
        pairs = [
            Pair(f"{image}.jpg", phrases) for image, phrases in sorted(largest_phrases(*found))
        ]
    else:
        images = read_karpathy(*found)
        pairs = [
            Pair(os.path.basename(each.filename), each.captions, each.split) for each in images
        ]
    pictures = _pictures([path for path in paths if path != found[0]], folder)
    if not pictures:
        raise UserError(
            f"no pictures of {dataset} beside the annotations: give their folders or zips with --source"
        )
    held_out = [pair for pair in pairs if pair.split != "train"]
    missing = [pair.image for pair in held_out if pair.image not in pictures]
    if missing:
        why = f"{missing[0]} is missing"
        raise UserError(_incomplete(dataset, len(missing), len(held_out), why))
    return [pair._replace(image=str(pictures.get(pair.image, pair.image))) for pair in pairs]


def _pictures(paths: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Return file name -> path of the pictures in folders, searched to any depth, and in zips, which are unpacked."""
    pictures: dict[str, Path] = {}
    for path in paths:
        if not path.is_dir() and zipfile.is_zipfile(path):
            path = _unpacked(path, folder / f"{path.stem}-{digest_of(str(path.absolute()))[:8]}")
        if path.is_dir():
            pictures.update((file.name, file.absolute()) for file in picture_files(path))
    return pictures


def _unpacked(path: Path, folder: Path) -> Path:
    """Unpack the pictures of a zip into a folder, without those that an earlier call has unpacked."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            file = folder / member.filename.rpartition("/")[2]
            wanted = file.suffix.lower() in PICTURE_SUFFIXES and "__MACOSX" not in member.filename
            if wanted and not (file.is_file() and file.stat().st_size == member.file_size):
                try:
                    file.write_bytes(archive.read(member))
                except BROKEN_ARCHIVE:  # the row's picture is missing then, which is counted
                    continue
    return folder


def largest_phrases(
    path: Path, name: str, *, limit: int = PHRASES_PER_IMAGE
) -> Iterator[tuple[int, list[str]]]:
    """Yield (image id, its phrases by descending area of their boxes) for each image of `region_descriptions.json`.

    Regions of equal area are ordered by their id. A phrase that an image has twice counts once, with its larger box. Empty
    phrases are left out, and so are images without a phrase.

    Raises:
        UserError: an entry of another form than `{image_id (or id), regions: [{region_id, x, y, width, height, phrase}]}`.
    """
    with open_member(path, name) as stream:
        for number, image in enumerate(json_array(stream, str(path))):
            try:
                areas: dict[str, tuple[float, float]] = {}
                for region in image["regions"]:
                    phrase = " ".join(str(region["phrase"]).split())
                    size = (
                        float(region["width"]) * float(region["height"]),
                        -float(region["region_id"]),
                    )
                    if phrase and size > areas.get(phrase, (-1.0, 0.0)):
                        areas[phrase] = size
                image_id = int(image["image_id"] if "image_id" in image else image["id"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"entry {number} of {path} is not an image with regions ({type(error).__name__} {error}): give Visual "
                    "Genome's region_descriptions.json."
                ) from error
            if areas:
                yield image_id, heapq.nlargest(limit, areas, key=areas.__getitem__)
