"""The components of `--train-data`, `--retrieval-data`, `--data` ..., separated by `::`, and the kind of each.

    kind           written as
    shards         a folder of *.tar, a list of them (/d/{00000..00099}.tar), URLs; remote SHARDS@FILE.json names their sizes
    table          a .csv or .tsv of pairs, or a folder with one; TABLE@PICTURES
    annotations    Karpathy's .json; JSON@PICTURES
    packed         an output of `zerovl data pack` (pack.json)
    benchmark      a retrieval set in CLIP_benchmark's layout (dataset_type.txt, test/nshards.txt, test/0.tar)
    folder         any other folder

`kind_of` examines a component once, before anything is read.

The sizes of shards stand in the `sizes.json` of each shard's own folder; those of a command's output in a file that is named.

    shard                                          its sizes
    /d/sbu/00000.tar                               /d/sbu/sizes.json
    https://host/sbu/00000.tar?key=1               https://host/sbu/sizes.json?key=1
    s3://bucket/sbu/00000.tar                      s3://bucket/sbu/sizes.json
    pipe:fetch sbu/00000.tar@/d/sbu/sizes.json     the file named after the at sign
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import braceexpand

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import SPLITS
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, Unreachable
from open_clip_zerovl.shards.files import (
    MANIFEST_FILE,
    RETRIEVAL_MARK,
    SIZES_FILE,
    parse_sizes,
    read_sizes,
)
from open_clip_zerovl.shards.urls import REMOTE, is_command, local_path, matching_urls

EXTENSIONS = (".csv", ".tsv")  # of tables
PACKED = "pack.json"  # marks an output of `zerovl data pack`
_NAMED_SIZES = re.compile(r"(.+)@([^@]+\.json)", re.DOTALL)
_ANNOTATIONS = re.compile(r"(.+?\.(?:json|csv|tsv))(?:@(.+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Component:
    """A component without its name.

    Attributes:
        kind: see the module's text.
        path: a path, or for shards a pattern.
        beside: the text after an at sign; None without one.
    """

    kind: str
    path: str
    beside: str | None = None


def kind_of(text: str) -> Component:
    """Parse the component that a text names. Of a folder its own entries are examined, and a path need not exist.

    Raises:
        UserError: a folder with several tables.
    """
    if REMOTE.match(text):
        # An at sign in a local path is part of the path, unless it follows annotations.
        sizes = None if text.startswith("file:") else _NAMED_SIZES.fullmatch(text)
        return Component("shards", *sizes.groups()) if sizes else Component("shards", text)
    path = os.path.expanduser(text)
    if Path(path).is_dir():
        return Component(_kind_of_folder(path), path)
    if (annotations := _ANNOTATIONS.fullmatch(path)) is not None:
        pictures_folder = None if annotations[2] is None else os.path.expanduser(annotations[2])
        return Component(
            "table" if annotations[1].lower().endswith(EXTENSIONS) else "annotations",
            annotations[1],
            pictures_folder,
        )
    return Component("shards", path)


def packed_folders(folder: str | Path) -> dict[str, Path]:
    """Return source -> folder with its splits in an output of `zerovl data pack`, of one source {"": the output itself}."""
    place = Path(folder)
    if _has_splits(place):
        return {"": place}
    return {entry.name: entry for entry in sorted(place.iterdir()) if _has_splits(entry)}


def pack_file(split: Path) -> Path | None:
    """Return the `pack.json` above a split's folder in an output of `zerovl data pack`, None for other folders."""
    files = [above / PACKED for above in split.parents[:2]] if split.name in SPLITS else []
    return next((file for file in files if file.is_file()), None)


def _has_splits(folder: Path) -> bool:
    return any((folder / split).is_dir() for split in SPLITS)


def _kind_of_folder(folder: str) -> str:
    if Path(folder, PACKED).is_file():
        return "packed"
    if any(Path(folder).glob("*.tar")):
        return "shards"
    if Path(folder, RETRIEVAL_MARK).is_file():
        return "benchmark"
    tables = [entry for entry in Path(folder).iterdir() if entry.suffix.lower() in EXTENSIONS]
    return "table" if tables else "folder"


def expand_shards(pattern: str) -> tuple[str, ...]:
    """List the shards of a folder, or of a pattern with braces or *.

    Raises:
        UserError: a folder without shards, or a pattern of no files.
        ValueError: braces that do not match.
    """
    if REMOTE.match(pattern) or not os.path.isdir(pattern):
        return tuple(
            shard for name in braceexpand.braceexpand(pattern) for shard in _matching(name)
        )
    # A shard that sizes.json lists and that is missing belongs to the source too: it counts as lost.
    listed = {
        name for name in read_sizes(pattern) or () if name.endswith(".tar") and "/" not in name
    }
    listed |= {path.name for path in Path(pattern).glob("*.tar")}
    if not listed:
        raise UserError(
            f"folder {pattern} holds no *.tar shards; name a folder of webdataset shards, or make shards of its pictures with "
            f"`zerovl data pack {pattern} --out DIR`"
        )
    return tuple(str(Path(pattern, name)) for name in sorted(listed))


def _matching(name: str) -> list[str]:
    """List the files that a name with * stands for, or any other name by itself. UserError if there are none."""
    path = local_path(name)
    if "*" not in (name.partition("?")[0] if path is None else path) or is_command(name):
        return [name]
    if path is not None and os.path.exists(path):
        return [name]
    files = matching_urls(name) if path is None else sorted(glob.glob(path.replace("[", "[[]")))
    if not files:
        raise UserError(f"no file is named like {name}; correct the pattern")
    return files


# ---------------------------------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------------------------------

# the end of a URL that names a tar
_TAR = re.compile(r"(?P<name>[^/?]+\.(?:tar|tgz)\b[^/?]*)(?P<query>\?.*)?$")


def listed_sizes(
    shards: Sequence[str], file: str | None = None, cache: ShardCache | None = None
) -> dict[str, int]:
    """Return shard -> samples, for the shards that a `sizes.json` lists.

    Args:
        file: one file for all shards, listed there by file name; None for the file beside each shard.
        cache: the folder of fetched files.

    Raises:
        UserError: an unreadable file, wrong numbers, or a server that does not answer.
    """
    tables: dict[str, dict[str, int]] = {}
    known: dict[str, int] = {}
    for shard in shards:
        name, place = _name_and_place(shard, SIZES_FILE)
        place = file if file is not None else place
        if place is None:
            continue
        if place not in tables:
            tables[place] = _read(place, cache or ShardCache())
        if name in tables[place]:
            known[shard] = tables[place][name]
    return known


def is_packed(shard: str, file: str | None = None, cache: ShardCache | None = None) -> bool:
    """Return whether `zerovl data pack` wrote a shard, by the manifest in its folder, which may have been copied alone.

    Args:
        file, cache: as for `listed_sizes`; the manifest is looked for beside the file.

    Raises:
        UserError: a server that does not answer.
    """
    _, place = _name_and_place(file or shard, MANIFEST_FILE)
    if place is None:
        return False
    try:
        manifest = _bytes_of(place, cache or ShardCache())
    except (Unreachable, OSError):  # there is none
        return False
    try:
        return "made_from" in json.loads(manifest)
    except (ValueError, TypeError):  # another program's
        return False


def _name_and_place(shard: str, file: str) -> tuple[str, str | None]:
    """Return the file name of a shard, and the path or URL of a file in its folder, None for a command's output."""
    if is_command(shard):
        names = set(re.findall(r"[^\s/'\"]+\.(?:tar|tgz)\b[\w.]*", shard))
        return names.pop() if len(names) == 1 else shard, None
    path = local_path(shard)
    if path is not None:
        return os.path.basename(path), os.path.join(os.path.dirname(path), file)
    match = _TAR.search(shard)
    if match is None:
        return os.path.basename(shard), os.path.join(os.path.dirname(shard), file)
    return match["name"], shard[: match.start()] + file + (match["query"] or "")


def _read(place: str, cache: ShardCache) -> dict[str, int]:
    path = local_path(place)
    if path is not None and os.path.basename(path) == SIZES_FILE:
        return read_sizes(os.path.dirname(path) or ".") or {}
    try:
        return parse_sizes(_bytes_of(place, cache), place)
    except Unreachable as error:
        logging.warning(f"{place} cannot be read ({error}).")
        return {}


def _bytes_of(place: str, cache: ShardCache) -> bytes:
    """Read a small file beside shards, of this machine or a server.

    Raises:
        Unreachable: its server says that there is none.
        UserError: its server does not answer.
        OSError: it cannot be read.
    """
    path = local_path(place)
    if path is not None:
        return Path(path).read_bytes()
    try:
        with cache.borrowed(place, RetryPolicy()) as fetched:
            return Path(fetched).read_bytes()
    except Unreachable as error:
        if error.passing:
            raise UserError(
                f"{place} could not be fetched ({error}); check the host, or name a local copy (SHARDS@/path/{SIZES_FILE})"
            ) from error
        raise
