"""Visual Genome (section 2.1, A.8): the phrases of the five regions with the largest boxes, of about 50 an image.

Each phrase is a sample of its own, with the whole picture: 0.50 M pairs over 0.1 M images. The five samples of a picture lie
far apart (`shuffled_apart`): two of them in one batch would be false negatives of each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public.inputs import annotated, described
from open_clip_zerovl.prepare.public.pairs import (
    SHARD_SIZE,
    DatasetRow,
    Work,
    prepare_pairs,
    shuffled_apart,
)
from open_clip_zerovl.shards.archives import json_array, open_member

PHRASES_PER_IMAGE = 5


def prepare_vg(
    out: str | Path,
    *,
    source: list[str] | None = None,
    seed: int = 0,
    shard_size: int = SHARD_SIZE,
    work: Work | None = None,
) -> dict[str, Any]:
    """Make Visual Genome, or go on with an interrupted call; returns the manifest.

    Args:
        source: `region_descriptions.json` (also zipped) and the pictures, as folders or zips; without it they are fetched.
        phrases_per_image: phrases of the largest boxes, at most.
        seed: the seed of the order of the samples.
        shard_size: rows a shard.
        work: threads, retries, sharing.

    Raises:
        UserError: no annotations, no pictures, annotations of another form, or an error of `prepare_pairs`.
    """
    out, work = Path(out), work or Work()
    names = ("region_descriptions.json", ".json", ".json.gz")
    with annotated("vg", source, out, names, progress=work.progress) as (annotations, store):
        store.check("VG_100K and VG_100K_2 (or images.zip and images2.zip)")
        phrases = dict(largest_phrases(*annotations))
        images = sorted(phrases)
        order = shuffled_apart([len(phrases[image]) for image in images], seed=seed)
        rows = (
            DatasetRow(f"{images[i]}_{text}", phrases[images[i]][text], f"{images[i]}.jpg")
            for i, text in order
        )
        return prepare_pairs(
            out,
            rows,
            store,
            dataset="vg",
            made_from={
                "files": described([annotations[0]]),
                "phrases_per_image": PHRASES_PER_IMAGE,
                "seed": seed,
            },
            shard_size=shard_size,
            work=replace(work, attempts=1),  # a retry does not bring a missing file
            total_rows=len(order),
        )


def largest_phrases(
    path: Path, name: str, *, limit: int = PHRASES_PER_IMAGE
) -> Iterator[tuple[int, list[str]]]:
    """(image id, its phrases by descending area of their boxes) for each image of `region_descriptions.json`.

    Regions of equal area are ordered by their id. A phrase that an image has twice counts once, with its larger box. Empty
    phrases are left out, and so are images without a phrase.

    Raises:
        UserError: an entry of another form than `{image_id (or id), regions: [{region_id, x, y, width, height, phrase}]}`.
    """
    with open_member(path, name) as stream:
        for number, image in enumerate(json_array(stream, str(path))):
            try:
                areas: dict[str, tuple[float, float]] = {}
                for region in image["regions"]:
                    phrase = " ".join(str(region["phrase"]).split())
                    size = (
                        float(region["width"]) * float(region["height"]),
                        -float(region["region_id"]),
                    )
                    if phrase and size > areas.get(phrase, (-1.0, 0.0)):
                        areas[phrase] = size
                image_id = int(image["image_id"] if "image_id" in image else image["id"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"entry {number} of {path} is not an image with regions ({type(error).__name__} {error}): give Visual "
                    "Genome's region_descriptions.json."
                ) from error
            if areas:
                yield image_id, heapq.nlargest(limit, areas, key=areas.__getitem__)
