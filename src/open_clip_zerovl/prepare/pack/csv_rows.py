"""The rows of a CSV file by line, stray quotes included.

A row is a line, or several lines where a quoted field holds line breaks. Two mistakes are found and named by line: a stray
quote at the beginning of a field, which for the csv module takes in the lines after it, and a separator in a field without
quotes:

    a.jpg<tab>"great" they said        a stray quote: the line is read by itself, quotes included
    b.jpg,a dog, running               more fields than the header: the row is not shown
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_LONGEST_ROW_LINES, _LONGEST_ROW_BYTES = 200, 1 << 20  # a longer row comes of a stray quote
_TOO_MANY = "more fields than the header"
_PLAIN_LINE_BYTES = 100_000  # the csv module takes fields of up to 131,072 characters


@dataclass
class CsvRow:
    """A row of a table.

    Attributes:
        line: number of its first line, from 1.
        fields: its columns.
        odd: the fault of its quoting in words, "" for none.
        readable: False for a row that cannot be used. A stray quote may be read as it stands.
    """

    line: int
    fields: list[str]
    odd: str = ""
    readable: bool = True


class _TooLong(Exception):
    """A row has more lines or bytes than a row may have."""


class CsvRows:
    """The rows of a table, stray quotes included. The caller sets `width` and `image` when it has read the header.

    Args:
        file: the table, at its beginning.
        separator: between columns.
        line: the number of the file's next line.
        pictures: endings of picture files (".jpg"): a line of a longer row is a row if its `image` has such an ending.
    """

    def __init__(
        self, file: BinaryIO, separator: str, pictures: tuple[str, ...], line: int = 1
    ) -> None:
        self.file = file
        self.separator = separator
        self.pictures = pictures
        self.width, self.image = 0, 0  # fields of the header, and which one is the image
        self._waiting: deque[bytes] = deque()  # lines that a stray quote had taken into a row
        self._taken: list[bytes] = []  # lines of the current row
        self._first, self._line = True, line

    def __iter__(self) -> Iterator[CsvRow]:
        line = self._line
        reader = self._reader()
        while True:
            self._taken.clear()
            odd, fields = "", []
            raw = self._waiting.popleft() if self._waiting else self.file.readline()
            if (
                self.width
                and b'"' not in raw
                and raw.find(b"\r", 0, -2) < 0
                and 0 < len(raw) < _PLAIN_LINE_BYTES
            ):
                # Nearly every line. The csv module takes three times as long.
                fields = as_it_stands(raw.decode("utf-8", "surrogateescape"), self.separator)
                if fields != [""]:
                    more = any(fields[self.width :])
                    yield CsvRow(line, fields, _TOO_MANY if more else "", not more)
                line += 1
                continue
            self._waiting.appendleft(raw)
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                odd = str(error) if "larger" in str(error) else "a stray quote"
            except _TooLong:
                odd = "a stray quote"
            if not odd and self._has_stray_quote():
                odd = "a stray quote"
            if odd:  # the first line is the row; the other lines are read again
                self._waiting.extendleft(reversed(self._taken[1:]))
                del self._taken[1:]
                reader = self._reader()
            readable = True
            if odd:
                fields = as_it_stands(self._text(0), self.separator)
                readable = odd == "a stray quote" and len(fields) == self.width
            elif self.width and any(fields[self.width :]):
                odd, readable = _TOO_MANY, False
            if fields:
                yield CsvRow(line, fields, odd, readable)
            line += len(self._taken)
            self._first = False

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._lines(), delimiter=self.separator, strict=True)

    def _lines(self) -> Iterator[str]:
        """Yield the lines that the csv reader takes, kept in `_taken`."""
        while line := self._waiting.popleft() if self._waiting else self.file.readline():
            self._taken.append(line)
            if (
                len(self._taken) > _LONGEST_ROW_LINES
                or sum(map(len, self._taken)) > _LONGEST_ROW_BYTES
            ):
                raise _TooLong
            yield self._text(-1)

    def _text(self, index: int) -> str:
        """Line `index` of the current row, without the file's byte-order mark."""
        mark = self._first and len(self._taken) == 1
        return self._taken[index].decode("utf-8-sig" if mark else "utf-8", "surrogateescape")

    def _has_stray_quote(self) -> bool:
        """Return whether a row of several lines is several rows: its first line and another one each have all fields."""
        lines = [
            as_it_stands(self._text(index), self.separator) for index in range(len(self._taken))
        ]
        if len(lines) == 1 or not self.width or len(lines[0]) != self.width:
            return False
        return any(
            len(fields) == self.width
            and (
                fields[self.image].lower().endswith(self.pictures)
                or not any('"' in field for field in fields)
            )
            for fields in lines[1:]
        )


def as_it_stands(line: str, separator: str) -> list[str]:
    """Split a line into fields where quotes mean nothing."""
    return line.rstrip("\r\n").split(separator)
