"""The one builder of HTML pages: a template of `templates/` and the data that it shows give a self-contained page.

A page is one file without scripts: pictures are embedded, nothing is loaded from elsewhere. Templates escape all data.
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.report.plot import DPI, GRID, INK, RIGHT_COLOUR

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL_PX = 224


def write_page(path: str | os.PathLike[str], template: str, /, **values: Any) -> Path:
    """Write a page from the arguments of `render`.

    Raises:
        UserError: the file cannot be written.
    """
    write_atomically(path, render(template, **values))
    return Path(path)


def render(template: str, folder: Path = TEMPLATES, /, **values: Any) -> str:
    """Render a page as text.

    Args:
        template: name of its file.
        folder: folder of a template from outside of this package; it may extend and import those of the package.
        values: variables of the template. Pictures are arrays, PIL images or results of `thumbnail`; charts are PNG bytes.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
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
