"""The captions of a sample: the lines of its `txt`, keys of its json, keys of other JSON members; the one that a step shows.

    --captions txt=0.5,syn=0.5        000.txt "a dog"      000.json {"syn": ["a brown dog runs", "a dog on grass"]}
    -> captions ["a dog", "a brown dog runs", "a dog on grass"], shown with shares 0.5, 0.25, 0.25

The share of a field that a sample lacks goes to its other fields, in proportion to theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.names import caption_fields, field_names
from open_clip_zerovl.shards.tar import TEXT_EXTENSION, WANTED
from open_clip_zerovl.shards.texts import Fault, caption_lines

JSON_EXTENSION = "json"


def member_of(field: str) -> str:
    """Return the member of a sample that holds a field: `syn.json:syn_text` -> `syn.json`."""
    if field == TEXT_EXTENSION:
        return TEXT_EXTENSION
    return field.partition(":")[0] if ":" in field else JSON_EXTENSION


def members_of(captions: str | None) -> frozenset[str]:
    """Return the suffixes of pictures, and of the members that hold captions."""
    return WANTED | {member_of(field) for field in field_names(captions)}


def texts_of(
    files: Mapping[str, bytes], captions: str | None
) -> tuple[list[bytes], Sequence[float]]:
    """Return the captions of a sample, and the share with which each is drawn, or no shares where they take turns.

    Args:
        files: suffix -> content, of at least the members that `member_of` names.
        captions: `--captions`.

    Raises:
        Fault: it has none of the fields, or a member is not JSON.
    """
    if fields := caption_fields(captions):
        given = [(_texts_in(files, field), share) for field, share in fields]
        total = sum(share for texts, share in given if texts)
        if total:
            return (
                [text for texts, _ in given for text in texts],
                [share / total / len(texts) for texts, share in given for _ in texts],
            )
    elif TEXT_EXTENSION in files:
        lines = caption_lines(files[TEXT_EXTENSION])
        if captions in (None, "joined"):
            lines = [b" ".join(lines)]
        return lines[: 1 if captions == "first" else None], ()
    raise Fault("no caption", f"has no caption ({', '.join(field_names(captions)) or 'txt'})")


def _texts_in(files: Mapping[str, bytes], field: str) -> list[bytes]:
    """Return the captions of one field, [] if the sample lacks it. Fault as `texts_of`."""
    member = member_of(field)
    content = files.get(member)
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
        raise Fault("bad json", f"has a member {member} that is not JSON ({error})") from error
    value = value.get(field.rpartition(":")[2]) if isinstance(value, dict) else None
    texts = [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]
    # JSON may hold half of a character, "\ud83d": its bytes are not UTF-8, and the caption is refused when it is drawn.
    return [text.encode("utf-8", "surrogatepass") for text in texts]


def draw(
    texts: Sequence[bytes],
    shares: Sequence[float],
    *,
    seed: int,
    source: int,
    position: int,
    samples: int,
) -> bytes:
    """Choose the caption that a step shows, an empty one of none.

    Passes take an image's captions in turn, and the seed draws which is the first. Where captions come from several fields,
    each pass draws a field by its share.

    Args:
        texts, shares: see `texts_of`.
        source: index of the source.
        position: of the sample in the source's cycle.
        samples: of the source.
    """
    if shares:
        u = stream_seed(seed, Purpose.CAPTION_FIELD, source, position) / 2**64
        for text, share in zip(texts, shares, strict=True):
            u -= share
            if u < 0:
                return text
        return texts[-1]
    if len(texts) <= 1:
        return texts[0] if texts else b""
    lap, sample = divmod(position, samples)
    return texts[(stream_seed(seed, Purpose.CAPTION, source, sample) + lap) % len(texts)]
