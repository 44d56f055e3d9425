"""Which source a row belongs to: that of its input, or the value of the source column."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from open_clip_zerovl.core.errors import UserError

MOST_SOURCES = 1_000
#: Files and folders that lie beside the sources' folders in an output, or are taken for splits.
_RESERVED = {"train", "test", "pack.json", "report.json", "report.html", "refused.csv", "origins.csv.gz"}
_RESERVED |= {"near.json", "near.html", "dataset_type.txt"}
_LONGEST_BYTES = 200  # of a folder's name; file systems take 255


class SourceNames:
    """Names of the sources of one input.

    Args:
        name: of the input.
        column: the source column; None where all rows are of one source.
        known: name -> value of the sources so far, shared by all inputs.
    """

    def __init__(self, name: str, column: str | None, known: dict[str, str]) -> None:
        self.name, self.column, self.known = name, column, known

    def of(self, value: Any) -> tuple[str | None, str]:
        """(name of the source, why there is none) of a row with this value in the source column.

        Raises:
            UserError: two values give one name, or there are more sources than a mixture has.
        """
        if self.column is None:
            return self.name, ""
        text = "" if value is None else " ".join(str(value).split())
        if not text:
            return None, "no source"
        name = source_name(text)
        if name not in self.known and len(self.known) >= MOST_SOURCES:
            raise UserError(
                f"the source column {self.column!r} has more than {MOST_SOURCES} values (the last is {text[:60]!r}): a source "
                "is where pairs come from, a few at most; name another column"
            )
        if self.known.setdefault(name, text) != text:
            raise UserError(
                f"the sources {self.known[name]!r} and {text!r} (column {self.column!r}) would both be called {name!r}: rename "
                "one"
            )
        return name, ""


def source_name(text: str) -> str:
    """A text as the name of a source and a folder: letters of any script, digits and ._-"""
    name = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text)).strip("-._")
    name = name.encode("utf-8", "ignore")[:_LONGEST_BYTES].decode("utf-8", "ignore") or "source"
    return f"{name}-source" if name.lower() in _RESERVED else name
