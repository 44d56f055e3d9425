"""Four icon families as four sources of unequal size, which draw few of the same concepts.

The emoji sets are a special case: each draws the same 1,900 concepts. These families differ in style and in subjects, and
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
from scripts.drawn.data import SPLITS, Drawing, DrawnData, Split
from scripts.drawn.drawings import iconify_svg
from scripts.drawn.packages import read_npm_package

#: Families draw many icons twice, filled and in outline: the second is left out, so that no held-out icon has a duplicate.
_VARIANTS = re.compile(
    r"-(outline|variant|variant-outline|box|box-outline|circle|circle-outline|off|off-outline)$"
)


def read_icons(tarballs: Mapping[str, Path]) -> dict[str, dict[str, Drawing]]:
    """Read the four families from the fetched packages: for each its icons by name, in the package's order.

    Hidden icons, numbered variants of a name (`star-2` beside `star`) and variants of a shape (`star-outline`, `star-circle`)
    are left out.

    Args:
        tarballs: a family's tarball by its name.
    """
    return {
        source: {one.concept: one for one in _read_family(source, tarball)}
        for source, tarball in tarballs.items()
    }


def _read_family(source: str, tarball: Path) -> Iterator[Drawing]:
    files = read_npm_package(tarball, lambda name: name in {"icons.json", "metadata.json"})
    icons = json.loads(files["icons.json"])
    category_of: dict[str, str] = {}
    for category, names in (
        json.loads(files.get("metadata.json", b"{}")).get("categories", {}).items()
    ):
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
        return ", ".join(
            sorted({word for word in (*words, *category.lower().split()) if not word.isdigit()})
        )
    return " ".join(words)


def split_names(
    drawings: Mapping[str, Mapping[str, Any]], *, held_out_per_source: int, seed: int
) -> Split:
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


ICONS = DrawnData.described("icons", read_icons, split_names)
