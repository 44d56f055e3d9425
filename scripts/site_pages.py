"""A hook of mkdocs (mkdocs.yml): pages of the repository's top level become pages of the site, with links that lead there.

The site's home page is README.md. Links to files that are not pages (a licence, a Makefile) become text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# File of the top level -> page of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerability.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top level."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Redirect the links of pages in docs/ that leave it."""
    return (
        markdown
        if page.file.generated_by
        else relinked(markdown, (ROOT / "docs" / page.file.src_uri).parent)
    )


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Redirect the links of a notebook, which is no Markdown to mkdocs, from pages' files to pages of the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    return re.sub(r'href="(?!https?:)([\w/]+)\.md(#[^"]*)?"', r'href="\1.html\2"', content)


def relinked(markdown: str, folder: Path) -> str:
    """Return Markdown whose links, relative to `folder`, are relative to the page's place on the site.

    Links that lead out of the site are text.

    Args:
        folder: the folder of the page: the repository, whose pages lie at the site's top, or a folder in docs.
    """
    inside = ROOT / "docs"
    place_of_page = folder.relative_to(inside).as_posix() if folder.is_relative_to(inside) else "."

    def redirect(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        there = (folder / target).resolve()
        if there.is_relative_to(inside):
            place = there.relative_to(inside).as_posix()
        elif there.is_relative_to(ROOT) and there.relative_to(ROOT).as_posix() in PAGES:
            place = PAGES[there.relative_to(ROOT).as_posix()]
        else:
            return text
        return f"{picture}[{text}]({posixpath.relpath(place, place_of_page)}{anchor or ''})"

    return LINK.sub(redirect, markdown)
