"""The report of a fine-tuning as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from open_clip_zerovl.evaluate.interpolation.curve import Curve
from open_clip_zerovl.evaluate.interpolation.page import curve_sections
from open_clip_zerovl.finetune.settings import Setting
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table
from open_clip_zerovl.report.plot import FAINT, INK, MODEL_COLOURS, RIGHT_COLOUR, new_figure, plain_axes, png_bytes


def training_picture(before: float, scores: Mapping[int, float], best: int) -> bytes:
    """RSUM on the held-out pairs by epoch as PNG; epoch 0 is the model before."""
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    plain_axes(axes)
    epochs = [0, *sorted(scores)]
    values = [before, *(scores[epoch] for epoch in epochs[1:])]
    axes.plot(epochs, values, color=MODEL_COLOURS[1], linewidth=1.8, marker="o", markersize=3.5)
    axes.plot([best], [scores[best]], marker="o", markersize=8, color=RIGHT_COLOUR)
    axes.axhline(before, color=FAINT, linewidth=1, linestyle=":")
    axes.set_xlabel(f"epoch (0: before); the best is {best}", fontsize=9, color=INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("RSUM, held out", fontsize=9, color=INK)
    return png_bytes(figure)


def report_page(
    title: str,
    facts: Sequence[str],
    settings: Sequence[Setting],
    training: bytes,
    curve: Curve,
    picture: bytes,
) -> str:
    """The whole page.

    Args:
        facts: sentences about model and data.
        training: of `training_picture`.
        picture: of `curve_picture`.
    """
    shown = [(f"--{s.flag}", "not used" if s.value is None else s.value, s.reason) for s in settings]
    return html_page(
        title,
        [
            *(paragraph(fact) for fact in facts),
            heading("Training"),
            chart(training, "RSUM on the held-out pairs by epoch"),
            *curve_sections(curve, picture),
            heading("Settings"),
            table(("flag", "value", "why"), shown, "words"),
        ],
    )
