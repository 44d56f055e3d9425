"""SVG drawings, of Iconify's packages too, to square PNG pictures on white."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image

from open_clip_zerovl.core.errors import UserError


def rasterise(svg: str, px: int) -> bytes:
    """Draw an SVG document on a white square, px x px, RGB; returns PNG bytes.

    A drawing that is not square (a flag) keeps its proportions and gets white margins.

    Raises:
        UserError: `resvg-py` is not installed, or the document has neither a viewBox nor a size.
    """
    try:
        import resvg_py  # an extra's dependency: only the demo's data needs it
    except ImportError as error:
        raise UserError(
            "Drawing SVG pictures needs the package resvg-py: `pip install resvg-py`."
        ) from error
    png = resvg_py.svg_to_bytes(
        svg_string=_square(svg), width=px, height=px, background="#ffffff", skip_system_fonts=True
    )
    picture = io.BytesIO()
    # Through PIL: resvg writes an alpha channel, which is opaque everywhere here.
    Image.open(io.BytesIO(bytes(png))).convert("RGB").save(picture, "PNG", optimize=True)
    return picture.getvalue()


def is_blank(png: bytes) -> bool:
    """True if all pixels of a PNG picture are (nearly) the same."""
    extrema = Image.open(io.BytesIO(png)).convert("RGB").getextrema()
    return all(isinstance(band, tuple) and band[1] - band[0] < 8 for band in extrema)


def _square(svg: str) -> str:
    """The document with a square viewBox around the drawing, and without width and height."""
    found = re.search(r"<svg\b[^>]*>", svg)
    if found is None:
        raise UserError(f"This is not an SVG document: {svg[:80]!r}.")
    attributes = dict(re.findall(r'\b(viewBox|width|height)="([^"]*)"', found[0]))
    if "viewBox" in attributes:
        left, top, width, height = (
            float(x) for x in re.split(r"[\s,]+", attributes["viewBox"].strip())
        )
    elif attributes.keys() >= {"width", "height"}:
        left, top, width, height = (
            0.0,
            0.0,
            *(float(attributes[k].removesuffix("px")) for k in ("width", "height")),
        )
    else:
        raise UserError(f"The SVG drawing has neither a viewBox nor a size: {found[0][:80]!r}.")
    side = max(width, height)
    view_box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
    tag = re.sub(r'\s(?:viewBox|width|height|preserveAspectRatio)="[^"]*"', "", found[0])
    tag = f'<svg viewBox="{view_box}"{tag[len("<svg") :]}'
    return svg[: found.start()] + tag + svg[found.end() :]


def iconify_svg(icons: Mapping[str, Any], name: str) -> str:
    """An icon's SVG. An alias is another icon, mirrored or rotated by quarter turns; aliases of aliases add up."""
    mirrored_x = mirrored_y = False
    quarter_turns = 0
    while name not in icons["icons"]:
        alias = icons["aliases"][name]
        mirrored_x ^= alias.get("hFlip", False)
        mirrored_y ^= alias.get("vFlip", False)
        quarter_turns += alias.get("rotate", 0)
        name = alias["parent"]
    icon = icons["icons"][name]
    left, top = icon.get("left", 0), icon.get("top", 0)
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    x, y = left + width / 2, top + height / 2  # the centre, which rotations and reflections keep
    turn = f"rotate({90 * (quarter_turns % 4)} {x} {y})"
    mirror = f"translate({x} {y}) scale({-1 if mirrored_x else 1} {-1 if mirrored_y else 1}) translate({-x} {-y})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}"><g transform="{turn} {mirror}">{icon["body"]}</g></svg>'
    )
