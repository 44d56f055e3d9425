"""HTML pages, each from a template of `templates/` and the data that it shows, and their charts.

A page is one file without scripts: pictures are embedded, nothing is loaded from elsewhere. Templates escape all data.
Charts are drawn on matplotlib's Agg canvas, without a display and without pyplot's global state.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.core.processes import take_product_buffer

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL_PX = 224


def write_page(path: str | os.PathLike[str], template: str, /, **values: Any) -> Path:
    """Write a page from the arguments of `render`.

    Raises:
        UserError: the file cannot be written.
    """
    write_atomically(path, render(template, **values))
    return Path(path)


def render(template: str, /, **values: Any) -> str:
    """Render a page as text.

    Args:
        template: name of its file.
        values: variables of the template. Pictures are arrays, PIL images or results of `thumbnail`; charts are PNG bytes.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        thumbnail=thumbnail, embedded=_embedded, chart_width=_chart_width, shortened=_shortened
    )
    environment.globals.update(ink=INK, grid=GRID, right=RIGHT_COLOUR)
    page = environment.get_template(template).render(values)
    # A byte that is not UTF-8, as names of files and keys may hold, is shown as "\udcff".
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def thumbnail(image: Image.Image | np.ndarray | str) -> str:
    """Encode an image as a data URI, a JPEG of at most THUMBNAIL_PX in width and height.

    A data URI stays as it is.

    Args:
        image: (H, W, 3) uint8, or a PIL image.
    """
    if isinstance(image, str):
        return image
    # a copy
    small = (Image.fromarray(image) if isinstance(image, np.ndarray) else image).convert("RGB")
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88, subsampling=0)
    return _embedded(buffer.getvalue(), "jpeg")


def _embedded(content: bytes, form: str = "png") -> str:
    return f"data:image/{form};base64,{base64.b64encode(content).decode('ascii')}"


def _chart_width(png: bytes) -> int:
    """Return the width in CSS pixels for a chart's text to have the size for which it was drawn."""
    return int.from_bytes(png[16:20], "big") * 105 // DPI  # of the IHDR chunk


def _shortened(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()}..."


# Colours of models, in this order: Okabe and Ito's, which people with a common colour blindness can tell apart.
MODEL_COLOURS = ("#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")
# Colours of sources: Paul Tol's muted ones.
SOURCE_COLOURS = (
    "#332288",
    "#DDCC77",
    "#117733",
    "#CC6677",
    "#88CCEE",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
)
RIGHT_COLOUR = "#009E73"  # right answers: Okabe and Ito's green, which no model has
INK, FAINT, GRID = "#222222", "#777777", "#e6e6e6"
DPI = 160
LABEL_POINTS = 11  # height of a line of a level's label


def new_figure(width: float, height: float) -> Any:
    """Make an empty white figure, width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    take_product_buffer()
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_bytes(figure: Any) -> bytes:
    """Save a figure as PNG.

    The same figure gives the same bytes.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def plain(text: str) -> str:
    """Mark text from data for a chart, where matplotlib would read the text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def plain_axes(axes: Any) -> None:
    """Draw axes with two sides and horizontal grid lines."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=9, colors=INK)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def colours_of(names: Sequence[str], palette: Sequence[str]) -> dict[str, str]:
    """Choose a colour for each name.

    Colours repeat if there are more names than colours.
    """
    return {name: palette[i % len(palette)] for i, name in enumerate(dict.fromkeys(names))}


class Line(NamedTuple):
    """A line of a chart, without points that are not finite.

    Attributes:
        x, y: (n,) numbers; None and NaN in y are gaps.
        look: more arguments of matplotlib's `plot`.
    """

    label: str
    x: Any
    y: Any
    colour: str = INK
    look: Mapping[str, Any] = {}


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw lines.

    A line of a single point gets a mark, since matplotlib would show nothing.
    """
    for line in lines:
        x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
        seen = np.isfinite(y)
        mark = {"marker": "o"} if seen.sum() == 1 else {}
        look = {"linewidth": 1.8, "markersize": 4, **mark, **line.look}
        axes.plot(x[seen], y[seen], color=line.colour, label=plain(line.label), **look)


def line_chart(
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    size: tuple[float, float] = (8.6, 3.4),
    finish: Callable[[Any], object] = lambda axes: None,
) -> bytes:
    """Draw a chart of lines with their legend, as PNG.

    Args:
        x, y: labels of the axes.
        size: width and height in inches.
        finish: is called with the axes after the lines are drawn.
    """
    figure = new_figure(*size)
    axes = figure.add_subplot()
    plain_axes(axes)
    draw_lines(axes, lines)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    finish(axes)
    mark_base(axes)
    if len(lines) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return png_bytes(figure)


def mark_base(axes: Any) -> None:
    """Mark a vertical axis on which 0 is not shown, at the end where it would be."""
    low, high = axes.get_ylim()
    if low > 0 or high < 0:
        end, word = (0.03, "not from 0") if low > 0 else (0.925, "not up to 0")
        place = {"transform": axes.transAxes, "clip_on": False}
        for y in (end, end + 0.02):
            axes.plot([-0.008, 0.008], [y, y + 0.025], color=INK, linewidth=1.2, **place)
        axes.set_ylabel(", ".join(filter(None, (axes.get_ylabel(), word))))


def draw_levels(axes: Any, levels: Mapping[str, tuple[float, str]], form: str = "{:.1f}") -> None:
    """Draw dotted horizontal lines with a word: label -> (height, colour).

    Heights that are not finite are left out.

    Levels of one number share a label. Labels that would overprint each other are moved up.
    """
    labels: dict[str, tuple[float, list[str]]] = {}
    for label, (height, colour) in levels.items():
        if np.isfinite(height):
            axes.axhline(height, color=colour, linewidth=1, linestyle=":")
            labels.setdefault(form.format(height), (height, []))[1].append(label)
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height * 72 / axes.figure.dpi  # of the whole axis
    free = -np.inf  # the lowest place above the labels so far, in points
    for number, (height, names) in sorted(labels.items(), key=lambda item: item[1][0]):
        place = (height - low) / (high - low) * points
        shown = max(place + 2, free)
        free = shown + LABEL_POINTS
        axes.annotate(
            plain(f"{', '.join(names)} {number}"),
            (1, height),
            (-2, shown - place),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=FAINT,
        )


def moving_average(values: np.ndarray, reach: int) -> np.ndarray:
    """Compute the mean of each value and up to `reach` neighbours on either side, fewer at the ends: (n,) -> (n,).

    Values that are not finite (the loss of a diverged step) are left out. A mean of no values is NaN.

        moving_average([1, 2, 6], 1) -> [1.5, 3, 4]
    """
    values = np.asarray(values, dtype=float)
    finite = np.isfinite(values)
    window = np.ones(2 * reach + 1)
    centre = slice(reach, reach + len(values))
    sums = np.convolve(np.where(finite, values, 0.0), window)[centre]
    counts = np.convolve(finite.astype(float), window)[centre]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
