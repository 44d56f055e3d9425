"""The documentation site: every page is in its navigation."""

import pkgutil
import re

import yaml

from scripts.site_pages import PAGES
from support import ROOT


class Settings(yaml.SafeLoader):
    """mkdocs.yml names Python functions."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def leaves(part):
    if isinstance(part, str):
        return [part]
    return [
        leaf
        for inner in (part.values() if isinstance(part, dict) else part)
        for leaf in leaves(inner)
    ]


def test_every_page_is_in_the_navigation():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Settings)
    docs = ROOT / "docs"
    files = [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]
    pages = {page.relative_to(docs).as_posix() for page in files}
    assert sorted(leaves(settings["nav"])) == sorted(pages | set(PAGES.values()))
    assert settings["strict"] and settings["theme"]["font"] is False


def test_names_of_the_reference_exist():
    """mkdocs reads them only when the site is built."""
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M)
    assert len(named) > 10 and all(pkgutil.resolve_name(name).__doc__ for name in named)
