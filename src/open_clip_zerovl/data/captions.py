"""Captions that come from several fields of a sample: the `txt`, keys of its json, keys of other JSON members.

    --captions txt=0.5,syn=0.5        000.txt "a dog"      000.json {"syn": ["a brown dog runs", "a dog on grass"]}
    -> captions ["a dog", "a brown dog runs", "a dog on grass"], shown with shares 0.5, 0.25, 0.25

The share of a field that a sample lacks goes to its other fields, in proportion to theirs.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import caption_fields, field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import Fault
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.members import TEXT_EXTENSION, ShardError, locate_samples, opened
from open_clip_zerovl.shards.urls import local_path

JSON_EXTENSION = "json"


class DrawnCaptions(list[bytes]):
    """Captions of a sample; each step draws one of them.

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
    members: Mapping[str, bytes | None], captions: str | None
) -> DrawnCaptions | Fault | None:
    """All captions of a sample, field by field; None if it has none of the fields.

    A Fault if a member is not JSON.

    Args:
        members: suffix -> content, of at least the members that `member_of` names.
        captions: `--captions`, which names fields.
    """
    texts_and_shares: list[tuple[list[bytes], float]] = []
    for field, share in caption_fields(captions):
        texts = _texts_of(members, field)
        if isinstance(texts, Fault):
            return texts
        if texts:
            texts_and_shares.append((texts, share))
    if not texts_and_shares:
        return None
    total = sum(share for _, share in texts_and_shares)
    return DrawnCaptions(
        [text for texts, _ in texts_and_shares for text in texts],
        [share / total / len(texts) for texts, share in texts_and_shares for _ in texts],
    )


def _texts_of(members: Mapping[str, bytes | None], field: str) -> list[bytes] | Fault:
    """The captions of one field, [] if the sample lacks it."""
    member = member_of(field)
    content = members.get(member)
    if content is None:
        return []
    if field == TEXT_EXTENSION:
        return [content]
    try:
        value: Any = json.loads(content)
    except (
        ValueError,
        RecursionError,
    ) as error:  # RecursionError: brackets within brackets, thousands deep
        return Fault("bad json", f"has a member {member} that is not JSON ({error})")
    value = value.get(field.rpartition(":")[2]) if isinstance(value, dict) else None
    texts = [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]
    # JSON may hold half of a character, "\ud83d": its bytes are not UTF-8, and the caption is refused when it is drawn.
    return [text.encode("utf-8", "surrogatepass") for text in texts]


def caption_starts(source: Source) -> np.ndarray | None:
    """(n + 1,) index of the first caption of each sample, over all captions of the source; None if each sample has one caption.

        samples of 1, 3 and 2 captions  ->  [0, 1, 4, 6]

    Samples have several captions with `--captions one-per-epoch` and FIELD=SHARE,...; with `all` each caption is a
    sample of its own. In a shard that cannot be read each sample counts one caption.

    Raises:
        UserError: remote or compressed shards, whose captions cannot be counted.
    """
    fields = field_names(source.captions)
    if source.captions != "one-per-epoch" and not fields:
        return None
    counts = np.ones(source.num_samples, dtype=np.int64)
    for number, shard in enumerate(source.shards):
        begin, end = int(source.starts[number]), int(source.starts[number + 1])
        path = local_path(shard)
        if path is None:
            raise UserError(
                f"shards of source {source.name!r} are remote, first {shard}: their captions cannot be counted; copy them "
                f"here, or leave '--captions {source.captions}' out"
            )
        try:
            caption_counts = (
                _counts_of_fields(path, source.captions) if fields else open_index(path).captions
            )
        except ShardError:
            continue
        except tarfile.ReadError as error:
            raise UserError(
                f"shard {shard} of source {source.name!r} is not a plain tar ({error}): its captions cannot be counted; unpack "
                f"it, or leave '--captions {source.captions}' out"
            ) from error
        counts[begin : min(end, begin + len(caption_counts))] = caption_counts[: end - begin]
    return np.concatenate([[0], np.cumsum(counts)])


def _counts_of_fields(path: str, captions: str | None) -> np.ndarray:
    """(n,) number of captions of each whole sample of a plain local tar, at least 1."""
    wanted, counts = {member_of(field) for field in field_names(captions)}, []
    with opened(path) as descriptor:
        try:
            for _, members in locate_samples(path):
                content = {
                    name: os.pread(descriptor, at[1], at[0])
                    for name, at in members.items()
                    if name in wanted
                }
                texts = captions_of(content, captions)
                counts.append(max(1, len(texts)) if isinstance(texts, list) else 1)
        except ShardError:
            if not counts:
                raise
    return np.array(counts, dtype=np.int64)
