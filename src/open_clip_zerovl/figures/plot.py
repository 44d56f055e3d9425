"""What all charts and pages share: a figure without a display, its PNG bytes, axes, colours, a moving average.

Everything is drawn with matplotlib's own canvas: no display, no global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_clip_zerovl.errors import UserError

# Okabe and Ito's colours, told apart with any common colour blindness; models take them in this order.
MODEL_COLOURS = ("#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")
# Sources are not models: another set (Paul Tol's muted one).
SOURCE_COLOURS = ("#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499")
RIGHT_COLOUR = "#009E73"  # of what was found: Okabe and Ito's green, which no model takes
INK, FAINT, GRID = "#222222", "#777777", "#e6e6e6"
DPI = 160


def require_matplotlib() -> None:
    """UserError where matplotlib is missing: before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("the pictures need matplotlib; pip install 'open_clip_zerovl[demo]'") from error


def new_figure(width: float, height: float, *, dpi: float = DPI, layout: Any = "constrained") -> Any:
    """An empty white figure, sides in inches. UserError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def png_bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def plain_axes(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=9, colors=INK)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def colours_of(names: Sequence[str], palette: Sequence[str]) -> dict[str, str]:
    """Colours repeat where there are more names than the palette has."""
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def moving_average(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean of each value and up to `reach` neighbours on either side, fewer at the ends: (n,) -> (n,).

    What is not finite (the loss of a diverged step) is left out; NaN where nothing is left.

        moving_average([1, 2, 6], 1) -> [1.5, 3, 4]
    """
    values = np.asarray(values, dtype=float)
    finite = np.isfinite(values)
    window = np.ones(2 * reach + 1)
    own = slice(reach, reach + len(values))
    sums = np.convolve(np.where(finite, values, 0.0), window)[own]
    counts = np.convolve(finite.astype(float), window)[own]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
