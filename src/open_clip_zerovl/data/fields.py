"""Captions that come from several fields of a sample: the `txt`, keys of its json, keys of other JSON members.

    --captions txt=0.5,syn=0.5        000.txt "a dog"      000.json {"syn": ["a brown dog runs", "a dog on grass"]}
    -> captions ["a dog", "a brown dog runs", "a dog on grass"], shown with shares 0.5, 0.25, 0.25

The share of a field that a sample lacks goes to its other fields, in proportion to theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from open_clip_zerovl.data.health import Fault
from open_clip_zerovl.tar.members import TEXT_EXTENSION

JSON_EXTENSION = "json"


class DrawnCaptions(list[bytes]):
    """Captions of a sample, of which one is drawn each time.

    Attributes:
        shares: probability of each caption; they sum to 1.
    """

    def __init__(self, captions: Iterable[bytes], shares: Iterable[float]) -> None:
        super().__init__(captions)
        self.shares = list(shares)

    def at(self, u: float) -> int:
        """The number of the caption that u, uniform in [0, 1), draws."""
        for number, share in enumerate(self.shares):
            u -= share
            if u < 0:
                return number
        return len(self) - 1


def member_of(field: str) -> str:
    """The member of a sample that holds a field: `syn.json:syn_text` -> `syn.json`."""
    if field == TEXT_EXTENSION:
        return TEXT_EXTENSION
    return field.partition(":")[0] if ":" in field else JSON_EXTENSION


def captions_of(
    members: Mapping[str, bytes | None], fields: Iterable[tuple[str, float]]
) -> DrawnCaptions | Fault | None:
    """All captions of a sample, field by field; None where it has none of the fields, a Fault where a member is no JSON.

    Args:
        members: suffix -> content, of at least the members that `member_of` names.
        fields: of `names.caption_fields`.
    """
    found: list[tuple[list[bytes], float]] = []
    for field, share in fields:
        member = member_of(field)
        content = members.get(member)
        if content is None:
            continue
        if field == TEXT_EXTENSION:
            found.append(([content], share))
            continue
        try:
            value: Any = json.loads(content)
        except ValueError as error:
            return Fault("bad json", f"has a member {member} that is no JSON ({error})")
        value = value.get(field.rpartition(":")[2]) if isinstance(value, dict) else None
        texts = [text.encode() for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if texts:
            found.append((texts, share))
    total = sum(share for _, share in found)
    if not found:
        return None
    return DrawnCaptions(
        [text for texts, _ in found for text in texts],
        [share / total / len(texts) for texts, share in found for _ in texts],
    )
