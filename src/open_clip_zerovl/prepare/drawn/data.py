"""What sources of drawings are: packages, captions, licences, and how pairs are held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.prepare.drawn.packages import NpmPackage, read_npm_package

SPLITS = ("test", "val")


@dataclass(frozen=True)
class Drawing:
    """One concept as one source has it: its drawing (an SVG document), its caption (one line), its group."""

    concept: str
    svg: str
    caption: str
    group: str


@dataclass(frozen=True)
class Licence:
    """The licence of a source's drawings.

    Attributes:
        title, spdx: its name and its SPDX id.
        credit: whose drawings they are.
        packages: keys of the packages with the drawings.
    """

    title: str
    spdx: str
    credit: str
    packages: tuple[str, ...]


Drawings = Mapping[str, Mapping[str, Drawing]]  # source -> concept -> drawing
Split = dict[str, dict[str, list[str]]]  # "test" or "val" -> source -> held-out concepts


@dataclass(frozen=True)
class DrawnData:
    """A set of sources, each with its own style of drawings and captions.

    Attributes:
        name: of the command, `zerovl data NAME`.
        title, notes: of the data card.
        packages: the npm packages by key. Another version changes the data's fingerprint.
        sources: their names, in order.
        licences, caption_styles: by source.
        metadata: credits for what is no drawing.
        examples: concepts that the data card shows.
        read: a tarball's path for each package -> the sources' drawings.
        split: (drawings, held_out_per_source=, seed=) -> the held-out concepts.
        across: whether sources share concepts, so that there are sets to retrieve across sources.
        held_out_per_source: pairs of each source for the test, and as many for validation.
        format: raised by one when the same packages and settings give other files than before.
    """

    name: str
    title: str
    notes: str
    packages: Mapping[str, NpmPackage]
    sources: tuple[str, ...]
    licences: Mapping[str, Licence]
    caption_styles: Mapping[str, str]
    metadata: str
    examples: tuple[str, ...]
    read: Callable[[Mapping[str, Path]], dict[str, dict[str, Drawing]]]
    split: Callable[..., Split]
    across: bool
    held_out_per_source: int = 200
    format: int = 1


def licence_text(licence: Licence, packages: Mapping[str, NpmPackage], tarballs: Mapping[str, Path]) -> str:
    """The text of a source's LICENSE file: the licence of its drawings, and the licence texts in its packages."""
    parts = [
        f"The pictures in this folder: {licence.credit}.\n"
        f"Licence: {licence.title} (SPDX: {licence.spdx}).\n"
        "Changes: rasterised on a white square, nothing else.\n"
        f"Drawings from the npm package(s) {', '.join(str(packages[key]) for key in licence.packages)}.\n"
    ]
    for key in licence.packages:
        texts = read_npm_package(tarballs[key], lambda name: name.lower() in {"license", "license.txt", "license.md"})
        if not texts:
            parts.append(f"The package {packages[key]} names this licence in its metadata and ships no text of it.\n")
        for name, text in sorted(texts.items()):
            parts.append(
                f"The package {packages[key]} ships this text as its {name} (a packager's own terms, where it differs "
                f"from the licence above):\n\n{text.decode().strip()}\n"
            )
    return f"\n{'-' * 72}\n\n".join(parts)
