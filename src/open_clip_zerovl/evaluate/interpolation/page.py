"""The curve as a chart and as one HTML page."""

from __future__ import annotations

from open_clip_zerovl.evaluate.interpolation.curve import Curve
from open_clip_zerovl.evaluate.retrieval.metrics import DIRECTIONS, RECALL_KS
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table
from open_clip_zerovl.report.plot import FAINT, INK, MODEL_COLOURS, new_figure, plain_axes, png_bytes


def curve_picture(curve: Curve) -> bytes:
    """RSUM by alpha as PNG, a line a set: solid for new sets, dashed for kept ones; the chosen alpha is marked.

    Raises:
        UserError: matplotlib is missing.
    """
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    plain_axes(axes)
    alphas = [point.alpha for point in curve.points]
    axes.axvline(curve.chosen.alpha, color=FAINT, linewidth=1, linestyle=":")
    for i, name in enumerate((*curve.new, *curve.kept)):
        kept = name in curve.kept
        axes.plot(
            alphas,
            [point.metrics[name]["rsum"] for point in curve.points],
            "--" if kept else "-",
            color=MODEL_COLOURS[i % len(MODEL_COLOURS)],
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label=f"{name} ({'kept' if kept else 'new'})",
        )
    axes.set_xlabel(f"alpha: 0 before, 1 after fine-tuning; chosen: {curve.chosen.alpha:g}", fontsize=9, color=INK)
    axes.set_ylabel("RSUM", fontsize=9, color=INK)
    axes.legend(fontsize=9, frameon=False)
    return png_bytes(figure)


def curve_sections(curve: Curve, picture: bytes) -> list[str]:
    """Chart and tables as pieces of HTML."""
    names = (*curve.new, *curve.kept)
    header = ["alpha", *(f"{name} ({'kept' if name in curve.kept else 'new'})" for name in names)]
    rows = [
        [
            f"{point.alpha:g}{' (chosen)' if point is curve.chosen else ''}",
            *(f"{point.metrics[name]['rsum']:.1f}" for name in names),
        ]
        for point in curve.points
    ]
    pieces = [
        heading("Weights in between"),
        paragraph(f"{curve.reason[0].upper()}{curve.reason[1:]}."),
        chart(picture, "RSUM of each retrieval set by alpha"),
        table(header, rows),
        heading("Before, after, chosen"),
    ]
    for name in names:
        pieces += [paragraph(name), comparison_table(curve, name)]
    return pieces


def comparison_table(curve: Curve, name: str) -> str:
    """Recalls in percent and RSUM of one set, a row each for before, after and chosen."""
    ways = {"image_to_text": "image to text", "text_to_image": "text to image"}
    header = ["", *(f"{ways[way]} R@{k}" for way in DIRECTIONS for k in RECALL_KS), "RSUM"]
    rows = []
    for label, point in labelled(curve):
        row = point.metrics[name]
        recalls = (f"{100 * row[f'{way}_R@{k}']:.1f}" for way in DIRECTIONS for k in RECALL_KS)
        rows.append([label, *recalls, f"{row['rsum']:.1f}"])
    return table(header, rows)


def labelled(curve: Curve):
    """(what to call it, point) of before, after and chosen."""
    return (
        ("before", curve.points[0]),
        ("after", curve.points[-1]),
        (f"chosen, alpha {curve.chosen.alpha:g}", curve.chosen),
    )


def curve_page(curve: Curve, names: tuple[str, str], picture: bytes) -> str:
    """The whole page of `zerovl interpolate`."""
    lead = paragraph(
        f"Between {names[0]} (alpha 0) and {names[1]} (alpha 1). RSUM is the sum of recall@1, 5 and 10 in both directions, in "
        "percent points (0 to 600).",
        "lead",
    )
    return html_page("Weights between two models", [lead, *curve_sections(curve, picture)])
