"""Sections of documentation pages that a program writes: the text between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path


def replace_section(page: Path, name: str, lines: Iterable[str]) -> None:
    """Put lines in the place of a page's section.

    Raises:
        ValueError: the page has no such marks.
    """
    head, rest = page.read_text(encoding="utf-8").split(f"<!-- {name} -->\n", 1)
    _, tail = rest.split(f"<!-- /{name} -->", 1)
    page.write_text(
        f"{head}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- /{name} -->{tail}",
        encoding="utf-8",
    )


def write_table(out: Path, lines: Iterable[str]) -> None:
    """Write a Markdown table as CSV; the folder is made if it is missing."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        row for row in rows if not set("".join(row)) <= set(":-")
    )
    out.parent.mkdir(exist_ok=True)
    out.write_text(text.getvalue(), encoding="utf-8")
