"""The linear probe's confusion matrix, as PNG bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from open_clip_zerovl.report.plot import INK, new_figure, plain, png_bytes

NAMED_CLASSES = 40  # more names do not fit beside a confusion matrix
COUNTED_CLASSES = 15  # more numbers do not fit into its cells


def confusion_picture(counts: np.ndarray, names: Sequence[str], *, title: str) -> bytes:
    """A confusion matrix (C, C), row the class and column the guess, shown as shares of each class.

    Up to 40 classes are named on the axes; up to 15 classes have a percentage in each cell.

    Raises:
        UserError: matplotlib is missing.
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    classes = len(names)
    side = min(9.0, 4.2 + 0.32 * min(classes, NAMED_CLASSES))
    figure = new_figure(side + 1, side)
    axes = figure.add_subplot()
    image = axes.imshow(
        shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest" if classes <= 500 else "antialiased"
    )
    figure.colorbar(image, ax=axes, shrink=0.7, label="share of the class")
    axes.set_xlabel("guess")
    axes.set_ylabel("class")
    if classes <= NAMED_CLASSES:
        short = [plain(name if len(name) <= 24 else name[:22] + "...") for name in names]
        axes.set_xticks(range(classes), short, rotation=90 if classes > 6 else 30, fontsize=8, ha="center")
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= COUNTED_CLASSES:
        for row in range(classes):
            for column in range(classes):
                if counts[row, column]:
                    colour = "white" if shares[row, column] > 0.5 else INK
                    axes.text(column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center",
                              fontsize=8, color=colour)  # fmt: skip
    axes.set_title(plain(title), fontsize=10, wrap=True)
    return png_bytes(figure)
