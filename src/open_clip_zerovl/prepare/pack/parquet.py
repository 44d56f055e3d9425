"""Parquet files: the columns of pictures and of classes, and the rows. They are read by pyarrow, without threads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError, first_line

ROWS_AT_ONCE = 64  # whose pictures are in memory
_BUFFER_BYTES = 1 << 20  # of a column; without it a row group's whole column would be in memory
_NOT_UTF8 = b"\xff"  # stands for a text that is not UTF-8


def pyarrow() -> Any:
    """Import the package on first use, which is an extra of this project."""
    import pyarrow as package
    import pyarrow.parquet

    return package


def opened(file: Path) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`, which is a context manager. Reading raises the errors of pyarrow."""
    # pre_buffer reads the whole file at once.
    return pyarrow().parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)


@contextmanager
def faults_named(file: object, fault: str) -> Iterator[None]:
    """Name errors of pyarrow by these words.

    Raises:
        UserError: an error of pyarrow.
    """
    try:
        yield
    except (pyarrow().ArrowException, OSError) as error:
        raise UserError(f"{file} {fault} ({first_line(error)}): write or fetch it again") from error


def picture_columns(schema: Any) -> list[str]:
    """List the columns that hold pictures by their type (bytes, or Hugging Face's image), one called `image` first."""
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
    """Return column -> names of the classes, of the columns of ClassLabel that `datasets` has noted, the finest first."""
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
    """Yield the rows of Arrow's record batches, with bytes that are not UTF-8 in place of a text that is not."""

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


def batches_of(table: Any, names: Iterable[str]) -> Iterator[Any]:
    """Iterate over the record batches of a ParquetFile, with these columns."""
    yield from table.iter_batches(ROWS_AT_ONCE, columns=list(names), use_threads=False)
