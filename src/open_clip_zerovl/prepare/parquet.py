"""Parquet files and saved Arrow data sets, read by pyarrow without threads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.data.names import class_words
from open_clip_zerovl.prepare.columns import (
    Chosen,
    ColumnReader,
    RowFields,
    choose,
    guess_captions,
    listed,
)
from open_clip_zerovl.prepare.rows import ClassTemplates
from open_clip_zerovl.prepare.settings import Columns

ROWS_AT_ONCE = 64  # whose pictures are in memory
_BUFFER_BYTES = 1 << 20  # of a column; without it a row group's whole column would be in memory
_NOT_UTF8 = b"\xff"  # stands for a text that is not UTF-8


def pyarrow() -> Any:
    """Import the package on first use, which is an extra of this project."""
    import pyarrow as package
    import pyarrow.parquet

    return package


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


class ArrowReader(ColumnReader):
    """Parquet files, or the Arrow files of `datasets.Dataset.save_to_disk`, with the same columns.

    A table without captions whose `datasets` metadata names classes (cifar10, food101) is packed as folders of classes are.
    """

    words: Sequence[str] = ()  # of the classes, by number

    def __init__(
        self,
        form: str,
        path: Path,
        files: list[Path],
        wanted: Columns,
        templates: Sequence[str] | None = None,
    ) -> None:
        self.form, self.templates = form, ClassTemplates(templates)
        super().__init__(path, wanted, files)

    def _choose(self) -> Chosen:
        self.total = 0
        first: tuple[Chosen, Sequence[str]] | None = None
        for file in self.files:
            with self._reading(file) as table:
                schema, rows = (
                    (table.schema_arrow, table.metadata.num_rows)
                    if self.form == "parquet"
                    else (table.schema, table.num_rows)
                )
            chosen = self._choose_in(file, schema)
            first = first or (chosen, self.words)
            if (chosen, self.words) != first:  # a row names its class by a number
                raise UserError(
                    f"{file} has other columns or classes ({chosen.words}) than {self.files[0]} ({first[0].words}): "
                    "pack them one at a time"
                )
            self.total += rows
        return chosen

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        names = self.chosen.read
        with self._reading(file) as table:
            if self.form == "parquet":
                batches = table.iter_batches(ROWS_AT_ONCE, columns=names, use_threads=False)
            else:
                batches = table.select(names).to_batches(max_chunksize=ROWS_AT_ONCE)
            yield from enumerate(rows_of(batches), start=1)

    def _captions(self, fields: Mapping[str, Any]) -> tuple[list[Any], str | None]:
        if not self.words:
            return super()._captions(fields)
        number = fields.get(self.chosen.captions[0])
        if not isinstance(number, int) or not 0 <= number < len(self.words):
            return [], ""
        return list(self.templates.of(self.words[number])), self.words[number]

    @contextmanager
    def _reading(self, file: Path) -> Iterator[Any]:
        """Open a ParquetFile, or map an Arrow table into memory, and name the file in errors of pyarrow."""
        arrow = pyarrow()
        with reading(file, "write or fetch it again"):
            if self.form == "parquet":
                # pre_buffer reads the whole file at once.
                with arrow.parquet.ParquetFile(
                    file, buffer_size=_BUFFER_BYTES, pre_buffer=False
                ) as table:
                    yield table
                return
            with arrow.memory_map(str(file)) as source:
                try:
                    table = arrow.ipc.open_stream(source).read_all()
                except arrow.ArrowInvalid:
                    source.seek(0)
                    table = arrow.ipc.open_file(source).read_all()
                yield table

    def _choose_in(self, file: Path, schema: Any) -> Chosen:
        """Choose the columns, where pictures' bytes take precedence over guesses from names."""
        held = picture_columns(schema)
        wanted, classes = self.wanted, class_columns(schema)
        if wanted.captions is None and classes and not guess_captions(schema.names):
            wanted = replace(wanted, captions=(next(iter(classes)),))
        chosen = choose(str(file), schema.names, wanted, pictures=held)
        labels = [classes[name] for name in chosen.captions if name in classes]
        if labels and len(chosen.captions) == 1:
            self.words = class_words(
                labels[0],
                {},
                file,
                "name them in the file's metadata",
                numbers=self.templates.given,
            )
            self.classes = self.templates.zero_shot
            words = (
                f"picture {chosen.picture!r}, {len(self.words)} classes ({listed(self.words)}) of {chosen.captions[0]!r}, "
                f"captions {listed(self.templates.captions)}"
            )
            chosen = replace(chosen, words=words)
        return chosen


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` wrote, split by split, in their order.

    Raises:
        UserError: the list of files cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        names = sorted(
            {path.parent.name for path in folder.glob("*/state.json")},
            key=lambda name: (name != "train", name),
        )
        return [file for name in names for file in saved_files(folder / name)]
    state = folder / "state.json"
    with reading(state, "save the dataset again"):
        entries = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return [folder / str(entry["filename"]) for entry in entries]
