"""The samples that the bias report measures: some of each source, read from its first shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import BadImage, decode_image
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.members import TEXT_EXTENSION, Sample, image_of

SHARDS_READ = 8  # a source's samples come from so many shards, evenly spaced; from more only where these hold too few

_FALSE = frozenset(("", "0", "0.0", "no", "false", "none", "null"))  # values that say no


@dataclass(frozen=True)
class SourceSample:
    """One pair: its source, its encoded picture, its caption, and what fields of its json say.

    Attributes:
        concept: what it shows; None where no field names it, or the field is empty.
        held_out: whether it was kept out of training.
    """

    source: str
    image: bytes
    caption: str
    concept: str | None = None
    held_out: bool = True

    def picture(self) -> Image.Image:
        """The picture as RGB. BadImage where it cannot be decoded."""
        return decode_image(self.image)


def read_source_samples(
    sources: Sequence[Source], limit: int, *, concept_field: str | None = None, held_out_field: str | None = None
) -> tuple[list[SourceSample], dict[str, int]]:
    """Up to `limit` pairs of each source, from 8 evenly spaced shards, in the order of the shards.

    The other shards follow where these 8 hold fewer than `limit` pairs. A sample without a caption, or without a picture that
    can be decoded, is passed over and counted. Of several captions (lines of the text) the first is taken.

    Args:
        concept_field: a field of each sample's json, or a column of a table, that names its concept. The source probe keeps all
            samples of a concept in one fold (`measures.source_probe_accuracy`).
        held_out_field: likewise, a field that is true (not null, false, 0, "no" or empty) for pairs kept out of training; None
            takes all as held out.

    Returns:
        The samples, source by source; source -> samples passed over.

    Raises:
        UserError: a limit below 2, remote shards, a shard that is no tar, a source without a usable pair, a sample without the
            field.
    """
    if limit < 2:
        raise UserError(f"{limit} samples a source are too few to measure; take at least 2")
    samples: list[SourceSample] = []
    skipped: dict[str, int] = {}
    for source in sources:
        numbers = range(len(source.shards))
        spaced = numbers[:: -(-len(numbers) // SHARDS_READ)]
        share = -(-limit // len(spaced))
        own: list[SourceSample] = []
        skipped[source.name] = 0
        for shard in [*spaced, *(number for number in numbers if number not in spaced)]:
            taken = 0
            for sample in samples_of(source, shard):
                if taken == share or len(own) == limit:
                    break
                pair = _pair(source.name, sample, concept_field, held_out_field, source.shards[shard])
                if pair is None:
                    skipped[source.name] += 1
                else:
                    own.append(pair)
                    taken += 1
            if len(own) == limit:
                break
        if not own:
            raise UserError(f"source {source.name!r} has no pair of a readable picture and a caption in its shards")
        samples += own
    return samples, skipped


def _pair(
    source: str, sample: Sample, concept_field: str | None, held_out_field: str | None, where: str
) -> SourceSample | None:
    image = image_of(sample.files)
    text = sample.files.get(TEXT_EXTENSION, b"").decode("utf-8", errors="replace")
    # Lines are captions: all of them as one text would be five times as long as what any model is asked for, and cut off.
    caption = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if image is None or not caption:
        return None
    concept, held_out = None, True
    if concept_field is not None:
        value = _field(sample, concept_field, "--concept", where)
        concept = None if value is None or value == "" else str(value)
    if held_out_field is not None:
        held_out = str(_field(sample, held_out_field, "--held-out", where)).strip().lower() not in _FALSE
    pair = SourceSample(source, image, caption, concept, held_out)
    try:
        pair.picture()
    except BadImage:
        return None
    return pair


def _field(sample: Sample, field: str, flag: str, where: str) -> Any:
    """A field of a sample's json. UserError where it has none."""
    try:
        return json.loads(sample.files["json"])[field]
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"sample {sample.key} of {where} has no field {field!r} in its json (of a table: no such column); leave {flag} "
            "out, or name another"
        ) from error
