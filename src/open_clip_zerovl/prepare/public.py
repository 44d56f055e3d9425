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

import csv
import heapq
import itertools
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, digest_of
from open_clip_zerovl.data.sets import read_karpathy
from open_clip_zerovl.prepare.pack import pack
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
    pairs: Iterable[Pair] = (
        _with_pictures(dataset, paths, files)
        if dataset in ANNOTATIONS
        else list_pairs(dataset, paths)
    )
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


def list_pairs(dataset: str, paths: Sequence[Path]) -> Iterator[Pair]:
    """Iterate over the rows of SBU's list or of one of CC's.

    Raises:
        UserError: files of another form.
    """
    if dataset == "sbu":
        return sbu_pairs(paths)
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(
            f"{dataset} is made from one list of pairs, got {len(paths)} of --source: give the .tsv file."
        )
    return tsv_pairs(paths[0])


def tsv_pairs(path: Path) -> Iterator[Pair]:
    """Iterate over a CC list without a header, one pair a line: CC3M's has the caption first, CC12M's the address.

    The order is found from the lines, and a header that was added for another program is skipped.

    Raises:
        UserError: the first lines are not pairs of a caption and an address.
    """
    member = find_member([path], ".tsv", ".txt", ".csv") or (path, path.name)
    with open_member(*member) as lines:
        header, address_first = _form(path, lines)
    with open_member(*member) as lines:
        for line in itertools.islice(lines, header, None):
            text = _text(line).rstrip("\r\n")
            # Tabs within a caption stay on the caption's side of the split.
            if address_first:
                address, _, caption = text.partition("\t")
            else:
                caption, _, address = text.rpartition("\t")
            yield Pair(address.strip(), [" ".join(caption.split())])


def _form(path: Path, lines: IO[bytes]) -> tuple[int, bool]:
    """Return (1 with a header line else 0, whether the address is the first column)."""
    first = [
        _text(line).rstrip("\r\n").split("\t") for line in itertools.islice(lines, _LOOK_AT_LINES)
    ]

    def is_address(text: str) -> bool:
        return text.strip().lower().startswith(("http://", "https://"))

    in_front = sum(is_address(fields[0]) for fields in first if len(fields) > 1)
    behind = sum(is_address(fields[-1]) for fields in first if len(fields) > 1)
    if max(in_front, behind) < len(first) / 2 or not first:
        shown = "\t".join(first[0])[:80] if first else ""
        raise UserError(
            f"{path} is not a list of captions and addresses (its first line is {shown!r}): give the official .tsv, with one "
            "pair a line and a tab between."
        )
    names = {field.strip().lower() for field in first[0]}
    return int(bool(names & {"url", "caption", "image_url", "text"})), in_front >= behind


def sbu_pairs(paths: Sequence[Path]) -> Iterator[Pair]:
    """Iterate over SBU's list: `sbu-captions-all.json`, or `SBU_captioned_photo_dataset_urls.txt` and `..._captions.txt`.

    Raises:
        UserError: files that hold neither, or lists of unequal length.
    """
    for number, (address, caption) in enumerate(_sbu_columns(paths)):
        if not isinstance(address, str) or not isinstance(caption, str):
            raise UserError(
                f"SBU's lists of addresses and captions differ at entry {number} (one is longer, or holds something else than "
                "text): give the official files, whole."
            )
        yield Pair(address.strip(), [" ".join(caption.split())])


def _sbu_columns(paths: Sequence[Path]) -> Iterator[tuple[Any, Any]]:
    """Iterate over (address, caption), with None where one list is shorter."""
    both = find_member(paths, "captions-all.json", ".json")
    if both is not None:
        with open_member(*both) as first, open_member(*both) as second:
            addresses = json_array(first, str(both[0]), key="image_urls")
            captions = json_array(second, str(both[0]), key="captions")
            yield from itertools.zip_longest(addresses, captions)
        return
    urls, texts = find_member(paths, "urls.txt"), find_member(paths, "captions.txt")
    if urls is None or texts is None:
        raise UserError(
            "SBU is made from sbu-captions-all.json, or SBU_captioned_photo_dataset_urls.txt with ..._captions.txt (packed or "
            f"not), and {', '.join(map(str, paths))} hold neither."
        )
    with open_member(*urls) as first, open_member(*texts) as second:
        yield from itertools.zip_longest(map(_text, first), map(_text, second))


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
    pairs = list(vg_pairs(*found) if dataset == "vg" else karpathy_pairs(*found))
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


def vg_pairs(path: Path, name: str) -> Iterator[Pair]:
    """Iterate over the images of `region_descriptions.json`, each with the phrases of its largest boxes."""
    for image, phrases in sorted(largest_phrases(path, name)):
        yield Pair(f"{image}.jpg", phrases)


def karpathy_pairs(path: Path, name: str) -> Iterator[Pair]:
    """Iterate over the images of `dataset_coco.json` or `dataset_flickr30k.json`."""
    for image in read_karpathy(path, name):
        yield Pair(os.path.basename(image.filename), image.captions, image.split)


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
