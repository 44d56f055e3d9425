"""Tables of the pages that scripts write."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a pipe table without a newline at its end.

    Columns of numbers are aligned to the right.
    """
    numbers = [all(row[i][:1] in "-+0123456789" for row in rows) for i in range(len(header))]
    rule = ["--:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
