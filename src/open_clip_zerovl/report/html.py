"""Pieces of a self-contained HTML page: one file, pictures embedded, no script, nothing loaded from elsewhere.

All text that comes from data is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from open_clip_zerovl.report.plot import DPI, GRID, INK, RIGHT_COLOUR

THUMBNAIL_PX = 96

_STYLE = (
    f"""
:root {{ color-scheme: light; --ink: {INK}; --grid: {GRID}; --right: {RIGHT_COLOUR}; }}"""
    + """
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 60rem; background: #fff; color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.4rem 0 0.8rem; max-width: 46rem; }
.lead { font-size: 1.05rem; color: #444; }
img { max-width: 100%; height: auto; }
img.thumb { width: 64px; height: 64px; object-fit: contain; background: #f4f4f4; border-radius: 6px; }
img.right { outline: 4px solid var(--right); outline-offset: 1px; }
.scroll { overflow-x: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 0.6rem 0; }
th, td { padding: 0.35rem 0.9rem 0.35rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.words th, .words td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.words td:first-child { white-space: nowrap; }
th { font-weight: 600; color: #555; vertical-align: bottom; }
.strip { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 0.4rem 0 1rem; }
.strip figure { margin: 0; width: 8.5rem; }
.strip figcaption { font-size: 0.8rem; line-height: 1.3; color: #555; overflow-wrap: anywhere; }
.example { border-top: 1px solid var(--grid); padding: 0.8rem 0; }
.query { display: flex; align-items: center; gap: 0.75rem; font-weight: 600; }
.query small, .ranking small { font-weight: normal; color: #666; }
.ranking { display: flex; flex-wrap: wrap; align-items: center; gap: 0.6rem; margin: 0.6rem 0 0 0; }
.ranking .run { width: 11rem; line-height: 1.3; }
@media (max-width: 40rem) { .ranking .run { width: 100%; } img.thumb { width: 52px; height: 52px; } }
"""
)


def html_page(title: str, body: Sequence[str]) -> str:
    """A whole document. A byte that is no UTF-8, as names of files and keys may hold, is shown as "\\udcff".

    Args:
        title: plain text.
        body: pieces of HTML.
    """
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def heading(text: str) -> str:
    """An `<h2>` of plain text."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A `<p>` of plain text, of the CSS class `kind`."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def picture(png: bytes, description: str, kind: str = "") -> str:
    """An `<img>` with the PNG embedded. The description is its alternative text, `kind` its CSS class."""
    data = base64.b64encode(png).decode("ascii")
    attribute = f' class="{kind}"' if kind else ""
    return f'<img{attribute} src="data:image/png;base64,{data}" alt="{escape(description)}">'


def chart(png: bytes, description: str) -> str:
    """A chart of `plot` at the size for which its text was drawn, or narrower on a narrow screen."""
    width = int.from_bytes(png[16:20], "big")  # of the IHDR chunk
    return picture(png, description).replace("<img ", f'<img width="{width * 105 // DPI}" ', 1)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A `<table>` of plain text; the first column is left-aligned (a name), the others right-aligned (numbers).

    Args:
        kind: "words": the others hold words, left-aligned and wrapped.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    attribute = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{attribute}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def thumbnail(image: Image.Image | np.ndarray, description: str, kind: str = "") -> str:
    """`picture` of an image, shrunk to at most 96 px in width and height.

    Args:
        image: (H, W, 3) uint8, or a PIL image.
    """
    small = Image.fromarray(image) if isinstance(image, np.ndarray) else image.copy()
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return picture(buffer.getvalue(), description, f"thumb {kind}".strip())
