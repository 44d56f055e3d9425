"""The demo's data: four emoji sets as four sources, which draw and caption the same concepts in different styles.

This is section 3.1 in small: sources differ in the style of their pictures and captions, so that in a batch of several sources
a model can tell pairs apart by their source instead of by their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.drawn.data import SPLITS, DrawnData
from open_clip_zerovl.prepare.drawn.emoji_sources import CAPTION_STYLES, LICENCES, PACKAGES, SOURCES, read_sources


def split_concepts(
    concepts: Mapping[str, Mapping[str, Any]], *, held_out_per_source: int, seed: int
) -> dict[str, dict[str, list[str]]]:
    """Choose which concepts each source holds out: `{"test" | "val": {source: [concept, ...]}}`.

    A concept is held out of one source and for one split at most; it stays in the training sets of the other sources. Test
    concepts exist in every source, so that each can be retrieved across sources. Validation takes the remaining ones of these,
    the smallest source first; where they run out, a source takes concepts that only some sources have.

    The result depends on the arguments only, not on the order of the mappings.

    Raises:
        UserError: the sources do not hold enough concepts.
    """
    sources = sorted(concepts, key=lambda source: (len(concepts[source]), source))
    shared = set.intersection(*(set(concepts[source]) for source in sources))
    rng = np.random.default_rng(seed)
    order = [str(c) for c in rng.permutation(sorted(shared))]
    others = [str(c) for c in rng.permutation(sorted(set().union(*concepts.values()) - shared))]
    wanted = held_out_per_source * len(sources)
    if len(order) < wanted:
        raise UserError(
            f"The test set needs {wanted} concepts that all sources have, and there are {len(order)}: "
            "lower held_out_per_source."
        )
    split: dict[str, dict[str, list[str]]] = {"test": {}, "val": {}}
    for name in SPLITS:
        for source in sources:
            chosen, order = order[:held_out_per_source], order[held_out_per_source:]
            missing = held_out_per_source - len(chosen)
            # A concept that only this source has would leave nothing to compare across sources.
            extra = [c for c in others if c in concepts[source] and sum(c in concepts[s] for s in sources) > 1][
                :missing
            ]
            if len(extra) < missing:
                raise UserError(
                    f"The {name} set needs {held_out_per_source} concepts of {source} that another source has too, "
                    f"and there are {len(chosen) + len(extra)} left: lower held_out_per_source."
                )
            others = [c for c in others if c not in extra]
            split[name][source] = sorted(chosen + extra)
    return split


EMOJI = DrawnData(
    name="emoji",
    title="Four emoji sets as four sources",
    notes="Skin tones are left out.",
    packages=PACKAGES,
    sources=SOURCES,
    licences=LICENCES,
    caption_styles=CAPTION_STYLES,
    metadata="emoji-datasource (MIT), Unicode CLDR (Unicode-3.0), OpenMoji (CC-BY-SA-4.0)",
    examples=("1F600", "1F436", "1F355", "1F697", "1F3B8", "2602", "1F30B", "1F52C"),
    read=read_sources,
    split=split_concepts,
    across=True,
)
