"""Durations as text."""

from __future__ import annotations

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """A time in its two largest units: "85.8 ms", "0.113 s", "41 s", "3 min 20 s", "5 h 12 min", "2 d 4 h"."""
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
