"""Tables of pairs as sources: open_clip's (`filepath`, `title`) and ZeroVL's (`image,image_id,caption,caption_id`).

The table is scanned once for where its rows lie; rows are then read from the file when they are needed. Only number arrays
stay in memory, which loader workers share with the process that made them: a list of captions would be copied to each.

Image paths are relative to the table's folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from open_clip_zerovl.errors import UserError

EXTENSIONS = (".csv", ".tsv")
BLOCK_SAMPLES = 64  # rows that stand where a tar source has a shard: shuffled as one, and then within the window
# (image, caption, what says that two rows show the same image)
LAYOUTS = (("filepath", "title", "filepath"), ("image", "caption", "image_id"))


@dataclass(frozen=True)
class CsvFormat:
    """How a table is written, where it does not say so itself (open_clip's `--csv-img-key`, `--csv-caption-key`,
    `--csv-separator`); None = by its header."""

    image_key: str | None = None
    caption_key: str | None = None
    separator: str | None = None


@dataclass(frozen=True)
class CsvTable:
    """A scanned table.

    Attributes:
        path: of the table.
        separator: between columns.
        image_column, caption_column: where the two are in a row.
        rows: (R, 2) offset and length in bytes of each row.
        members: (R,) row numbers, those of a sample next to each other.
        ends: (n,) where each sample ends in `members`; a sample is a row, or all rows of one image.
    """

    path: str
    separator: str
    image_column: int
    caption_column: int
    rows: np.ndarray
    members: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def rows_of(self, sample: int) -> np.ndarray:
        """Row numbers of a sample."""
        return self.members[self.ends[sample - 1] if sample else 0 : self.ends[sample]]

    def read_row(self, descriptor: int, row: int) -> tuple[str, bytes | None]:
        """Path of the image and bytes of the caption (None where the row is too short) of one row."""
        offset, length = self.rows[row].tolist()
        text = os.pread(descriptor, length, offset).decode("utf-8", "surrogateescape")
        fields = next(csv.reader([text], delimiter=self.separator), [])
        image = fields[self.image_column] if len(fields) > self.image_column else ""
        if len(fields) <= self.caption_column:
            return image, None
        return image, fields[self.caption_column].encode("utf-8", "surrogateescape")

    def image_path(self, image: str) -> str:
        """Where an image lies that a row names."""
        return os.path.join(os.path.dirname(self.path), image)


def find_table(component: str) -> str | None:
    """The table that a component of `--train-data` names: a .csv or .tsv, or a folder that holds one and no tar."""
    if component.lower().endswith(EXTENSIONS):
        return component
    folder = Path(component)
    if not folder.is_dir() or any(folder.glob("*.tar")):
        return None
    tables = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if len(tables) > 1:
        raise UserError(
            f"folder {component} holds {len(tables)} tables ({tables[0].name}, {tables[1].name} ...); name the one to "
            "train on"
        )
    return str(tables[0]) if tables else None


def open_table(path: str, style: CsvFormat | None = None, *, by_image: bool = False) -> CsvTable:
    """Scan a table.

    Args:
        style: columns and separator; by default told from the header.
        by_image: make all rows of one image a sample (by `image_id`, or by path where there is none).

    Raises:
        UserError: no such file, no header that names an image and a caption, no rows, or broken quoting.
    """
    style = style or CsvFormat()
    try:
        with open(path, "rb") as file:
            separator = style.separator or ("\t" if b"\t" in file.readline() else ",")
            file.seek(0)
            records = _records(file, separator)
            _, _, header = next(records, (0, 0, []))
            image, caption, identity = _columns(path, header, style)
            rows: list[tuple[int, int]] = []
            images: list[int] = []
            number: dict[str, int] = {}
            for offset, length, fields in records:
                rows.append((offset, length))
                if by_image:
                    name = fields[identity] if identity < len(fields) else f"\0row {len(rows)}"
                    images.append(number.setdefault(name, len(number)))
    except OSError as error:
        raise UserError(f"table {path} cannot be read ({error.strerror}); correct its path") from error
    except csv.Error as error:
        raise UserError(f"table {path} cannot be read as CSV ({error}); check its quotes and line ends") from error
    if not rows:
        raise UserError(f"table {path} holds no rows below its header; check the file")
    members, ends = np.arange(len(rows)), np.arange(1, len(rows) + 1)
    if by_image:
        members, ends = np.argsort(images, kind="stable"), np.cumsum(np.bincount(images))
    return CsvTable(path, separator, image, caption, np.array(rows, dtype=np.int64), members, ends)


def block_sizes(samples: int) -> tuple[int, ...]:
    """Samples in each block of a table."""
    return tuple(min(BLOCK_SAMPLES, samples - begin) for begin in range(0, samples, BLOCK_SAMPLES))


def _records(file, separator: str) -> Iterator[tuple[int, int, list[str]]]:
    """Offset, length in bytes and fields of each record; the reader takes no line before it needs it."""
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for line in file:
            end += len(line)
            yield line.decode("utf-8-sig" if end == len(line) else "utf-8", "surrogateescape")

    begin = 0
    for fields in csv.reader(lines(), delimiter=separator):
        if fields:
            yield begin, end - begin, fields
        begin = end


def _columns(path: str, header: Sequence[str], style: CsvFormat) -> tuple[int, int, int]:
    layouts = list(LAYOUTS)
    if style.image_key is not None and style.caption_key is not None:
        layouts.insert(0, (style.image_key, style.caption_key, "image_id"))
    for image, caption, identity in layouts:
        if image in header and caption in header:
            place = header.index(image)
            return place, header.index(caption), header.index(identity) if identity in header else place
    known = " or ".join(f"{image!r} and {caption!r}" for image, caption, _ in layouts)
    seen = ", ".join(repr(name) for name in header[:6]) or "nothing"
    raise UserError(
        f"the header of {path} has no columns {known} but {seen}; name them with --csv-img-key and --csv-caption-key"
    )
