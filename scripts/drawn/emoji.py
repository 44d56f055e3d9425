"""The demo's data: four emoji sets as four sources, which draw and caption the same concepts in different styles.

This is section 3.1 in small: sources differ in the style of their pictures and captions, so that in a batch of several sources
a model can tell pairs apart by their source instead of by their content.

A *concept* is an emoji's code point sequence without the variation selector FE0F, as upper-case hexadecimal numbers
joined by hyphens (`1F468-200D-1F467`). Concepts are those of `emoji-datasource`, without skin tones. Each source has its own
style of drawings and of captions; captions are made from the set's own or Unicode's metadata:

    noto      short names, and the category          emoji-datasource
    twemoji   keyword list                           Unicode CLDR annotations, English
    openmoji  "group: subgroup: annotation"          OpenMoji's own table
    fluent    the words of the drawing's file name   Fluent Emoji (flat)
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from scripts.drawn.packages import NpmPackage, read_npm_package

SPLITS = ("test", "val")
Split = dict[str, dict[str, list[str]]]  # "test" or "val" -> source -> held-out concepts
_FACTS = yaml.safe_load(Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8"))
SOURCES: dict[str, dict[str, Any]] = _FACTS["sources"]
PACKAGES = {key: NpmPackage(**facts) for key, facts in _FACTS["packages"].items()}


@dataclass(frozen=True)
class Drawing:
    """One concept as one source has it: its drawing (an SVG document), its caption (one line), its group."""

    concept: str
    svg: str
    caption: str
    group: str


def concept_of(code_points: str) -> str:
    """Turn `'0023-fe0f-20e3'` into `'23-20E3'`: upper case, no leading zeros, no variation selector."""
    return "-".join(f"{int(x, 16):X}" for x in code_points.split("-") if int(x, 16) != 0xFE0F)


def read_sources(tarballs: Mapping[str, Path]) -> dict[str, dict[str, Drawing]]:
    """Read the four sources from the fetched packages.

    Args:
        tarballs: a tarball's path for each key of the packages.

    Returns:
        For each source its emoji by concept, in the order of `emoji-datasource`. A concept is left out of a source
        that lacks its drawing or its caption.
    """
    names = {
        concept_of(row["unified"]): row
        for row in _json(tarballs["names"], "emoji.json")
        if row["category"] != "Component"  # skin tones by themselves
    }
    noto, twemoji, fluent = (
        _iconify_drawings(tarballs[source]) for source in ("noto", "twemoji", "fluent")
    )
    drawings = {
        # The newer package has no country flags; the older one adds these and nothing else.
        "noto": _svgmoji_drawings(tarballs["noto-flags"]) | _svgs(noto),
        "twemoji": _svgs(twemoji),
        "openmoji": _openmoji_drawings(tarballs["openmoji"]),
        "fluent": _svgs(fluent),
    }
    captions = {
        "noto": {concept: _noto_caption(row) for concept, row in names.items()},
        "twemoji": _cldr_keywords(tarballs["keywords"], tarballs["keywords-derived"]),
        "openmoji": _openmoji_captions(tarballs["openmoji"]),
        "fluent": {concept: _words(name) for concept, (name, _) in fluent.items()},
    }
    return {
        source: {
            concept: Drawing(concept, own[concept], captions[source][concept], row["category"])
            for concept, row in names.items()
            if concept in own and captions[source].get(concept)
        }
        for source, own in drawings.items()
    }


def _svgs(drawings: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {concept: svg for concept, (_, svg) in drawings.items()}


# ---------------------------------------------------------------------------------------------------- captions


def _words(name: str) -> str:
    return " ".join(re.split(r"[-_\s]+", name.strip()))


def _noto_caption(row: Mapping[str, Any]) -> str:
    return f"{', '.join(_words(name) for name in row['short_names'])} ({row['category']})"


def _cldr_keywords(annotations: Path, derived: Path) -> dict[str, str]:
    """Read keywords by concept. CLDR has ZWJ sequences, flags and keycaps in a package of their own, *derived* annotations."""
    captions = {}
    for path, name in ((annotations, "annotations"), (derived, "annotationsDerived")):
        for characters, entry in _json(path, f"{name}/en/annotations.json")[name][
            "annotations"
        ].items():
            if entry.get("default"):
                concept = concept_of("-".join(f"{ord(c):X}" for c in characters))
                captions[concept] = ", ".join(entry["default"])
    return captions


def _openmoji_captions(tarball: Path) -> dict[str, str]:
    table = read_npm_package(tarball, lambda name: name == "data/openmoji.csv")[
        "data/openmoji.csv"
    ].decode()
    return {
        concept_of(
            row["hexcode"]
        ): f"{_words(row['group'])}: {_words(row['subgroups'])}: {row['annotation'].strip()}"
        for row in csv.DictReader(io.StringIO(table))
        if not row["skintone"]
    }


# ---------------------------------------------------------------------------------------------------- drawings


def _json(tarball: Path, name: str) -> Any:
    return json.loads(read_npm_package(tarball, lambda path: path == name)[name])


def _openmoji_drawings(tarball: Path) -> dict[str, str]:
    files = read_npm_package(
        tarball, lambda name: name.startswith("color/svg/") and name.endswith(".svg")
    )
    return {concept_of(Path(name).stem): svg.decode() for name, svg in files.items()}


def _iconify_drawings(tarball: Path) -> dict[str, tuple[str, str]]:
    """Read (name, SVG) by concept. An Iconify package has drawings by name, and a table from code points to names."""
    files = read_npm_package(tarball, lambda name: name in {"icons.json", "chars.json"})
    icons, names = json.loads(files["icons.json"]), json.loads(files["chars.json"])
    drawings: dict[str, tuple[str, str]] = {}
    for code_points, name in sorted(names.items()):
        drawings.setdefault(concept_of(code_points), (name, iconify_svg(icons, name)))
    return drawings


def _svgmoji_drawings(tarball: Path) -> dict[str, str]:
    """Read SVGs by concept from a sprite: one document whose child elements are the drawings, with code points as ids."""
    name = "sprites/all.svg"
    sprite = read_npm_package(tarball, lambda path: path == name)[name].decode()
    drawings = {}
    for opening, svg in _children(sprite):
        identifier = re.search(r'\bid="([0-9A-Fa-f]+(?:-[0-9A-Fa-f]+)*)"', opening)
        if identifier:
            drawings[concept_of(identifier[1])] = svg
    return drawings


def _children(sprite: str) -> Iterator[tuple[str, str]]:
    """Yield (opening tag, whole element as a document) of each `<svg>` element directly in the outermost one."""
    depth = start = 0
    opening = ""
    for tag in re.finditer(r"<svg\b[^>]*>|</svg>", sprite):
        if tag[0] == "</svg>":
            depth -= 1
            if depth == 1:
                inherited = (
                    ""
                    if "xmlns:xlink" in opening
                    else ' xmlns:xlink="http://www.w3.org/1999/xlink"'
                )
                yield opening, f"<svg{inherited}{sprite[start + len('<svg') : tag.end()]}"
        elif not tag[0].endswith("/>"):
            if depth == 1:
                start, opening = tag.start(), tag[0]
            depth += 1


def rasterise(svg: str, px: int) -> bytes:
    """Draw an SVG document on a white square, px x px, RGB, as PNG bytes.

    A drawing that is not square (a flag) keeps its proportions and gets white margins.
    """
    import resvg_py  # an extra's dependency: only the demo's data needs it

    png = resvg_py.svg_to_bytes(
        svg_string=_square(svg), width=px, height=px, background="#ffffff", skip_system_fonts=True
    )
    picture = io.BytesIO()
    # Through PIL: resvg writes an alpha channel, which is opaque everywhere here.
    Image.open(io.BytesIO(bytes(png))).convert("RGB").save(picture, "PNG", optimize=True)
    return picture.getvalue()


def is_blank(png: bytes) -> bool:
    """Return whether all pixels of a PNG picture are (nearly) the same."""
    extrema = Image.open(io.BytesIO(png)).convert("RGB").getextrema()
    return all(isinstance(band, tuple) and band[1] - band[0] < 8 for band in extrema)


def _square(svg: str) -> str:
    """Give the document a square viewBox around the drawing, and no width and height."""
    begin, end = re.search(r"<svg\b[^>]*>", svg).span()  # type: ignore[union-attr]
    attributes = dict(re.findall(r'\b(viewBox|width|height)="([^"]*)"', svg[begin:end]))
    if "viewBox" in attributes:
        box = re.split(r"[\s,]+", attributes["viewBox"].strip())
    else:
        box = ["0", "0", *(attributes[key].removesuffix("px") for key in ("width", "height"))]
    left, top, width, height = map(float, box)
    side = max(width, height)
    view_box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
    tag = re.sub(r'\s(?:viewBox|width|height|preserveAspectRatio)="[^"]*"', "", svg[begin:end])
    tag = f'<svg viewBox="{view_box}"{tag[len("<svg") :]}'
    return svg[:begin] + tag + svg[end:]


def iconify_svg(icons: Mapping[str, Any], name: str) -> str:
    """Write an icon's SVG, where an alias is another icon, mirrored or rotated by quarter turns that add up."""
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


def split_concepts(
    concepts: Mapping[str, Mapping[str, Any]], *, held_out_per_source: int, seed: int
) -> Split:
    """Choose which concepts each source holds out: `{"test" | "val": {source: [concept, ...]}}`.

    A concept is held out of one source and for one split at most; it stays in the training sets of the other sources. Test
    concepts exist in every source, so that each can be retrieved across sources. Validation takes the remaining ones of these,
    the smallest source first; where they run out, a source takes concepts that only some sources have.

    The result depends on the arguments only, not on the order of the mappings.
    """
    sources = sorted(concepts, key=lambda source: (len(concepts[source]), source))
    shared = set.intersection(*(set(concepts[source]) for source in sources))
    rng = np.random.default_rng(seed)
    order = [str(c) for c in rng.permutation(sorted(shared))]
    others = [str(c) for c in rng.permutation(sorted(set().union(*concepts.values()) - shared))]
    assert len(order) >= held_out_per_source * len(sources), (
        "too few concepts that all sources have"
    )
    split: Split = {"test": {}, "val": {}}
    for name in SPLITS:
        for source in sources:
            chosen, order = order[:held_out_per_source], order[held_out_per_source:]
            missing = held_out_per_source - len(chosen)
            # A concept that only this source has would leave nothing to compare across sources.
            extra = [
                c
                for c in others
                if c in concepts[source] and sum(c in concepts[s] for s in sources) > 1
            ][:missing]
            assert len(extra) == missing, f"too few concepts to hold out of {source}"
            others = [c for c in others if c not in extra]
            split[name][source] = sorted(chosen + extra)
    return split
