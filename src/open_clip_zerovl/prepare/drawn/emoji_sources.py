"""The demo's four sources: the drawings and captions of each emoji set, read from its packages.

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
from pathlib import Path
from typing import Any

from open_clip_zerovl.prepare.drawn.data import Drawing, Licence
from open_clip_zerovl.prepare.drawn.drawings import iconify_svg
from open_clip_zerovl.prepare.drawn.packages import NpmPackage, read_npm_package

#: The packages of the demo's data, 48 MB in all. The hashes are npm's `dist.integrity`. Another version changes the data's
#: fingerprint.
PACKAGES = {
    "noto": NpmPackage(
        "@iconify-json/noto",
        "1.2.9",
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
    ),
    "noto-flags": NpmPackage(
        "@svgmoji/noto",
        "3.2.0",
        "JgtNciB06hMDI1Pb1N2IgLh44XRMZUUNwBANzjY5jXTPqOCu1A1VA35ENvUsRhEUZOm8I+hbdAEHkwMVqxLeIQ==",
    ),
    "twemoji": NpmPackage(
        "@iconify-json/twemoji",
        "1.2.5",
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    "openmoji": NpmPackage(
        "openmoji",
        "17.0.0",
        "EBnYrNGdcdw+OSXmENeNE1yBNRu6tOraTmoOyUbJkTmvT/+XETp8RZLSJFzD3lrPc5N9CzsyPnRTk0Vp4UaI9w==",
    ),
    "fluent": NpmPackage(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
    ),
    "names": NpmPackage(
        "emoji-datasource",
        "16.0.0",
        "/qHKqK5Nr3+8zhgO6kHmF43Fm5C8HNn0AaFRIpgw8HF3+uF0Vfc8jgLI1ZQS5ba1vBzksS8NBCjHejwLb2D/Sg==",
    ),
    # Not a later release: in CLDR 48 the keyword list of every country flag is just "flag".
    "keywords": NpmPackage(
        "cldr-annotations-modern",
        "45.0.0",
        "y4YISGdwygWbXiYwWakzd4s0zY+83CceOPEZ+8bzCaPqCgX826Q2TSY3VqLPFE3830KbimgXpSousm2cep0mVw==",
    ),
    "keywords-derived": NpmPackage(
        "cldr-annotations-derived-modern",
        "45.0.0",
        "IIgaQV6f9wx09TKfpx/o9A0qWcryoEPR3VkPwj+8Mwthkxtx0uQtYffBNTo7gDhBC1ADwKhOZbyi5eac6I56Tw==",
    ),
}

SOURCES = ("noto", "twemoji", "openmoji", "fluent")


LICENCES = {
    "noto": Licence(
        "Apache License 2.0 (most of the country flags are in the public domain)",
        "Apache-2.0",
        "Noto Emoji, Google",
        ("noto", "noto-flags"),
    ),
    "twemoji": Licence(
        "Creative Commons Attribution 4.0 International",
        "CC-BY-4.0",
        "Twemoji, Twitter, Inc. and other contributors",
        ("twemoji",),
    ),
    "openmoji": Licence(
        "Creative Commons Attribution-ShareAlike 4.0 International",
        "CC-BY-SA-4.0",
        "OpenMoji, the open-source emoji and icon project",
        ("openmoji",),
    ),
    "fluent": Licence("MIT License", "MIT", "Fluent Emoji, Microsoft Corporation", ("fluent",)),
}


CAPTION_STYLES = {
    "noto": "short names and category, from emoji-datasource",
    "twemoji": "English keyword list, from Unicode CLDR",
    "openmoji": '"group: subgroup: annotation", from OpenMoji\'s own table',
    "fluent": "words of the drawing's file name",
}


def concept_of(code_points: str) -> str:
    """`'0023-fe0f-20e3'` becomes `'23-20E3'`: upper case, no leading zeros, no variation selector."""
    return "-".join(f"{int(x, 16):X}" for x in code_points.split("-") if int(x, 16) != 0xFE0F)


def read_sources(tarballs: Mapping[str, Path]) -> dict[str, dict[str, Drawing]]:
    """Read the four sources from the fetched packages.

    Args:
        tarballs: a tarball's path for each key of `PACKAGES`.

    Returns:
        For each source its emoji by concept, in the order of `emoji-datasource`. A concept is left out of a source
        that lacks its drawing or its caption.
    """
    names = {
        concept_of(row["unified"]): row
        for row in _json(tarballs["names"], "emoji.json")
        if row["category"] != "Component"  # skin tones by themselves
    }
    flags = _svgmoji_drawings(tarballs["noto-flags"])
    drawings = {
        # The newer package has no country flags; the older one adds these and nothing else.
        "noto": flags | {concept: svg for concept, (_, svg) in _iconify_drawings(tarballs["noto"]).items()},
        "twemoji": {concept: svg for concept, (_, svg) in _iconify_drawings(tarballs["twemoji"]).items()},
        "openmoji": _openmoji_drawings(tarballs["openmoji"]),
    }
    fluent = _iconify_drawings(tarballs["fluent"])
    drawings["fluent"] = {concept: svg for concept, (_, svg) in fluent.items()}
    captions = {
        "noto": {concept: _noto_caption(row) for concept, row in names.items()},
        "twemoji": _cldr_keywords(tarballs["keywords"], tarballs["keywords-derived"]),
        "openmoji": _openmoji_captions(tarballs["openmoji"]),
        "fluent": {concept: _words(name) for concept, (name, _) in fluent.items()},
    }
    return {
        source: {
            concept: Drawing(concept, drawings[source][concept], captions[source][concept], row["category"])
            for concept, row in names.items()
            if concept in drawings[source] and captions[source].get(concept)
        }
        for source in SOURCES
    }


# ---------------------------------------------------------------------------------------------------- captions


def _words(name: str) -> str:
    return " ".join(re.split(r"[-_\s]+", name.strip()))


def _noto_caption(row: Mapping[str, Any]) -> str:
    return f"{', '.join(_words(name) for name in row['short_names'])} ({row['category']})"


def _cldr_keywords(annotations: Path, derived: Path) -> dict[str, str]:
    """Concept -> keywords. CLDR has ZWJ sequences, flags and keycaps in a package of their own, *derived* annotations."""
    captions = {}
    for path, name in ((annotations, "annotations"), (derived, "annotationsDerived")):
        for characters, entry in _json(path, f"{name}/en/annotations.json")[name]["annotations"].items():
            if entry.get("default"):
                concept = concept_of("-".join(f"{ord(c):X}" for c in characters))
                captions[concept] = ", ".join(entry["default"])
    return captions


def _openmoji_captions(tarball: Path) -> dict[str, str]:
    table = read_npm_package(tarball, lambda name: name == "data/openmoji.csv")["data/openmoji.csv"].decode()
    return {
        concept_of(row["hexcode"]): f"{_words(row['group'])}: {_words(row['subgroups'])}: {row['annotation'].strip()}"
        for row in csv.DictReader(io.StringIO(table))
        if not row["skintone"]
    }


# ---------------------------------------------------------------------------------------------------- drawings


def _json(tarball: Path, name: str) -> Any:
    return json.loads(read_npm_package(tarball, lambda path: path == name)[name])


def _openmoji_drawings(tarball: Path) -> dict[str, str]:
    files = read_npm_package(tarball, lambda name: name.startswith("color/svg/") and name.endswith(".svg"))
    return {concept_of(Path(name).stem): svg.decode() for name, svg in files.items()}


def _iconify_drawings(tarball: Path) -> dict[str, tuple[str, str]]:
    """Concept -> (name, SVG). An Iconify package has drawings by name, and a table from code points to names."""
    files = read_npm_package(tarball, lambda name: name in {"icons.json", "chars.json"})
    icons, names = json.loads(files["icons.json"]), json.loads(files["chars.json"])
    drawings: dict[str, tuple[str, str]] = {}
    for code_points, name in sorted(names.items()):
        drawings.setdefault(concept_of(code_points), (name, iconify_svg(icons, name)))
    return drawings


def _svgmoji_drawings(tarball: Path) -> dict[str, str]:
    """Concept -> SVG, from a sprite: one document whose child elements are the drawings, with code points as ids."""
    name = "sprites/all.svg"
    sprite = read_npm_package(tarball, lambda path: path == name)[name].decode()
    drawings = {}
    for opening, svg in _children(sprite):
        identifier = re.search(r'\bid="([0-9A-Fa-f]+(?:-[0-9A-Fa-f]+)*)"', opening)
        if identifier:
            drawings[concept_of(identifier[1])] = svg
    return drawings


def _children(sprite: str) -> Iterator[tuple[str, str]]:
    """(opening tag, whole element as a document) of each `<svg>` element directly in the outermost one."""
    depth = start = 0
    opening = ""
    for tag in re.finditer(r"<svg\b[^>]*>|</svg>", sprite):
        if tag[0] == "</svg>":
            depth -= 1
            if depth == 1:
                inherited = "" if "xmlns:xlink" in opening else ' xmlns:xlink="http://www.w3.org/1999/xlink"'
                yield opening, f"<svg{inherited}{sprite[start + len('<svg') : tag.end()]}"
        elif not tag[0].endswith("/>"):
            if depth == 1:
                start, opening = tag.start(), tag[0]
            depth += 1
