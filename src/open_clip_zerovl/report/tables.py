"""Tables as text: for Markdown pages that scripts write, and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a pipe table without a newline at its end.

    Columns of numbers are aligned to the right.
    """
    numbers = [all(row[i][:1] in "-+0123456789" for row in rows) for i in range(len(header))]
    rule = ["--:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


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
