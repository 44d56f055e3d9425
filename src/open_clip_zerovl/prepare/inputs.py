"""The form of an input, by its ending and contents, or as `--format` names it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of
from open_clip_zerovl.data.components import expand_shards
from open_clip_zerovl.data.splits import FolderSplits, split_above, split_of_name
from open_clip_zerovl.prepare.columned import SplitTables, TableReader, open_json
from open_clip_zerovl.prepare.folders import ClassReader, FolderReader, TarReader, class_levels
from open_clip_zerovl.prepare.parquet import ArrowReader, saved_files
from open_clip_zerovl.prepare.rows import Reader
from open_clip_zerovl.prepare.settings import FORMATS, Columns
from open_clip_zerovl.shards.fetch import Unreachable, fetch_file, is_current
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES, left_out, walk
from open_clip_zerovl.shards.urls import REMOTE, is_command, local_path

ENDINGS = {
    "table": (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"),
    "json": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow",),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
}
_IN_FOLDERS = {
    **ENDINGS,
    "table": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "json": (".jsonl", ".ndjson"),
}
_LOOKED_AT = 5_000  # files of a folder
_NAMED = re.compile(r"([^\W_][\w.-]*)=(.+)", re.DOTALL)


def named_input(text: str) -> tuple[str | None, Path]:
    """Split NAME=INPUT into (name or None, path), unless it exists as it is written."""
    match = _NAMED.fullmatch(text)
    if match and not Path(text).exists():
        return match[1], Path(match[2]).expanduser()
    return None, Path(text).expanduser()


def fetched(text: str, folder: Path, say: Callable[[str], None]) -> str:
    """Fetch parquet files at https:, hf:// or another address (with braces) into a folder, and leave other inputs as they
    are.

    Files that are there from an earlier call are kept, unless the server says that it has others now (ETag, date, size).

    Raises:
        UserError: a file that cannot be fetched after retries, or has changed since it was fetched.
    """
    named = _NAMED.fullmatch(text)
    name, address = (f"{named[1]}=", named[2]) if named and REMOTE.match(named[2]) else ("", text)
    if (
        local_path(address) is not None
        or is_command(address)
        or not address.lower().endswith(ENDINGS["parquet"])
    ):
        return text
    place = folder / digest_of(address)[:16]
    answers = True
    for number, url in enumerate(expand_shards(address)):
        file = place / f"{number:05d}-{url.rpartition('/')[2]}"
        if file.is_file():
            answers = answers and _require_same(url, file, say)
            continue
        say(f"fetching {url} to {file}")
        fetch_file(url, file, advice="check it, and call again: fetched files are kept")
        os.utime(file, (0, 0))  # fetched again it is the same input
    return f"{name}{place}"


def _require_same(url: str, file: Path, say: Callable[[str], None]) -> bool:
    """Ask the server whether a fetched file is still its own.

    Returns:
        False if the server does not answer.

    Raises:
        UserError: it has another file now.
    """
    try:
        if is_current(url, file):
            return True
    except Unreachable as error:
        say(f"{url} cannot be asked whether it has changed ({error}); the fetched files are used")
        return False
    raise UserError(
        f"{url} has changed since it was fetched to {file}; remove {file.parent} and pack into another --out, or give "
        "that folder in place of the address"
    )


def open_input(
    path: Path, wanted: Columns, form: str | None = None, templates: Sequence[str] | None = None
) -> Reader:
    """Open an input by the reader of its form.

    Args:
        path: a file or a folder.
        wanted: the chosen columns.
        form: one of FORMATS. None detects it.
        templates: the templates of the captions of classes.

    Raises:
        UserError: no such input, one of no known form or of several forms, or an error that the reader raises.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: correct the path")
    path = path.absolute()
    form = form or form_of(path)
    if form in ("folder", "classes"):
        return (
            FolderReader(path, wanted) if form == "folder" else ClassReader(path, wanted, templates)
        )
    if path.is_file():
        files = [path]
    else:
        files = saved_files(path) if form == "arrow" else _files(path, _IN_FOLDERS[form])
    if not files:
        raise UserError(f"{path} holds no file of --format {form} ({', '.join(_IN_FOLDERS[form])})")
    if form in ("parquet", "arrow"):
        return ArrowReader(form, path, files, wanted, templates)
    if form == "webdataset":
        return TarReader(path, files, wanted)
    opened = TableReader if form == "table" else open_json
    if len(files) == 1:
        return opened(files[0], wanted)
    if not all(split_of_name(file.name) or split_above(file) for file in files):
        raise UserError(
            f"{path} holds {len(files)} tables ({files[0].name}, {files[1].name} ...): give the table or the tables to pack"
        )
    return SplitTables(path, [opened(file, wanted) for file in files])


def form_of(path: Path) -> str:
    """Find the form of an input, one of FORMATS.

    Raises:
        UserError: a file of no known form, or a folder of none or several.
    """
    if path.is_dir():
        return _form_of_folder(path)
    name = path.name.lower()
    for form, endings in ENDINGS.items():
        if name.endswith(endings):
            return form
    raise UserError(
        f"{path.name} has no known ending: name its form with --format ({', '.join(FORMATS[1:])}); unpack an archive, "
        "and save a spreadsheet as CSV in UTF-8"
    )


def _form_of_folder(path: Path) -> str:
    """Find the form of a folder, from the endings of its first files and the texts beside pictures."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "arrow"
    counts: Counter[str] = Counter()
    pictures: set[str] = set()
    texts: set[str] = set()
    others: list[str] = []
    for file in islice(
        (Path(folder, name) for folder, names in walk(path) for name in names), _LOOKED_AT
    ):
        stem, suffix = os.path.splitext(str(file))
        if suffix.lower() in PICTURE_SUFFIXES:
            pictures.add(stem)
        if suffix in (".txt", ".json"):
            texts.add(stem)
        form = next(
            (form for form, ends in _IN_FOLDERS.items() if file.name.lower().endswith(ends)), None
        )
        if form:
            counts[form] += 1
        else:
            others.append(file.name)
    paired, tars = bool(pictures & texts), counts["webdataset"]
    # img2dataset writes a parquet of the addresses beside its tars, and beside its folders of pictures.
    if counts["parquet"] and not (paired or tars):
        return "parquet"
    forms = [form for form in ("webdataset", "table", "json") if counts[form]]
    forms += ["folder"] if paired or (tars and pictures) else []
    if len(forms) > 1:
        raise UserError(
            f"{path} holds data of several forms: choose with --format {' or '.join(forms)}, or give the file to pack"
        )
    if forms or counts["arrow"]:
        return forms[0] if forms else "arrow"
    if pictures:
        names = [os.path.relpath(picture, path) for picture in pictures]
        splits = FolderSplits(names)
        levels = class_levels(splits(name)[0] for name in names)
        return "classes" if levels else "folder"  # whose reader refuses it for want of captions
    raise UserError(
        f"{path} contains no pictures, table, parquet files or tars (found: {left_out(others) or 'nothing'}): give the "
        "folder or file of your pairs"
    )


def _files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """List the files of a folder and of those below it that have one of the endings, in order."""
    return [
        Path(here, name)
        for here, names in walk(folder)
        for name in names
        if name.lower().endswith(endings)
    ]
