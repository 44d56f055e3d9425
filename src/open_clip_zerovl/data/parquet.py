"""Parquet files with a column of pictures as shards of a source: row i is sample i.

    column of pictures     bytes, or Hugging Face's image {bytes, path}
    columns of captions    texts, or lists of them; a sample's `txt` has one caption a line
    all other columns      the sample's `json`, where it is wanted

A reader that begins in the middle of a file skips the row groups before its first row. Rows are read by pyarrow, without
threads: loader workers are forks.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.data.columns import (
    CAPTION_FLAG,
    PICTURE_FLAG,
    Chosen,
    Wanted,
    choose,
    listed,
    texts_of,
)
from open_clip_zerovl.data.splits import split_column, split_of_word
from open_clip_zerovl.shards.fetch import ShardCache, Unreachable, is_shard
from open_clip_zerovl.shards.members import TEXT_EXTENSION, ShardError, unreadable, words_of
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.texts import NOT_UTF8

ROWS_AT_ONCE = 64  # whose pictures are in memory
_BUFFER_BYTES = 1 << 20  # of a column; without it a row group's whole column would be in memory
_NOT_UTF8 = b"\xff"  # stands for a text that is not UTF-8


def pyarrow() -> Any:
    """The package, imported on first use: an extra of this project."""
    import pyarrow as package
    import pyarrow.parquet

    return package


def opened(path: str) -> Any:
    """Return the `pyarrow.parquet.ParquetFile` of a path."""
    # pre_buffer reads the whole file at once.
    return pyarrow().parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


@contextmanager
def faults_named(file: object, fault: str) -> Iterator[None]:
    """UserError with these words for errors of pyarrow."""
    try:
        yield
    except Unreachable as error:
        raise UserError(f"{file} cannot be fetched ({error}); check the address") from error
    except (pyarrow().ArrowException, OSError) as error:
        raise UserError(f"{file} {fault} ({first_line(error)}): write or fetch it again") from error


def picture_columns(schema: Any) -> list[str]:
    """The columns that hold pictures by their type (bytes, or Hugging Face's image), one called `image` first."""
    arrow = pyarrow()
    binary, is_struct = (arrow.binary(), arrow.large_binary()), arrow.types.is_struct
    kinds = zip(schema.names, schema.types, strict=True)
    held = [
        name
        for name, kind in kinds
        if kind in binary or (is_struct(kind) and kind.get_field_index("bytes") >= 0)
    ]
    return sorted(held, key=lambda name: name != "image")


def class_columns(schema: Any) -> dict[str, list[str]]:
    """Return column -> names of the classes, of the columns of ClassLabel that `datasets` has noted; the finest first."""
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"]
        noted = {
            name: [str(word) for word in feature["names"]]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}
    columns = [name for name in noted if name in schema.names]
    return {name: noted[name] for name in sorted(columns, key=lambda name: -len(noted[name]))}


def rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The rows of Arrow's record batches; bytes that are not UTF-8 in place of a text that is not."""

    def value(cell: Any) -> Any:
        try:
            return cell.as_py()
        except UnicodeDecodeError:
            return _NOT_UTF8

    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for row in range(len(batch)):
                yield {name: value(batch[name][row]) for name in batch.schema.names}


def batches_of(table: Any, names: Iterable[str] | None, start: int = 0) -> Iterator[Any]:
    """Record batches of a ParquetFile from row `start` on, with these columns; None for all."""
    groups, columns = list(range(table.num_row_groups)), names and list(names)
    while groups and table.metadata.row_group(groups[0]).num_rows <= start:
        start -= table.metadata.row_group(groups.pop(0)).num_rows
    for batch in table.iter_batches(
        ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False
    ):
        yield batch.slice(start)
        start = max(0, start - len(batch))


def open_files(
    files: Sequence[str],
    picture: str | None,
    caption: str | None,
    cache: ShardCache,
    *,
    training: bool = False,
) -> tuple[dict[str, int], Chosen]:
    """The rows of each file, and the columns of the first, which all have. Remote files are fetched.

    Args:
        picture, caption: names of the columns; None for the one with pictures' bytes and the one with a caption's name.
        cache: the folder of fetched files.
        training: refuse held-out rows.

    Raises:
        UserError: a file cannot be read, or has no such columns; with `training` a column of splits with held-out rows.
    """
    captions = None if caption is None else (caption,)
    first, columns = _open_file(files[0], picture, captions, cache, training)
    logging.info(f"{files[0]}: {columns.words}")
    with ThreadPoolExecutor(max_workers=8) as pool:
        others = pool.map(
            lambda file: _open_file(file, columns.picture, columns.captions, cache, training)[0],
            files[1:],
        )
        return dict(zip(files, [first, *others], strict=True)), columns


def _open_file(
    file: str,
    picture: str | None,
    captions: tuple[str, ...] | None,
    cache: ShardCache,
    training: bool,
) -> tuple[int, Chosen]:
    with (
        faults_named(file, "is not a parquet file, or a broken one"),
        cache.borrowed(file, check=is_shard) as path,
        opened(path) as table,
    ):
        schema, rows = table.schema_arrow, table.metadata.num_rows
        split = split_column(schema.names)
        if training and split is not None and pyarrow().types.is_string(schema.field(split).type):
            words = table.read([split]).column(0).unique().to_pylist()
            held_out = [word for word in words if split_of_word(word) in ("val", "test")]
            if held_out:
                raise UserError(
                    f"{file} has rows of {listed(held_out)} in its column {split!r}, which are not trained on: make shards of "
                    f"each split with `zerovl data pack {shlex.quote(file)} --out DIR`"
                )
    held, names = picture_columns(schema), schema.names
    wanted = Wanted(picture, captions)
    chosen = choose(file, names, wanted, pictures=held, flags=(PICTURE_FLAG, CAPTION_FLAG))
    if chosen.picture not in held:
        raise UserError(
            f"{file} has no pictures' bytes in {listed([picture] if picture else names)}: for paths or addresses make shards "
            f"with `zerovl data pack {shlex.quote(file)} --out DIR`; a column of bytes is named with {PICTURE_FLAG}"
        )
    if any(pyarrow().types.is_primitive(schema.field(name).type) for name in chosen.captions):
        raise UserError(
            f"{file} has no captions in {listed(chosen.captions)}: name a column of text with {CAPTION_FLAG}"
        )
    return rows, chosen


def samples(
    file: str,
    columns: Chosen,
    start: int = 0,
    size: int = 0,
    *,
    whole: bool = False,
) -> Generator[tuple[str, dict[str, bytes]], None, None]:
    """(key, {suffix: content}) of each row from number `start` on; a row without a picture has none.

    Args:
        whole: with a `json` of all other columns.

    Raises:
        ShardError: the file is unreadable or broken, or has fewer than `size` rows; `readable` rows come before.
    """
    count, names = 0, None if whole else dict.fromkeys([columns.picture, *columns.captions])
    try:
        with opened(file) as table:
            count = min(start, table.metadata.num_rows)
            for fields in rows_of(batches_of(table, names, start)):
                yield f"{count:08d}", _members(fields, columns, whole)
                count += 1
    except (pyarrow().ArrowException, OSError) as error:
        if not count and isinstance(error, OSError):
            raise unreadable(error) from error
        raise ShardError(
            "truncated shard" if count else "unreadable shard", words_of(error), count
        ) from error
    if count < size:
        raise ShardError("short shard", f"it holds {count} of {size} samples", count)


def _members(fields: Mapping[str, Any], columns: Chosen, whole: bool) -> dict[str, bytes]:
    picture, members = fields.get(columns.picture), {}
    content = picture.get("bytes") if isinstance(picture, dict) else picture
    if isinstance(content, bytes) and content:
        members[IMAGE_EXTENSIONS[0]] = content
    texts, problem = texts_of([fields.get(name) for name in columns.captions])
    members[TEXT_EXTENSION] = _NOT_UTF8 if problem == NOT_UTF8 else "\n".join(texts).encode()
    if whole:
        about = {name: value for name, value in fields.items() if name != columns.picture}
        members["json"] = json.dumps(about, default=str).encode()
    return members
