"""The samples that `zerovl compare` measures: some pairs of each source, and their embeddings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.identity import digest_of
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.reading import Embeddable, Listed
from open_clip_zerovl.evaluate.compare.measures import check_source_probe, probe_groups
from open_clip_zerovl.evaluate.embedded import embedded
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.pictures import BadPicture

log = logging.getLogger(__name__)

SHARDS_READ = 8  # shards from which a source's samples are taken, evenly spaced; more only if these hold too few

# Truth values, and the splits that pairs may be named by: the emoji's say "test" or "val", or nothing.
_NO = ("", "0", "0.0", "f", "false", "n", "no", "off", "none", "null", "nan", "train", "training")
_YES = ("1", "1.0", "t", "true", "y", "yes", "on", "test", "val", "valid", "validation", "dev")


@dataclass(frozen=True)
class ComparedPair:
    """One pair: its source, its encoded picture, its caption, and values of its json.

    Attributes:
        concept: its concept; None if no field names it, or the field is empty.
        held_out: True if it was kept out of training.
    """

    source: str
    image: bytes
    caption: str
    concept: str | None = None
    held_out: bool = True

    def picture(self) -> Image.Image:
        """The picture as RGB. BadPicture if it cannot be decoded."""
        return decode_image(self.image)


def read_samples(
    sources: Sequence[Source],
    limit: int,
    *,
    concept_field: str | None = None,
    held_out_field: str | None = None,
) -> tuple[list[ComparedPair], dict[str, int]]:
    """Up to `limit` pairs of each source, from 8 evenly spaced shards, in the order of the shards.

    The other shards follow where these 8 hold fewer than `limit` pairs. A sample without a caption, or without a picture that
    can be decoded, is passed over, counted, and named in a warning. The first of several captions (lines of the text) is taken.

    Args:
        concept_field: a field of each sample's json, or a column of a table, that names its concept. The source probe keeps all
            samples of a concept in one fold (`measures.source_probe_guesses`).
        held_out_field: likewise, a field that is true for pairs kept out of training (true, t, yes, y, on or 1; the rest has
            false, f, no, n, off, 0, null, nan or nothing; the names of splits are known, too); None takes all as held out.

    Returns:
        The samples, source by source; source -> samples passed over.

    Raises:
        UserError: remote shards, a shard that is not a tar, a source without a usable pair, a sample
            without the field, or one whose held-out field is neither true nor false.
    """
    samples: list[ComparedPair] = []
    skipped: dict[str, int] = {}
    for source in tqdm(sources, desc="reading samples", unit="source", leave=False):
        numbers = range(len(source.shards))
        spaced = numbers[:: -(-len(numbers) // SHARDS_READ)]
        share = -(-limit // len(spaced))
        pairs: list[ComparedPair] = []
        skipped[source.name] = 0
        for shard in [*spaced, *(number for number in numbers if number not in spaced)]:
            taken = 0
            for sample in samples_of(source, shard):
                if taken == share or len(pairs) == limit:
                    break
                pair = _pair(
                    source.name, sample, concept_field, held_out_field, source.shards[shard]
                )
                if pair is None:
                    skipped[source.name] += 1
                else:
                    pairs.append(pair)
                    taken += 1
            if len(pairs) == limit:
                break
        if not pairs:
            raise UserError(
                f"source {source.name!r} has no pair of a readable picture and a caption in its shards"
            )
        samples += pairs
        if count := skipped[source.name]:
            log.warning(
                "Source %s: %d samples without a readable picture and a caption were passed over.",
                source.name,
                count,
            )
    return samples, skipped


def _pair(
    source: str,
    sample: Sample,
    concept_field: str | None,
    held_out_field: str | None,
    where: str,
) -> ComparedPair | None:
    image, captions = sample.image, sample.captions
    if image is None or not captions:
        return None
    concept, held_out = None, True
    if concept_field is not None:
        value = _field(sample, concept_field, "--concept", where)
        concept = None if value is None or value == "" else str(value)
    if held_out_field is not None:
        value = _field(sample, held_out_field, "--held-out", where)
        word = str(value).strip().lower()
        held_out = word in _YES
        if not held_out and word not in _NO:
            raise UserError(
                f"sample {sample.key} of {where} has {value!r} in its field {held_out_field!r}, neither true nor false: write "
                "true for pairs kept out of training and false for the rest, or name another field with --held-out"
            )
    pair = ComparedPair(source, image, captions[0], concept, held_out)
    try:
        pair.picture()
    except BadPicture:
        return None
    return pair


def _field(sample: Sample, field: str, flag: str, where: str) -> Any:
    """A field of a sample's json. UserError if it has none."""
    if field not in sample.about:
        raise UserError(
            f"sample {sample.key} of {where} has no field {field!r} in its json (in a table: no such column); leave {flag} "
            "out, or name another"
        )
    return sample.about[field]


def rows_by_source(samples: Sequence[ComparedPair]) -> dict[str, list[int]]:
    """Source -> the indices of its samples."""
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.source, []).append(row)
    return rows


def check_probe(samples: Sequence[ComparedPair]) -> None:
    """`check_source_probe` on the sources and concepts of samples."""
    check_source_probe(
        [sample.source for sample in samples], probe_groups([sample.concept for sample in samples])
    )


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


def encode(
    encoder: Encoder, samples: Sequence[ComparedPair], name: str, folder: Path
) -> tuple[Tensor, Tensor, float]:
    """Embed the samples, or read their embeddings where an earlier call has left them.

    Args:
        name: for the progress bar.
        folder: the embeddings of each model are kept in a folder of their own below it.

    Returns:
        image_features, text_features (N, D), L2-normalised, float32, on the CPU; the factor `logit_scale.exp()`.

    Raises:
        UserError: a model that cannot be loaded or whose embeddings are not finite, a folder that cannot be written.
    """
    model = FrozenModel.load(encoder)
    digests = [model.fingerprints["image"], model.fingerprints["text"]]

    def pair(row: int) -> Embeddable:
        return Embeddable(row, [samples[row].picture()], [(row, samples[row].caption)])

    pair_digests = [digest_of(sample.image, sample.caption) for sample in samples]
    store, _ = embedded(
        folder / digest_of(digests)[:16],
        "compare",
        model,
        Listed(len(samples), pair, part=1),
        pair_digests,
        digests,
        name="samples",
        captions=len(samples),
        batch_size=encoder.batch_size,
        workers=encoder.workers,
        desc=name,
    )
    return store.rows["0.images"][:], store.rows["0.texts"][:], model.logit_scale
