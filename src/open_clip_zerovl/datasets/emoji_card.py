"""The data card of the demo's emoji data, as a dictionary and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_clip_zerovl.datasets.emoji_sources import LICENCES, PACKAGES, SOURCES, Emoji

_CAPTION_STYLES = {
    "noto": "short names and category, from emoji-datasource",
    "twemoji": "English keyword list, from Unicode CLDR",
    "openmoji": '"group: subgroup: annotation", from OpenMoji\'s own table',
    "fluent": "words of the drawing's file name",
}

#: Concepts that are shown as examples.
_EXAMPLES = ("1F600", "1F436", "1F355", "1F697", "1F3B8", "2602", "1F30B", "1F52C")


def data_card(
    settings: Mapping[str, int],
    emoji: Mapping[str, Mapping[str, Emoji]],
    counts: Mapping[str, Mapping[str, int]],
    split: Mapping[str, Mapping[str, list[str]]],
    blank: Mapping[str, list[str]],
) -> dict[str, Any]:
    """The data card; its entry `text` is the Markdown.

    Args:
        settings: of `prepare_emoji`.
        emoji: source -> concept -> emoji.
        counts: source -> kind -> number of pairs.
        split: "test" or "val" -> source -> held-out concepts.
        blank: source -> concepts left out because their drawing is blank.
    """
    sources = {
        source: {
            **counts[source],
            "blank": blank[source],
            "licence": LICENCES[source].spdx,
            "credit": LICENCES[source].credit,
            "caption_style": _CAPTION_STYLES[source],
            "examples": {c: emoji[source][c].caption for c in _EXAMPLES if c in emoji[source]},
        }
        for source in SOURCES
    }
    in_every_source = set.intersection(*(set(emoji[source]) for source in SOURCES))
    card: dict[str, Any] = {
        "settings": dict(settings),
        "packages": {key: str(package) for key, package in PACKAGES.items()},
        "sources": sources,
        "concepts_in_every_source": len(in_every_source),
        "held_out_concepts": {name: sum(map(len, held.values())) for name, held in split.items()},
        "held_out_concepts_in_every_source": {
            name: sum(c in in_every_source for concepts in held.values() for c in concepts)
            for name, held in split.items()
        },
    }
    return {**card, "text": _markdown(card)}


def _markdown(card: Mapping[str, Any]) -> str:
    sources = card["sources"]
    px = card["settings"]["px"]
    lines = [
        "# Four emoji sets as four sources",
        "",
        f"Pictures of {px} x {px} pixels on white (PNG), one caption each. Made by `zerovl data emoji` from packages",
        "of the npm registry. Skin tones are left out. `docs/data.md` of open_clip_zerovl describes the layout.",
        "",
        "## Counts",
        "",
        "| source | pairs | train | shards | test | validation | blank drawings left out |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, facts in sources.items():
        lines.append(
            f"| {name} | {facts['pairs']} | {facts['train']} | {facts['shards']} | {facts['test']} "
            f"| {facts['val']} | {len(facts['blank'])} |"
        )
    held, everywhere = card["held_out_concepts"], card["held_out_concepts_in_every_source"]
    lines += [
        "",
        f"{card['concepts_in_every_source']} concepts are in every source. Held out are",
        f"{held['test']} concepts for the test ({everywhere['test']} of them in every source) and",
        f"{held['val']} for validation ({everywhere['val']} of them in every source),",
        "each held out in exactly one source and kept in the training sets of the others.",
        "",
        "## Licences",
        "",
        "| source | drawings by | licence (SPDX) | captions |",
        "|---|---|---|---|",
        *(
            f"| {name} | {facts['credit']} | {facts['licence']} | {facts['caption_style']} |"
            for name, facts in sources.items()
        ),
        "",
        "Each folder with pictures holds the LICENSE of its set. No folder holds pictures of two sets.",
        "Metadata: emoji-datasource (MIT), Unicode CLDR (Unicode-3.0), OpenMoji (CC-BY-SA-4.0).",
        "",
        "## Captions by example",
        "",
        f"| concept | {' | '.join(sources)} |",
        f"|---|{'---|' * len(sources)}",
    ]
    for concept in _EXAMPLES:
        captions = [facts["examples"].get(concept, "") for facts in sources.values()]
        if any(captions):
            lines.append(f"| {concept} | {' | '.join(captions)} |")
    settings = ", ".join(f"{name} {value}" for name, value in card["settings"].items())
    packages = ", ".join(card["packages"].values())
    lines += ["", "## Made from", "", f"Settings: {settings}.", "", f"Packages: {packages}."]
    return "\n".join(lines) + "\n"
