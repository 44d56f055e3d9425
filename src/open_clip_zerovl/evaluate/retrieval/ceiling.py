"""The highest RSUM that a retrieval set allows: below 600 where pictures share captions.

Equal captions have equal features, so that no model ranks one of them before another. A caption that belongs to m pictures
finds the one that is asked for among the first k with probability min(1, k/m), and a picture its own one likewise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from open_clip_zerovl.evaluate.retrieval.metrics import RECALL_KS


def rsum_ceiling(captions: Sequence[Sequence[str]]) -> float:
    """RSUM (0 to 600) of a model that ranks all pictures and texts as well as their captions allow.

    Args:
        captions: of each picture, those that are scored.
    """
    texts = Counter(text for own in captions for text in own)
    pictures = Counter(text for own in captions for text in set(own))
    recalls = 0.0
    for k in RECALL_KS:
        # A picture finds its rarest caption best.
        found = [max(_share_found(texts[text], own.count(text), k) for text in own) for own in captions]
        asked = sum(count * _share_found(pictures[text], 1, k) for text, count in texts.items())
        recalls += sum(found) / len(captions) + asked / texts.total()
    return 100 * recalls


def ceiling_note(name: str, captions: Sequence[Sequence[str]]) -> str | None:
    """A sentence for a set whose ceiling is well below 600, else None."""
    ceiling = rsum_ceiling(captions)
    if ceiling >= 570:
        return None
    distinct = len({text for own in captions for text in own})
    return (
        f"{distinct:,} different captions serve the {len(captions):,} pictures of {name}: RSUM can reach {ceiling:.0f} of 600 "
        "at best. Where training pictures share captions, too, --positives caption keeps them from being each other's negatives"
    )


def _share_found(tied: int, own: int, k: int) -> float:
    """The probability that one of `own` among `tied` items in random order is among the first k."""
    return 1 - math.comb(tied - own, k) / math.comb(tied, k) if k < tied else 1.0
