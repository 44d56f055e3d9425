"""Four icon families as four sources of unequal size, which draw few of the same concepts.

The emoji sets are a special case: each draws the same 1,900 concepts. These families differ in style and in what they draw, and
the largest has six times the pairs of the smallest, as the web's sources do. A concept is an icon's name.

    mdi          name (category)            Material Design Icons: one colour, outlines and filled shapes
    game-icons   name                       one colour, filled; things of games: weapons, creatures, symbols
    icon-park    category, name             two colours and black lines
    streamline   keywords                   several colours, detailed
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.drawn.data import SPLITS, Drawing, DrawnData, Licence, Split
from open_clip_zerovl.prepare.drawn.drawings import iconify_svg
from open_clip_zerovl.prepare.drawn.packages import NpmPackage, read_npm_package

#: 4 MB in all. The hashes are npm's `dist.integrity`.
PACKAGES = {
    "mdi": NpmPackage(
        "@iconify-json/mdi",
        "1.2.3",
        "O3cLwbDOK7NNDf2ihaQOH5F9JglnulNDFV7WprU2dSoZu3h3cWH//h74uQAB87brHmvFVxIOkuBX2sZSzYhScg==",
    ),
    "game-icons": NpmPackage(
        "@iconify-json/game-icons",
        "1.2.4",
        "/HDDZxowXgDJcOEwPspUCq5RuDdl25OyZKdtxqqiPJQNTrWIym7r4StLzIVs77DyNzOWWhH5wDqwYR3WHeDfkg==",
    ),
    "icon-park": NpmPackage(
        "@iconify-json/icon-park",
        "1.2.4",
        "S8fVl49LG/M9hvwb7ruFGInK21AHMv3IJehOJRJgXPLE39OOCP3wbfTWjro/XzsjxRwdvX/lYdGetFOZI0TaJQ==",
    ),
    "streamline": NpmPackage(
        "@iconify-json/streamline-ultimate-color",
        "1.2.2",
        "NAbD3xLtg3069865B5CLUulp/eowPNCiDfJBxVAmA+LKLPpxU7EIEJ2+mSfWriPd+ahORWyqjRnoPVkTJopEgg==",
    ),
}

SOURCES = ("mdi", "game-icons", "icon-park", "streamline")

LICENCES = {
    "mdi": Licence(
        "Apache License 2.0", "Apache-2.0", "Material Design Icons, Pictogrammers and contributors", ("mdi",)
    ),
    "game-icons": Licence(
        "Creative Commons Attribution 3.0 Unported",
        "CC-BY-3.0",
        "game-icons.net: Lorc, Delapouite and contributors",
        ("game-icons",),
    ),
    "icon-park": Licence("Apache License 2.0", "Apache-2.0", "IconPark, ByteDance", ("icon-park",)),
    "streamline": Licence(
        "Creative Commons Attribution 4.0 International",
        "CC-BY-4.0",
        "Ultimate color icons, Streamline",
        ("streamline",),
    ),
}

CAPTION_STYLES = {
    "mdi": "words of the name, then the category",
    "game-icons": "words of the name",
    "icon-park": "the category, then words of the name",
    "streamline": "keywords: the category's and the name's words, sorted",
}

#: Families draw many icons twice, filled and in outline: the second is left out, so that no held-out icon has a twin.
_VARIANTS = re.compile(r"-(outline|variant|variant-outline|box|box-outline|circle|circle-outline|off|off-outline)$")


def read_icons(tarballs: Mapping[str, Path]) -> dict[str, dict[str, Drawing]]:
    """Read the four families from the fetched packages: for each its icons by name, in the package's order.

    Hidden icons, numbered variants of a name (`star-2` beside `star`) and variants of a shape (`star-outline`, `star-circle`)
    are left out.

    Args:
        tarballs: a tarball's path for each key of `PACKAGES`.
    """
    return {source: {one.concept: one for one in _read_family(source, tarballs[source])} for source in SOURCES}


def _read_family(source: str, tarball: Path) -> Iterator[Drawing]:
    files = read_npm_package(tarball, lambda name: name in {"icons.json", "metadata.json"})
    icons = json.loads(files["icons.json"])
    category_of: dict[str, str] = {}
    for category, names in json.loads(files.get("metadata.json", b"{}")).get("categories", {}).items():
        for name in names:
            category_of.setdefault(name, category)
    for name, icon in icons["icons"].items():
        if icon.get("hidden") or _is_variant(name, icons["icons"]):
            continue
        category = _spaced(category_of.get(name, ""))
        yield Drawing(name, iconify_svg(icons, name), _caption(source, name, category), category)


def _is_variant(name: str, icons: Mapping[str, Any]) -> bool:
    stem = re.sub(r"-\d+$", "", name)
    if stem != name and (stem in icons or f"{stem}-1" in icons) and name != f"{stem}-1":
        return True
    base = _VARIANTS.sub("", name)
    return base != name and base in icons


def _spaced(words: str) -> str:
    """`'ArrowsDiagrams'` and `'Account / User'` as words between single spaces."""
    return " ".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", words))


def _caption(source: str, name: str, category: str) -> str:
    words = re.sub(r"-1$", "", name).split("-")
    if source == "mdi":
        return f"{' '.join(words)} ({category})" if category else " ".join(words)
    if source == "icon-park":
        return f"{category}: {' '.join(words)}" if category else " ".join(words)
    if source == "streamline":
        return ", ".join(sorted({word for word in (*words, *category.lower().split()) if not word.isdigit()}))
    return " ".join(words)


def split_names(drawings: Mapping[str, Mapping[str, Any]], *, held_out_per_source: int, seed: int) -> Split:
    """Choose which icons each source holds out: `{"test" | "val": {source: [name, ...]}}`, at random.

    Raises:
        UserError: a source would keep less than half of its icons.
    """
    rng = np.random.default_rng(seed)
    split: Split = {name: {} for name in SPLITS}
    for source in sorted(drawings):
        order = [str(name) for name in rng.permutation(sorted(drawings[source]))]
        if len(order) < 4 * held_out_per_source:
            raise UserError(
                f"Holding {held_out_per_source} of the {len(order)} icons of {source} out for the test, and as many for "
                "validation, leaves less than half of them: lower held_out_per_source."
            )
        split["test"][source] = sorted(order[:held_out_per_source])
        split["val"][source] = sorted(order[held_out_per_source : 2 * held_out_per_source])
    return split


ICONS = DrawnData(
    name="icons",
    title="Four icon families as four sources",
    notes="Variants of an icon are left out.",
    packages=PACKAGES,
    sources=SOURCES,
    licences=LICENCES,
    caption_styles=CAPTION_STYLES,
    metadata="the packages' own",
    examples=("arrow-right", "chess-knight", "flag", "keyboard", "satellite", "scooter", "skull", "treasure-chest"),
    read=read_icons,
    split=split_names,
    across=False,
    held_out_per_source=150,
)
