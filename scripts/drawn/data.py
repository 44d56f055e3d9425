"""The description of a data set of drawings: its sources with their licences, its npm packages, how pairs are held out.

`sources.yaml` holds the facts; `emoji.EMOJI` adds the functions that read and split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.drawn.packages import NpmPackage, read_npm_package

SPLITS = ("test", "val")


@dataclass(frozen=True)
class Drawing:
    """One concept as one source has it: its drawing (an SVG document), its caption (one line), its group."""

    concept: str
    svg: str
    caption: str
    group: str


@dataclass(frozen=True)
class Source:
    """One set of drawings.

    Attributes:
        drawings_by: the credit.
        licence, spdx: the licence's name and its SPDX id.
        packages: keys of the packages with the drawings.
        captions: their style, for the data card.
    """

    drawings_by: str
    licence: str
    spdx: str
    packages: tuple[str, ...]
    captions: str

    def licence_text(self, packages: Mapping[str, NpmPackage], tarballs: Mapping[str, Path]) -> str:
        """The text of a LICENSE file: the licence of the drawings, and the licence texts in their packages."""
        parts = [
            f"The pictures in this folder: {self.drawings_by}.\n"
            f"Licence: {self.licence} (SPDX: {self.spdx}).\n"
            "Changes: rasterised on a white square, nothing else.\n"
            f"Drawings from the npm package(s) {', '.join(str(packages[key]) for key in self.packages)}.\n"
        ]
        for key in self.packages:
            texts = read_npm_package(
                tarballs[key], lambda name: name.lower() in {"license", "license.txt", "license.md"}
            )
            if not texts:
                parts.append(
                    f"The package {packages[key]} names this licence in its metadata and ships no text of it.\n"
                )
            parts += [
                f"The package {packages[key]} ships this text as its {name} (a packager's own terms, where it differs "
                f"from the licence above):\n\n{text.decode().strip()}\n"
                for name, text in sorted(texts.items())
            ]
        return f"\n{'-' * 72}\n\n".join(parts)


Drawings = Mapping[str, Mapping[str, Drawing]]  # source -> concept -> drawing
Split = dict[str, dict[str, list[str]]]  # "test" or "val" -> source -> held-out concepts


@dataclass(frozen=True)
class DrawnData:
    """A set of sources, each with its own style of drawings and captions.

    Attributes:
        title, notes, metadata, examples: for the data card; `examples` are concepts.
        packages: the npm packages by key. Another version changes the data's fingerprint.
        sources: by name, in order.
        read: a tarball's path for each package -> the sources' drawings.
        split: (drawings, held_out_per_source=, seed=) -> the held-out concepts.
        held_out_per_source: pairs of each source for the test, and as many for validation.
    """

    name: str
    title: str
    notes: str
    metadata: str
    examples: tuple[str, ...]
    held_out_per_source: int
    packages: dict[str, NpmPackage]
    sources: Mapping[str, Source]
    read: Callable[[Mapping[str, Path]], dict[str, dict[str, Drawing]]]
    split: Callable[..., Split]

    @classmethod
    def described(cls, name: str, read: Callable, split: Callable[..., Split]) -> DrawnData:
        """The data set that `sources.yaml` describes under a name."""
        facts = yaml.safe_load(
            Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8")
        )[name]
        facts["packages"] = {key: NpmPackage(**one) for key, one in facts["packages"].items()}
        facts["sources"] = {
            key: Source(**{**one, "packages": tuple(one["packages"])})
            for key, one in facts["sources"].items()
        }
        return cls(name, **{**facts, "examples": tuple(facts["examples"])}, read=read, split=split)
