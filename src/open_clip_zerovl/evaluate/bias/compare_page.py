"""A comparison of models as one HTML page: what differs, in numbers and pictures, and what each measure rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.compare import KINDS, Comparison
from open_clip_zerovl.evaluate.bias.compare_report import comparison_rows, how_intervals_are_made, verdicts
from open_clip_zerovl.evaluate.bias.examples import RetrievalExample, example_html
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table
from open_clip_zerovl.report.plot import INK, MODEL_COLOURS, colours_of, new_figure, plain, plain_axes, png_bytes

_PANELS = (
    ("RSUM, 600 at most", ("within", "across", "mixed", "unseen")),
    ("source probe, %", ("probe_images", "probe_texts")),
    ("log p of negatives", ("log_p_same", "log_p_other")),
)


def compare_page(
    path: str | Path,
    found: Comparison,
    examples: Sequence[RetrievalExample] = (),
    *,
    lead: str,
    notes: Sequence[str] = (),
    title: str = "Which model is better on these sources?",
) -> Path:
    """Write the page; returns its path.

    Args:
        examples: with the names of the sides as models.
        lead: what was compared on what.
        notes: what a reader has to know of the pools (`compare_report.warnings_of`).

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    header, rows = comparison_rows(found)
    body = [
        paragraph(lead, "lead"),
        heading("What differs"),
        *(paragraph(sentence) for sentence in verdicts(found)),
        heading("In numbers"),
        table(header, rows),
        paragraph(how_intervals_are_made(found)),
        *(paragraph(note) for note in notes),
        chart(compare_picture(found), "Each measure by side, with its interval over queries"),
        heading("What each measure rewards"),
        *(paragraph(KINDS[kind].note) for kind in found.sides),
        paragraph(f"The probe's chance is {found.probe_chance:.1f} %."),
        heading("Single pools"),
        paragraph(
            "RSUM by source, by ordered pair of sources (pictures -> captions) and in unseen sources, the mean over runs."
        ),
        table(
            ("pool", "pictures", *found.names),
            [
                (pool, f"{found.pool_sizes[pool]:,}", *(f"{own[name]:.1f}" for name in found.names))
                for pool, own in found.single.items()
            ],
        ),
    ]
    if examples:
        body += [
            heading("Text to picture, all sources mixed"),
            paragraph(
                "The middle caption of each source with its picture, then the best pictures of each side's first run, the "
                "right one framed in green."
            ),
            *(example_html(example, found.names) for example in examples),
        ]
    write_atomically(path, html_page(title, body))
    return Path(path)


def compare_picture(found: Comparison) -> bytes:
    """Points with their intervals, a panel for each unit of numbers."""
    panels = [(title, [kind for kind in kinds if kind in found.sides]) for title, kinds in _PANELS]
    figure = new_figure(9.6, 3.2)
    grid = figure.subplots(1, len(panels), width_ratios=[max(1, len(kinds)) for _, kinds in panels])
    colours = colours_of(found.names, MODEL_COLOURS)
    for (title, kinds), axes in zip(panels, grid, strict=True):
        plain_axes(axes)
        for place, kind in enumerate(kinds):
            for i, (name, colour) in enumerate(colours.items()):
                side = found.sides[kind][name]
                x = place + (i - (len(colours) - 1) / 2) * 0.5 / len(colours)
                axes.plot([x, x], side.interval, color=colour, linewidth=2)
                axes.plot(x, side.value, "o", color=colour, markersize=6)
                axes.plot([x] * len(side.runs), side.runs, "_", color=colour, markersize=9, alpha=0.6)
        if "probe_images" in kinds:
            axes.axhline(found.probe_chance, color=INK, linewidth=1, linestyle="--")
            axes.annotate("chance", (1, found.probe_chance), (-2, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
        axes.set_xticks(range(len(kinds)), [_label(kind) for kind in kinds], fontsize=9)
        axes.set_xlim(-0.5, len(kinds) - 0.5)
        axes.set_title(title, fontsize=10, color=INK)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker="o", color=colour, label=plain(name)) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)), frameon=False, fontsize=9)
    return png_bytes(figure)


def _label(kind: str) -> str:
    return {
        "probe_images": "images",
        "probe_texts": "texts",
        "log_p_same": "same\nsource",
        "log_p_other": "other\nsource",
    }.get(kind, kind)
