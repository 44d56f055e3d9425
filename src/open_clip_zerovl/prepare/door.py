"""The door of every command: whatever is not shards is packed once, and read as shards from then on.

    x=pairs.csv    x=rows/*.parquet    x=photos    x=saved_to_disk    x=dataset.json@pictures
        ->  x=CACHE/packed/3f0c...     an output of `zerovl data pack`

The name of the folder is a digest of the settings, of the bytes of the inputs and of the pictures that they name: a copy of the
data is the same folder, and so is data with other times of change. Beyond MOST_GIB the folders that were used least recently
are removed, unless a process that lives has read them.
"""

from __future__ import annotations

import json
import logging
import shlex
from contextlib import suppress
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path

from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import digest_of, locked, user_cache
from open_clip_zerovl.data.components import expand_shards, kind_of
from open_clip_zerovl.data.names import NAME, name_of_folder
from open_clip_zerovl.data.sets import parse_retrieval_data
from open_clip_zerovl.prepare.columned import KarpathyReader
from open_clip_zerovl.prepare.inputs import ENDINGS, fetched, form_of, open_input
from open_clip_zerovl.prepare.pack import FORMAT, REPORT_FILE, content_of_input, pack
from open_clip_zerovl.prepare.rows import Reader, is_address
from open_clip_zerovl.prepare.settings import Columns, PackSettings, Work
from open_clip_zerovl.shards.fetch import hold, make_room, used_bytes
from open_clip_zerovl.shards.urls import is_parquet, local_path

MOST_ROWS = 1_000_000  # of an input; it is scanned at each start, which takes about 15 seconds then
MOST_GIB = 100  # of the packed folders together
_READING: dict[Path, int] = {}  # folders that this process reads -> their locks
# A text file is a list of addresses, if anything.
_ENDINGS = tuple(
    ending
    for form, endings in ENDINGS.items()
    for ending in endings
    if form != "webdataset" and ".txt" not in ending
)


def as_shards(
    data: str, columns: Columns | None = None, *, strict: bool = False, say: Say = logging.info
) -> str:
    """Pack the components of `--train-data` and its like that are not shards, unless an earlier call has packed them.

    Args:
        data: `name=DATA::name=DATA`.
        columns: columns of tables that the command line names.
        strict: refuse data with a row that cannot be used.
        say: is called with a line about each component that is packed.

    Returns:
        The same components, each of shards.

    Raises:
        UserError: data that cannot be packed, with addresses of pictures, or of more than MOST_ROWS rows.
    """
    components = []
    for component in data.split("::"):
        match = NAME.fullmatch(component)
        name, text = (match["name"], match["shards"]) if match else (None, component)
        home, folder = _packed(text, columns or Columns(), strict, say)
        components.append(
            component
            if folder is None
            else f"{name or name_of_folder(str(home.absolute()), text)}={folder}"
        )
    return "::".join(components)


def sets_as_shards(data: str, *, karpathy: bool = False, say: Say = logging.info) -> str:
    """Pack the retrieval sets that are neither shards nor Karpathy's annotations, and refuse rows that cannot be used.

    Args:
        data: sets as `parse_retrieval_data` takes them.
        karpathy: pack Karpathy's annotations too.

    Returns:
        Each set with its name. Of one that names no splits, its only one.

    Raises:
        UserError: as `parse_retrieval_data` and `as_shards`.
    """
    sets = []
    for name, place in parse_retrieval_data(data).items():
        _, folder = _packed(str(place), Columns(), True, say, karpathy=karpathy)
        if folder is not None and not (folder / "test").is_dir():
            folder /= "train"
        sets.append(f"{name}={folder or place}")
    return "::".join(sets)


def labelled_as_shards(data: str, *, say: Say = logging.info) -> str:
    """Name labelled sets, and pack those of parquet or Arrow rows.

    Args:
        data: sets as `parse_retrieval_data` takes them.

    Raises:
        UserError: as `sets_as_shards`.
    """
    sets = [f"{name}={place}" for name, place in parse_retrieval_data(data).items()]
    return "::".join(
        sets_as_shards(each, say=say) if holds_rows(Path(each.partition("=")[2])) else each
        for each in sets
    )


def holds_rows(place: Path) -> bool:
    """Return whether a folder or file holds parquet or Arrow rows, which commands of pictures read as shards."""
    with suppress(UserError):  # of other forms, or of several
        return place.exists() and form_of(place) in ("parquet", "arrow")
    return False


def _packed(
    text: str, columns: Columns, strict: bool, say: Say, *, karpathy: bool = True
) -> tuple[Path, Path | None]:
    """Return the folder that names a component, and the one that it is packed into, None for shards.

    Args:
        karpathy: pack Karpathy's annotations too.
    """
    home, inputs, pictures_in = _inputs(text)
    if pictures_in is not None:
        columns = replace(columns, pictures_in=pictures_in)
    readers = [open_input(path, columns) for path in inputs]
    if not readers or any(reader.form == "webdataset" for reader in readers):
        return home, None
    if not karpathy and any(isinstance(reader, KarpathyReader) for reader in readers):
        return home, None
    settings = PackSettings(columns=columns)
    command = f"`zerovl data pack {' '.join(shlex.quote(str(path)) for path in inputs)} --out DIR`"
    contents = [_content(reader, command) for reader in readers]
    key = digest_of(FORMAT, {**settings.described(), "pictures_in": None}, contents)
    folder = user_cache("open_clip_zerovl") / "packed" / key
    keep_in_use(folder)
    if not (folder / REPORT_FILE).is_file():
        say(f"Packing {text} into {folder}, once: it is read from there")
    with locked(folder):  # another rank or another command waits here for its shards
        if not (folder / REPORT_FILE).is_file():
            pack(list(map(str, inputs)), folder, settings, work=Work(progress=False), content=key)
    limit_size(folder.parent, say)
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    reasons = ", ".join(f"{entry['rows']:,} {why}" for why, entry in report["refused"].items())
    if strict and reasons:
        raise UserError(
            f"{text} has rows that cannot be used ({reasons}; {folder}/refused.csv names them): mend or remove them"
        )
    left_out = f"; rows refused: {reasons} (refused.csv there)" if reasons else ""
    if report["repeated_rows"]:
        left_out += f"; {report['repeated_rows']:,} rows repeat earlier ones"
    say(f"{text}: {report['pictures']:,} pictures as shards in {folder}{left_out}")
    return home, folder


def keep_in_use(folder: Path) -> None:
    """Keep a folder from `make_room` until this process ends."""
    if folder not in _READING:
        _READING[folder] = hold(folder)


def limit_size(place: Path, say: Say, most_bytes: int = MOST_GIB << 30) -> None:
    """Remove the least recently used folders of a place beyond a size, but none that a process keeps in use."""
    with locked(place, name=".room"):
        folders = [each for each in place.iterdir() if each.is_dir() and each.name[0] != "."]
        removed = make_room({each: used_bytes(each) for each in folders}, most_bytes)
    if removed:
        say(
            f"{place}: removed the {len(removed)} least recently used folders, beyond {most_bytes >> 30} GiB"
        )


def _inputs(text: str) -> tuple[Path, list[Path], Path | None]:
    """Return the folder that names a component, the inputs to pack, [] for shards, and the folder of their pictures."""
    if local_path(text) is None:
        cache = user_cache("open_clip_zerovl") / "fetched"
        inputs = [Path(fetched(text, cache, logging.info))] if is_parquet(text) else []
        return Path(text.partition(":")[2]).parent, inputs, None
    component = kind_of(local_path(text) or text)
    place = Path(component.path)
    if place.is_dir():
        return place, [] if component.kind in ("shards", "packed", "benchmark") else [place], None
    if not component.path.lower().endswith(_ENDINGS):
        return place.parent, [], None
    pictures_in = None if component.beside is None else Path(component.beside)
    return place.parent, [Path(each) for each in expand_shards(component.path)], pictures_in


def _content(reader: Reader, command: str) -> list[str | None]:
    """Name the files of an input, and digest them and the pictures of its rows.

    Raises:
        UserError: addresses of pictures, or too many rows.
    """
    too_many = UserError(
        f"{reader.path} has more than {MOST_ROWS:,} rows, which are not packed on the way: call {command} once and give DIR"
    )
    if max(reader.total or 0, len(reader.files)) > MOST_ROWS:
        raise too_many
    rows = reader.rows() if reader.names_pictures and not reader.pictures else iter(())
    outside = (row.place for row in takewhile(lambda row: row.content is None, rows) if row.place)
    pictures: list[str] = []
    for place in chain(map(str, reader.pictures), outside):
        if is_address(place):
            raise UserError(
                f"{reader.path} holds addresses of pictures ({place[:80]}): fetch them into shards with {command}"
            )
        pictures.append(place)
        if len(pictures) > MOST_ROWS:
            raise too_many
    return [reader.splits.above, *content_of_input(reader, pictures)]
