"""The package's metadata: one version, a README that an index can show, a citation, issue forms; links between pages."""

import re
from importlib import metadata

import pytest
import yaml

import open_clip_zerovl
from support import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: str) -> str:
    """Without code, in which brackets are not links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.S)


def test_one_version():
    here = open_clip_zerovl.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert (metadata.version("open_clip_zerovl"), citation["version"], released[0]) == (
        here,
        here,
        here,
    )


def anchors(page: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+?)\s*$", re.sub(r"```.*?```", "", page, flags=re.S), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page):
    lost = []
    for target in LINK.findall(prose(page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors(there.read_text("utf-8"))
        ):
            lost.append(target)
    assert lost == []
