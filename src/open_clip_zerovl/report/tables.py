"""Tables, sizes and durations as text for a terminal, and scores shown as their table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format a table for a terminal: the first `left` columns are aligned to the left, the rest to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Scores(dict[str, Mapping[str, Any]]):
    """Set -> metric -> value, as the command's `--output` has them, shown as the command's table.

    Attributes:
        text: what the command prints, with a remark on scores that are not above chance.
    """

    def __init__(self, scores: Mapping[str, Mapping[str, Any]], text: str) -> None:
        super().__init__(scores)
        self.text = text

    def __repr__(self) -> str:
        return self.text.rstrip()

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; overflow-x: auto; font-size: 12px">{html.escape(repr(self))}</pre>'


def size_words(count: float) -> str:
    """Write bytes in words: "3.5 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Format a time in its two largest units: "85.8 ms", "0.113 s", "41 s", "3 min 20 s", "5 h 12 min", "2 d 4 h"."""
    if seconds < 60:
        return (
            f"{max(0, seconds):.3g} s"
            if seconds >= 0.1 or seconds <= 0
            else f"{1000 * seconds:.3g} ms"
        )
    left, parts = round(seconds), []
    for size, unit in _UNITS:
        parts.append((left // size, unit))
        left %= size
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)
