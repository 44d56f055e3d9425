"""A comparison of models as text: a table for the terminal, and a sentence for each measure; both also on the page."""

from __future__ import annotations

from collections.abc import Sequence

from open_clip_zerovl.evaluate.bias.compare import KINDS, Comparison, Difference

SMALL_POOL = 50  # pictures; in a smaller pool recall at 10 tells little


def comparison_rows(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: each measure with its interval on each side, then the differences from the first."""
    first, *others = found.names
    header = ["", *found.names, *(f"{name} - {first}" for name in others)]
    if found.seeds > 1:
        header += [f"{name} - {first}, over seeds" for name in others]
    rows = []
    for kind, sides in found.sides.items():
        form = KINDS[kind].form
        row = [KINDS[kind].title]
        row += [_with(form, side.value, side.interval) for side in sides.values()]
        differences = [found.differences[kind][name] for name in others]
        signed = form.replace(":", ":+")
        row += [_with(signed, one.value, one.over_queries) for one in differences]
        row += [_range(signed, one.over_seeds) for one in differences if one.over_seeds is not None]
        rows.append(row)
    return header, rows


def comparison_table(found: Comparison) -> str:
    """The table for a terminal."""
    header, rows = comparison_rows(found)
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def verdicts(found: Comparison) -> list[str]:
    """A sentence for each measure and each side but the first: how it differs, and whether that is more than chance."""
    first = found.names[0]
    return [
        _verdict(kind, name, first, difference)
        for kind, own in found.differences.items()
        for name, difference in own.items()
    ]


def how_intervals_are_made(found: Comparison) -> str:
    """What the intervals are over, in sentences."""
    drawn = f"{found.draws:,} draws of {found.units:,} concepts (a pair without one counts by itself)"
    over = f"Brackets: 95 % intervals over queries, from {drawn}"
    if found.seeds > 1:
        few = (
            " Of two it is 12.7 standard errors wide to each side: take three runs or more." if found.seeds == 2 else ""
        )
        paired = f"Student's t of the {found.seeds} paired differences.{few}"
        return f"{over}, for the mean of {found.seeds} runs; over seeds: {paired}"
    return f"{over}. With one run a side they say nothing of how runs of other seeds would differ."


def warnings_of(found: Comparison, *, concepts: bool) -> list[str]:
    """What a reader has to know of the pools: what is missing, what is small.

    Args:
        concepts: whether a field that names concepts was given.
    """
    told = []
    if "across" not in found.sides:
        why = (
            "no two sources share one of its values" if concepts else "--concept names the field by which samples match"
        )
        told.append(f"RSUM across sources was not measured: {why}.")
    small = [f"{name} ({size})" for name, size in found.pool_sizes.items() if size < SMALL_POOL]
    if small:
        told.append(
            f"Small pools, in which recall at 10 tells little: {', '.join(small)}; raise --samples, or give more pairs."
        )
    return told


def _verdict(kind: str, name: str, first: str, difference: Difference) -> str:
    what, signed = KINDS[kind].title, KINDS[kind].form.replace(":", ":+")
    number = f"{signed.format(difference.value)} [{_range(signed, difference.over_queries)}]"
    if difference.over_seeds is not None:
        number += f", over seeds {_range(signed, difference.over_seeds)}"
    if not difference.told_apart:
        return f"{what}: {name} and {first} are not told apart by this data ({number})."
    better = KINDS[kind].better
    if not better:
        return f"{what}: {name} is {'higher' if difference.value > 0 else 'lower'} than {first} ({number})."
    return f"{what}: {name} is {'better' if difference.value * better > 0 else 'worse'} than {first} ({number})."


def _with(form: str, value: float, interval: Sequence[float]) -> str:
    return f"{form.format(value)} [{_range(form, interval)}]"


def _range(form: str, interval: Sequence[float]) -> str:
    return f"{form.format(interval[0])} to {form.format(interval[1])}"
