"""The documentation site: every page is in its navigation, and links of the repository become links of the site."""

import re

import yaml

from scripts.site_pages import PAGES, relinked
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


def test_links_of_the_repository_become_links_of_the_site():
    text = "[data](docs/data.md#a) ![p](docs/results/a4.png) [us](CONTRIBUTING.md) [tool](Makefile) [web](https://x.y) [b](#b)"
    assert relinked(text, ROOT) == (
        "[data](data.md#a) ![p](results/a4.png) [us](contributing.md) tool [web](https://x.y) [b](#b)"
    )
    assert (
        relinked("[log](../CHANGELOG.md) [dga](dga.md#retain)", ROOT / "docs")
        == "[log](changelog.md) [dga](dga.md#retain)"
    )
    assert (
        relinked(
            "[page](../results.md#a) ![p](earlier/a4.png) [log](../../CHANGELOG.md)",
            ROOT / "docs" / "results",
        )
        == "[page](../results.md#a) ![p](earlier/a4.png) [log](../changelog.md)"
    )


def test_names_of_the_reference_exist():
    from importlib import import_module

    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M)
    assert len(named) > 10
    for name in named:
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute, None) or import_module(name)
        assert found.__doc__, name
