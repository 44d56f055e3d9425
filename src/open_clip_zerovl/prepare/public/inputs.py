"""The inputs of a dataset: official files, fetched or given with `--source`, packed or not; and stores of pictures.

Pictures are read from their zips, so that nothing is unpacked.
Addresses are those that the datasets' makers publish. Two datasets ask for a form or a sign-in; `BY_HAND` names the places.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import regular_file
from open_clip_zerovl.core.identity import sha256_of
from open_clip_zerovl.prepare.public.pictures import Failure
from open_clip_zerovl.shards.archives import BROKEN_ARCHIVE, find_member
from open_clip_zerovl.shards.fetch import fetch_file
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS, picture_files

_KARPATHY = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
_VG = (
    "https://homes.cs.washington.edu/~ranjay/visualgenome/data/dataset/region_descriptions.json.zip"
)

#: Addresses at which the makers publish each dataset.
OFFICIAL: dict[str, tuple[str, ...]] = {
    "sbu": ("https://www.cs.rice.edu/~vo9/sbucaptions/sbu-captions-all.tar.gz",),
    "cc12m": ("https://storage.googleapis.com/conceptual_12m/cc12m.tsv",),
    "vg": (
        _VG,
        "https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip",
        "https://cs.stanford.edu/people/rak248/VG_100K_2/images2.zip",
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

_PICTURES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


def locate(
    dataset: str, source: Sequence[str | Path] | None, folder: Path, *, progress: bool = True
) -> list[Path]:
    """The files and folders of a dataset: those given, or the official ones, fetched into a folder.

    Args:
        dataset: a key of OFFICIAL or BY_HAND.
        source: paths that were given; None to fetch.
        folder: the folder of the downloads.

    Raises:
        UserError: a file that cannot be fetched.
    """
    if source:
        return [Path(path).expanduser() for path in source]
    if dataset in BY_HAND:
        raise UserError(f"{BY_HAND[dataset]}.")
    paths = [folder / url.rpartition("/")[2] for url in OFFICIAL[dataset]]
    for url, path in zip(OFFICIAL[dataset], paths, strict=True):
        advice = (
            "give its path with --source, or try again later; the part that was fetched is kept"
        )
        fetch_file(url, path, advice=advice, progress=progress)
    return paths


def described(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Name, size in bytes and SHA-256 of each file, for the manifest."""
    return [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in paths
    ]


@contextmanager
def annotated(
    dataset: str,
    source: Sequence[str | Path] | None,
    out: Path,
    names: Sequence[str],
    *,
    progress: bool,
) -> Iterator[tuple[tuple[Path, str], PictureStore]]:
    """The annotation file of a dataset, as (path, name in an archive), and a store of its pictures.

    Args:
        dataset, source, progress: as for `locate`; downloads go into `out/downloads`.
        names: endings of the annotation file, the first one for messages.

    Raises:
        UserError: no annotations, or an error of `locate`.
    """
    paths = locate(dataset, source, out / "downloads", progress=progress)
    annotations = find_member(paths, names[0]) or find_member(
        [path for path in paths if path.suffix == ".json"], *names
    )
    if annotations is None:
        raise UserError(
            f"{names[0]} is not in {', '.join(map(str, paths))}: give it with --source."
        )
    with closing(PictureStore(path for path in paths if path != annotations[0])) as store:
        yield annotations, store


class PictureStore:
    """Pictures by file name, in folders (searched to any depth) and zips. `store(name)` -> bytes; any thread may call it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: dict[str, Path | tuple[zipfile.ZipFile, str]] = {}
        self._archives = []
        self._paths = list(paths)
        for path in self._paths:
            if path.is_dir():
                self._places.update((file.name, file) for file in picture_files(path))
            elif zipfile.is_zipfile(path):
                archive = zipfile.ZipFile(path)
                self._archives.append(archive)
                for name in archive.namelist():
                    if name.lower().endswith(_PICTURES) and "__MACOSX" not in name:
                        self._places[name.rpartition("/")[2]] = (archive, name)

    def check(self, wanted: str) -> None:
        """UserError, which names the wanted inputs, for a store without pictures."""
        if not self._places:
            places = (
                f"in {', '.join(map(str, self._paths))}"
                if self._paths
                else "beside the annotations"
            )
            raise UserError(f"No pictures {places}: give {wanted} with --source.")

    def __call__(self, where: str) -> bytes:
        """The bytes of the picture with this file name; folders in `where` are ignored. Failure if there is none."""
        place = self._places.get(where.rpartition("/")[2])
        if place is None:
            raise Failure("picture missing", transient=True)  # a later call may name more folders
        try:
            if isinstance(place, Path):
                with regular_file(place) as file:
                    return file.read()
            archive, name = place
            return archive.read(name)
        except (OSError, *BROKEN_ARCHIVE) as error:
            raise Failure("picture cannot be read", transient=True) from error

    def close(self) -> None:
        """Close the zips."""
        for archive in self._archives:
            archive.close()
