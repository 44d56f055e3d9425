"""Inputs whose rows have named columns: CSV and TSV, JSON lines and lists, MS-COCO's annotations, parquet and Arrow files."""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.data.names import class_words
from open_clip_zerovl.prepare.pack import parquet
from open_clip_zerovl.prepare.pack.columns import (
    Chosen,
    choose,
    guess_captions,
    guess_separator,
    listed,
)
from open_clip_zerovl.prepare.pack.csv_rows import CsvRows
from open_clip_zerovl.prepare.pack.places import Places, public_name
from open_clip_zerovl.prepare.pack.rows import ADDRESS, ClassTemplates, Reader, Row, word_of
from open_clip_zerovl.prepare.settings import Columns
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES
from open_clip_zerovl.shards.texts import encoding_of, json_array, members, open_member

_LOOKED_AT = 100  # objects of a JSON file, for the names of columns
_COCO_LISTS = re.compile(rb'"(images|annotations)"\s*:\s*\[')
_SENTENCES = re.compile(rb'"sentences"\s*:\s*\[')  # of an image of Karpathy's
_BEGINNING_BYTES = 1 << 20

#: A row by the names of its columns, or the reason why it cannot be read.
RowFields = Mapping[str, Any] | str


class ColumnReader(Reader):
    """One of the columns names a row's picture (a path, an address), or holds it: bytes, or Hugging Face's {bytes, path}."""

    names_pictures = True
    chosen: Chosen
    wanted: Columns

    def _of_file(self, path: Path, wanted: Columns) -> None:
        self.path, self.wanted = path, wanted
        self.files = [path]
        self.splits = self._splits_of_files()

    @property
    def split_column(self) -> str | None:  # type: ignore[override]
        """Name the column that says the split of a row."""
        return self.chosen.split

    @abstractmethod
    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        """Yield (line, or number from 1, and record) of each row of a file, with at least the columns that are chosen."""

    def rows(self) -> Iterator[Row]:
        for file in self.files:
            places = Places(file, self.wanted.pictures_in)
            split = self._split_of(file) if self.splits.says else ""
            for row in places.checked(self._rows(file, places)):
                yield row if row.split else row._replace(split=split)

    def _rows(self, file: Path, places: Places) -> Iterator[Row]:
        chosen = self.chosen
        for line, fields in self.records(file):
            if isinstance(fields, str):
                yield Row("", (), file.name, line, refused=fields)
                continue
            picture, name = fields.get(chosen.picture), ""
            if isinstance(picture, dict):
                content, name = picture.get("bytes"), str(picture.get("path") or "")
                picture = content if isinstance(content, bytes) and content else picture.get("path")
            captions, label = self._captions(fields)
            row = Row(
                "",
                captions,
                file.name,
                line,
                fields.get(chosen.source) if chosen.source else None,
                label=label,
                split=word_of(fields.get(chosen.split)) if chosen.split else "",
            )
            if label == "":
                yield row._replace(label=None, refused="no class")
            elif isinstance(picture, bytes) and picture:
                yield row._replace(place=f"{file}#{line}", content=picture, name=public_name(name))
            elif isinstance(picture, str):
                yield row._replace(place=places.place(picture), name=public_name(picture))
            else:
                yield row._replace(refused="no picture named")

    def _captions(self, fields: Mapping[str, Any]) -> tuple[list[Any], str | None]:
        """Return the captions of a row, and its class: None without classes, "" for a row that has none."""
        return [fields.get(name) for name in self.chosen.captions], None


class TableReader(ColumnReader):
    """A CSV or TSV file, also gzipped, whose first line tells separator and columns."""

    form = "table"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        header = self._first_line()
        # a spreadsheet's line of its own
        said = re.fullmatch(r"sep=(.)", header)
        self.begin = 1 if said else 0
        try:
            header = self._first_line(skip=self.begin)
            self.separator = wanted.separator or (said[1] if said else guess_separator(header))
            self.names = [
                name.strip() for name in next(csv.reader([header], delimiter=self.separator), [])
            ]
        except (
            csv.Error
        ) as error:  # a field of more than 128 KiB, or a carriage return between fields
            lines = (
                " (lines that end in a carriage return alone, as some programs save them?)"
                if "\r" in header
                else ""
            )
            raise UserError(
                f"the first line of {path} cannot be read as columns{lines}: save it as CSV with line ends of Unix or Windows"
            ) from error
        self.has_header = not any(_names_a_picture(name) for name in self.names)
        self.chosen = (
            choose(str(path), self.names, wanted) if self.has_header else self._headerless()
        )
        header_words = "" if self.has_header else "; no header line"
        self.columns = f"{self.chosen.words}, separator {self.separator!r}{header_words}"

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        chosen = self.chosen
        places = [(name, self.names.index(name)) for name in chosen.read]
        least = max(place for _, place in places)
        stray: list[int] = []
        with opened_table(file) as table:
            for _ in range(self.begin):
                table.readline()
            records = CsvRows(
                cast(BinaryIO, table), self.separator, tuple(PICTURE_SUFFIXES), line=1 + self.begin
            )
            shape = len(self.names), self.names.index(chosen.picture)
            if not self.has_header:
                records.width, records.image = shape
            for number, record in enumerate(records):
                if number == 0 and self.has_header:
                    records.width, records.image = shape
                elif not record.readable:
                    yield record.line, record.odd
                elif len(record.fields) <= least:
                    yield record.line, "fewer fields than the header"
                else:
                    if record.odd:  # read as it stands
                        stray.append(record.line)
                    yield record.line, {name: record.fields[place] for name, place in places}
        if stray:
            shown = ", ".join(map(str, stray[:3])) + (" ..." if len(stray) > 3 else "")
            self.notes = [
                f"a stray quote in {len(stray)} lines, which are read as they stand, quote included: {shown}"
            ]

    def _first_line(self, skip: int = 0) -> str:
        with opened_table(self.path) as file:
            for _ in range(skip):
                file.readline(1 << 20)
            first = file.readline(1 << 20)
        if b"\0" in first:
            raise UserError(
                f"{self.path} is not UTF-8 text (UTF-16 without its mark?): save it as CSV in UTF-8"
            )
        return first.decode("utf-8-sig", "replace").rstrip("\r\n")

    def _headerless(self) -> Chosen:
        """Choose the columns of a table whose first line is a row: numbers, or one picture and one caption."""
        fields, self.names = self.names, [str(number + 1) for number in range(len(self.names))]
        wanted = self.wanted
        if wanted.picture is None and wanted.captions is None and len(fields) == 2:
            picture = next(
                name
                for name, field in zip(self.names, fields, strict=True)
                if _names_a_picture(field)
            )
            caption = next(name for name in self.names if name != picture)
            return Chosen(
                picture,
                (caption,),
                None,
                f"picture {picture}, caption {caption} (counted from 1, guessed)",
            )
        if wanted.picture is None or wanted.captions is None:
            shown = listed([field if len(field) <= 40 else f"{field[:40]}..." for field in fields])
            raise UserError(
                f"{self.path} has no header line (its first line is {shown}): number its columns, as --picture-column 1 "
                "--caption-column 2, or write their names above"
            )
        return choose(str(self.path), self.names, wanted)


class JsonReader(ColumnReader):
    """JSON lines, or one JSON list of objects, also gzipped."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        with opened_table(path) as file:
            first = file.readline(1 << 20).decode("utf-8-sig", "replace").lstrip()
        self.is_list = first.startswith("[")
        names = _names(fields for _, fields in islice(self.records(path), _LOOKED_AT))
        if not names:
            raise UserError(
                f"{path} holds no JSON objects, neither one a line nor in a list (it begins with {first[:40]!r}): write one "
                'object a line, as {"image": "1.jpg", "caption": "a dog"}'
            )
        self.chosen = choose(str(path), names, wanted)
        self.columns = self.chosen.words

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        for line, value in self._values(file):
            yield line, value if isinstance(value, dict) else "no JSON object"

    def _values(self, file: Path) -> Iterator[tuple[int, Any]]:
        with opened_table(file) as table:
            if self.is_list:
                yield from enumerate(json_array(table, str(file)), start=1)
                return
            for line, text in enumerate(table, start=1):
                if text.strip():
                    try:
                        yield line, json.loads(text.decode("utf-8-sig", "surrogateescape"))
                    except (ValueError, RecursionError):
                        yield line, None


class CocoReader(ColumnReader):
    """Captions as MS-COCO publishes them: one JSON object with `images` (id, file_name) and `annotations` (image_id, caption).

    A row is an annotation. The entries of all images are in memory.
    """

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        with opened_table(path) as file:
            images = (
                image
                for image in json_array(file, str(path), key="images")
                if isinstance(image, dict)
            )
            self.images = {
                image["id"]: image for image in images if isinstance(image.get("id"), int | str)
            }
        names = _names(fields for fields in islice(self._annotations(path), _LOOKED_AT))
        self.chosen = choose(
            str(path),
            _names([*islice(self.images.values(), _LOOKED_AT), dict.fromkeys(names)]),
            replace(wanted, picture="file_name"),
        )
        self.columns = f"annotations as MS-COCO's, caption {listed(self.chosen.captions)}"

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        for number, fields in enumerate(self._annotations(file), start=1):
            wanted = fields.get("image_id")
            image = self.images.get(wanted, {}) if isinstance(wanted, int | str) else {}
            yield number, {**image, **fields, "file_name": image.get("file_name")}

    def _annotations(self, file: Path) -> Iterator[dict[str, Any]]:
        with opened_table(file) as table:
            for entry in json_array(table, str(file), key="annotations"):
                yield entry if isinstance(entry, dict) else {}


class KarpathyReader(ColumnReader):
    """Karpathy's splits of MS-COCO and Flickr30K, one JSON object whose `images` are the rows, each with its sentences."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        words = "annotations as Karpathy's, captions of 'sentences', split 'split'"
        self.chosen = Chosen("file_name", ("sentences",), wanted.source, words, "split")
        self.columns = words

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        with opened_table(file) as table:
            for number, image in enumerate(json_array(table, str(file), key="images"), start=1):
                if not isinstance(image, dict) or not isinstance(image.get("filename"), str):
                    yield number, "no picture named"
                    continue
                folder = str(image.get("filepath") or "")
                yield number, {**image, "file_name": os.path.join(folder, image["filename"])}


class SplitTables(Reader):
    """The tables of a folder, each of one split: `train.csv` and `test.csv`, `train/metadata.csv` and `test/metadata.csv`."""

    names_pictures = True

    def __init__(self, path: Path, readers: Sequence[ColumnReader]) -> None:
        self.path, self.readers = path, readers
        self.files = [reader.path for reader in readers]
        self.form = readers[0].form
        self.columns = "; ".join(dict.fromkeys(reader.columns for reader in readers))
        self.splits = self._splits_of_files()

    def rows(self) -> Iterator[Row]:
        for reader in self.readers:
            yield from reader.rows()
        self.notes = [note for reader in self.readers for note in reader.notes]


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
        self.path = path
        self.files = files
        self.wanted = wanted
        self.splits = self._splits_of_files()
        self.total = 0
        for file in files:
            with self._reading(file, "is not a {form} file, or a broken one") as table:
                schema, rows = (
                    (table.schema_arrow, table.metadata.num_rows)
                    if form == "parquet"
                    else (table.schema, table.num_rows)
                )
            chosen = self._choose(file, schema)
            if file != files[0] and self.chosen != chosen:
                raise UserError(
                    f"{file} has other columns ({chosen.words}) than {files[0]} ({self.chosen.words}): pack them one at a time"
                )
            self.chosen, self.columns = chosen, chosen.words
            self.total += rows

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        names = self.chosen.read
        with self._reading(file, "cannot be read to its end") as table:
            batches = (
                parquet.batches_of(table, names)
                if self.form == "parquet"
                else table.select(names).to_batches(max_chunksize=parquet.ROWS_AT_ONCE)
            )
            yield from enumerate(parquet.rows_of(batches), start=1)

    def _captions(self, fields: Mapping[str, Any]) -> tuple[list[Any], str | None]:
        if not self.words:
            return super()._captions(fields)
        number = fields.get(self.chosen.captions[0])
        if not isinstance(number, int) or not 0 <= number < len(self.words):
            return [], ""
        return list(self.templates.of(self.words[number])), self.words[number]

    @contextmanager
    def _reading(self, file: Path, fault: str) -> Iterator[Any]:
        """Open a ParquetFile, or map an Arrow table into memory, with the fault for errors of pyarrow."""
        arrow = parquet.pyarrow()
        with parquet.faults_named(
            file, fault.format(form=self.form if self.form == "parquet" else "Arrow")
        ):
            if self.form == "parquet":
                with parquet.opened(file) as table:
                    yield table
                return
            with arrow.memory_map(str(file)) as source:
                try:
                    table = arrow.ipc.open_stream(source).read_all()
                except arrow.ArrowInvalid:
                    source.seek(0)
                    table = arrow.ipc.open_file(source).read_all()
                yield table

    def _choose(self, file: Path, schema: Any) -> Chosen:
        """Choose the columns, where pictures' bytes take precedence over guesses from names."""
        types, held = parquet.pyarrow().types, parquet.picture_columns(schema)
        wanted, classes = self.wanted, parquet.class_columns(schema)
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
        kind = schema.field(chosen.picture).type
        if not (chosen.picture in held or types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(
                f"the picture column {chosen.picture!r} of {file} holds {kind}, neither bytes, Hugging Face's image nor text: "
                "name another with --picture-column"
            )
        return chosen


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` wrote, split by split, in their order.

    Raises:
        UserError: the list of files cannot be read, or names one that is not there.
    """
    if (folder / "dataset_dict.json").is_file():
        names = sorted(
            {path.parent.name for path in folder.glob("*/state.json")},
            key=lambda name: (name != "train", name),
        )
        return [file for name in names for file in saved_files(folder / name)]
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        files = [folder / str(entry["filename"]) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{folder / 'state.json'} does not list the Arrow files of a dataset ({first_line(error)}): save the dataset again"
        ) from error
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise UserError(
            f"{missing[0] if missing else folder} is missing from the dataset: copy or save it again"
        )
    return files


def open_json(path: Path, wanted: Columns) -> ColumnReader:
    """Return the reader of a JSON file, by its beginning: MS-COCO's annotations, Karpathy's, or objects."""
    with opened_table(path) as file:
        beginning = file.read(_BEGINNING_BYTES)
    is_object = beginning.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{")
    if not is_object or _COCO_LISTS.search(beginning) is None:
        return JsonReader(path, wanted)
    return (KarpathyReader if _SENTENCES.search(beginning) else CocoReader)(path, wanted)


@contextmanager
def opened_table(path: Path) -> Iterator[IO[bytes]]:
    """Open the plain bytes of a table, gzipped or not, converted to UTF-8 if it has a byte-order mark.

    Raises:
        UserError: a zip, or a file that cannot be read.
    """
    if path.suffix.lower() == ".zip":
        raise UserError(
            f"{path} is a zip with {listed(members(path)[:3])}: unpack it, and give the folder or the table"
        )
    try:
        with open_member(path, path.name) as file:
            encoding = encoding_of(file.read(4))
            file.seek(0)
            yield (
                file
                if encoding.startswith("utf-8")
                else cast(IO[bytes], codecs.EncodedFile(file, "utf-8", encoding))
            )
    except UnicodeError as error:
        raise UserError(
            f"{path} is not the {encoding.upper()} that its first bytes say ({error}): save it as UTF-8"
        ) from error


def _names(records: Iterable[Any]) -> list[str]:
    """List the keys of objects, in the order in which they first come."""
    return list(
        dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
    )


def _names_a_picture(field: str) -> bool:
    """Return whether a field is an address or the name of a picture's file."""
    field = re.sub(r"#\d+$", "", field.strip().lower())  # Flickr30K's captions
    return field.startswith(ADDRESS) or field.endswith(tuple(PICTURE_SUFFIXES))
