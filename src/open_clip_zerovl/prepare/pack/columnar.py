"""Parquet files and the Arrow files of `datasets.Dataset.save_to_disk`, through pyarrow.

A picture is bytes, Hugging Face's {bytes, path}, a path or an address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.prepare.pack.columns import Chosen, choose
from open_clip_zerovl.prepare.pack.paths import Places
from open_clip_zerovl.prepare.pack.rows import Columns, PairRow, Reader
from open_clip_zerovl.prepare.public.pictures import Failure

_ROWS_AT_ONCE = 64  # of a parquet file: their pictures are in memory


def pyarrow() -> Any:
    """The package. UserError where it is missing."""
    try:
        import pyarrow as package
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "parquet and Arrow files are read by pyarrow, which is missing: `pip install pyarrow` (or "
            "`pip install 'open_clip_zerovl[parquet]'`)"
        ) from error
    return package


class ParquetReader(Reader):
    """Parquet files with the same columns."""

    form = "parquet"

    def __init__(self, path: Path, files: list[Path], wanted: Columns) -> None:
        arrow = pyarrow()
        self.path, self.files, self.wanted = path, files, wanted
        self.total = 0
        self.chosen: Chosen | None = None
        for file in files:
            try:
                with arrow.parquet.ParquetFile(file) as opened:
                    self.total += opened.metadata.num_rows
                    schema = opened.schema_arrow
            except (arrow.ArrowException, OSError) as error:
                raise UserError(
                    f"{file} is no parquet file, or a broken one ({first_line(error)}): write or fetch it again"
                ) from error
            chosen = _chosen(arrow, file, schema, wanted)
            if self.chosen is not None and self.chosen != chosen:
                raise UserError(
                    f"{file} has other columns ({chosen.words}) than {files[0]} ({self.chosen.words}): pack them one at a time"
                )
            self.chosen = chosen
        assert self.chosen is not None
        self.columns = self.chosen.words

    def rows(self) -> Iterator[PairRow]:
        assert self.chosen is not None
        arrow = pyarrow()
        names = list(dict.fromkeys([self.chosen.picture, *self.chosen.captions, *filter(None, [self.chosen.source])]))
        for file in self.files:
            places = Places(file, self.wanted.pictures_in)
            yield from places.checked(self._rows(arrow, file, names, places))

    def _rows(self, arrow: Any, file: Path, names: list[str], places: Places) -> Iterator[PairRow]:
        assert self.chosen is not None
        number = 0
        try:
            with arrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names):
                    for values in batch.to_pylist():
                        number += 1
                        yield _row(self.chosen, values, places, file.name, number, f"{file}#{number}")
        except (arrow.ArrowException, OSError) as error:
            raise UserError(
                f"{file} cannot be read after row {number} ({first_line(error)}): write or fetch it again"
            ) from error


class ArrowReader(Reader):
    """A folder of `save_to_disk`, or a single `.arrow` file. Files are mapped into memory, so that pictures are found again."""

    form = "arrow"

    def __init__(self, path: Path, files: list[Path], wanted: Columns) -> None:
        arrow = pyarrow()
        self.path, self.files, self.wanted = path, files, wanted
        self.tables = {str(file): _mapped(arrow, file) for file in files}
        self.total = sum(table.num_rows for table in self.tables.values())
        self.chosen = _chosen(arrow, files[0], next(iter(self.tables.values())).schema, wanted)
        self.columns = self.chosen.words

    def rows(self) -> Iterator[PairRow]:
        chosen = self.chosen
        others = [name for name in dict.fromkeys([*chosen.captions, chosen.source]) if name is not None]
        for file, table in self.tables.items():
            places = Places(Path(file), self.wanted.pictures_in)
            has_bytes = _holds_bytes(pyarrow(), table.schema.field(chosen.picture).type)
            rows = self._rows(file, table.select(others), table.column(chosen.picture), places, has_bytes)
            yield from rows if has_bytes else places.checked(rows)

    def _rows(self, file: str, table: Any, pictures: Any, places: Places, has_bytes: bool) -> Iterator[PairRow]:
        number = 0
        for batch in table.to_batches(max_chunksize=1024):
            for values in batch.to_pylist():
                number += 1
                # Of a picture's bytes only the row's number is kept; a path or an address is read here.
                value = "" if has_bytes else pictures[number - 1].as_py()
                row = _row(self.chosen, {**values, self.chosen.picture: value}, places, Path(file).name, number, "")
                if has_bytes:
                    row = row._replace(place=f"{file}#{number - 1}", content=None, refused="")
                yield row

    def obtain(self, place: str) -> bytes:
        file, _, number = place.rpartition("#")
        if file not in self.tables:
            return super().obtain(place)
        value = self.tables[file].column(self.chosen.picture)[int(number)].as_py()
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):
                return super().obtain(Places(Path(file), self.wanted.pictures_in).place(value["path"]))
            value = value.get("bytes")
        if not value:
            raise Failure("no picture")
        return value


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, in their order.

    Raises:
        UserError: a folder of several splits, or one whose list of files cannot be read.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = sorted(
            (path.parent.name for path in folder.glob("*/state.json")), key=lambda name: (name != "train", name)
        )
        raise UserError(
            f"{folder} holds the splits {', '.join(names)} of a dataset: give one, as {folder / (names or ['train'])[0]}"
        )
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        files = [folder / str(entry["filename"]) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{folder / 'state.json'} does not list the Arrow files of a dataset ({first_line(error)}): save the dataset again"
        ) from error
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise UserError(f"{missing[0] if missing else folder} is missing from the dataset: copy or save it again")
    return files


def _mapped(arrow: Any, file: Path) -> Any:
    try:
        source = arrow.memory_map(str(file))
        try:
            return arrow.ipc.open_stream(source).read_all()
        except arrow.ArrowInvalid:
            source.seek(0)
            return arrow.ipc.open_file(source).read_all()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is no Arrow file, or a broken one ({first_line(error)}): save it again") from error


def _chosen(arrow: Any, file: Path, schema: Any, wanted: Columns) -> Chosen:
    """The columns; where none is named, one that holds pictures' bytes comes before names are looked at."""
    pictures = [field.name for field in schema if _holds_bytes(arrow, field.type)]
    if "image" in pictures:
        pictures.insert(0, "image")
    chosen = choose(str(file), schema.names, wanted, pictures=pictures)
    kind = schema.field(chosen.picture).type
    if not (_holds_bytes(arrow, kind) or arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise UserError(
            f"the picture column {chosen.picture!r} of {file} holds {kind}, neither bytes, Hugging Face's image nor text: name "
            "another with --picture-column"
        )
    return chosen


def _holds_bytes(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return types.is_binary(kind) or types.is_large_binary(kind)


def _row(chosen: Chosen, values: dict[str, Any], places: Places, file: str, number: int, place: str) -> PairRow:
    picture = values.get(chosen.picture)
    if isinstance(picture, dict):
        picture = picture.get("bytes") or picture.get("path")
    captions = [values.get(name) for name in chosen.captions]
    source = values.get(chosen.source) if chosen.source is not None else None
    if isinstance(picture, bytes) and picture:
        return PairRow(place, captions, file, number, source, content=picture)
    if isinstance(picture, str) and picture.strip():
        return PairRow(places.place(picture), captions, file, number, source)
    return PairRow("", captions, file, number, source, refused="no picture")
