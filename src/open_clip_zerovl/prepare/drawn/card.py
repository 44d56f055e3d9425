"""The data card of a set of drawings, as a dictionary and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_clip_zerovl.prepare.drawn.data import Drawings, DrawnData


def data_card(
    data: DrawnData,
    settings: Mapping[str, int],
    drawings: Drawings,
    counts: Mapping[str, Mapping[str, int]],
    split: Mapping[str, Mapping[str, list[str]]],
    blank: Mapping[str, list[str]],
) -> dict[str, Any]:
    """The data card; its entry `text` is the Markdown.

    Args:
        data, settings: of `prepare_drawn`.
        drawings: source -> concept -> drawing.
        counts: source -> kind -> number of pairs.
        split: "test" or "val" -> source -> held-out concepts.
        blank: source -> concepts left out because their drawing is blank.
    """
    sources = {
        source: {
            **counts[source],
            "blank": blank[source],
            "licence": data.licences[source].spdx,
            "credit": data.licences[source].credit,
            "caption_style": data.caption_styles[source],
            "examples": {c: drawings[source][c].caption for c in data.examples if c in drawings[source]},
        }
        for source in data.sources
    }
    in_every_source = set.intersection(*(set(drawings[source]) for source in data.sources))
    card: dict[str, Any] = {
        "settings": dict(settings),
        "packages": {key: str(package) for key, package in data.packages.items()},
        "sources": sources,
        "concepts_in_every_source": len(in_every_source),
        "held_out_concepts": {name: sum(map(len, held.values())) for name, held in split.items()},
        "held_out_concepts_in_every_source": {
            name: sum(c in in_every_source for concepts in held.values() for c in concepts)
            for name, held in split.items()
        },
    }
    return {**card, "text": _markdown(data, card)}


def _markdown(data: DrawnData, card: Mapping[str, Any]) -> str:
    sources = card["sources"]
    px = card["settings"]["px"]
    lines = [
        f"# {data.title}",
        "",
        f"Pictures of {px} x {px} pixels on white (PNG), one caption each. Made by `zerovl data {data.name}` from packages",
        f"of the npm registry. {data.notes} `docs/data.md` of open_clip_zerovl describes the layout.",
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
        "each held out in exactly one source and kept in the training sets of the others."
        if data.across
        else "drawn for each source by itself.",
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
        f"Metadata: {data.metadata}.",
        "",
        "## Captions by example",
        "",
        f"| concept | {' | '.join(sources)} |",
        f"|---|{'---|' * len(sources)}",
    ]
    for concept in data.examples:
        captions = [facts["examples"].get(concept, "") for facts in sources.values()]
        if any(captions):
            lines.append(f"| {concept} | {' | '.join(captions)} |")
    settings = ", ".join(f"{name} {value}" for name, value in card["settings"].items())
    packages = ", ".join(card["packages"].values())
    lines += ["", "## Made from", "", f"Settings: {settings}.", "", f"Packages: {packages}."]
    return "\n".join(lines) + "\n"
