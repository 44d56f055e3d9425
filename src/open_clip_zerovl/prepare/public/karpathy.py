"""Karpathy's splits of MS-COCO and Flickr30K (section 2.1): training pairs, and the test sets of the literature.

`dataset_coco.json` and `dataset_flickr30k.json` list `images` with `filename`, `split` (train, restval, val, test), ids
and `sentences`. Training takes train and restval: each caption is a pair, and the captions of one picture lie far apart. val
and test are retrieval sets: a sample is an image with all its captions. Their pictures keep the bytes of the original, since
shrunk pictures would change the scores.

    OUT/train/00000.tar ..., sizes.json       pairs
    OUT/dataset_type.txt, test/0.tar ...      CLIP_benchmark's layout: `--dataset wds/NAME --dataset_root OUT`
    OUT/val/0.tar ...
    OUT/zerovl/valid_anno.csv, val_anno.csv   `image,image_id,caption,caption_id`, as ZeroVL's evaluation reads them
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.annotations import CaptionedImage, read_karpathy
from open_clip_zerovl.prepare.public.inputs import PictureStore, annotated, described
from open_clip_zerovl.prepare.public.pairs import (
    SHARD_SIZE,
    DatasetRow,
    Work,
    prepare_pairs,
    shuffled_apart,
)
from open_clip_zerovl.prepare.public.pictures import Encoding
from open_clip_zerovl.shards.writing import mark_retrieval_set

ANNOTATIONS = {"coco": "dataset_coco.json", "f30k": "dataset_flickr30k.json"}

#: Papers use the first five captions of an image; a few images of COCO have more.
CAPTIONS_PER_IMAGE = 5


def prepare_karpathy(
    dataset: str,
    out: str | Path,
    *,
    source: list[str] | None = None,
    seed: int = 0,
    shard_size: int = SHARD_SIZE,
    work: Work | None = None,
) -> dict[str, dict[str, Any]]:
    """Make a dataset with Karpathy's splits, or go on with an interrupted call; returns split -> manifest.

    Args:
        dataset: "coco" or "f30k".
        source: Karpathy's file, by itself or in his zip, and the pictures, as folders or zips.
        seed: the seed of the order of the training pairs.
        shard_size: rows a shard.
        work: threads, retries, sharing.

    Raises:
        UserError: no annotations or no pictures, annotations of another form, or a val or test set that lacks a picture: scores
            on a part of a test set cannot be compared.
    """
    out = Path(out)
    work = work or Work()
    json_name = ANNOTATIONS[dataset]
    if work.part != (0, 1):
        raise UserError(f"{dataset} is made in one piece: leave out --part.")
    work = replace(work, attempts=1)  # a retry does not bring a missing file
    with annotated(dataset, source, out, (json_name, ".json"), progress=work.progress) as (
        annotations,
        store,
    ):
        images = read_karpathy(*annotations)
        store.check("their folders or zips")
        made_from = {"files": described([annotations[0]]), "seed": seed}
        manifests = {}
        # The small sets first, so that a missing picture is noticed before hours of work on the training pairs.
        for split in ("test", "val"):
            chosen = [image for image in images if image.split == split]
            if chosen:
                manifests[split] = _retrieval_set(
                    out, dataset, split, chosen, store, made_from, shard_size, work
                )
        training = [image for image in images if image.split == "train"]
        if training:
            manifests["train"] = prepare_pairs(
                out / "train",
                _training_rows(training, seed),
                store,
                dataset=dataset,
                made_from=made_from,
                shard_size=shard_size,
                work=work,
                total_rows=sum(len(image.captions) for image in training),
            )
    return manifests


def zerovl_csv(images: Sequence[CaptionedImage]) -> str:
    """The table that ZeroVL's released evaluation reads, one line a caption, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("image", "image_id", "caption", "caption_id"))
    for image in images:
        captions = zip(image.captions, image.caption_ids, strict=True)
        for caption, caption_id in islice(captions, CAPTIONS_PER_IMAGE):
            writer.writerow((image.filename, image.image_id, caption, caption_id))
    return text.getvalue()


def _training_rows(images: Sequence[CaptionedImage], seed: int) -> Iterator[DatasetRow]:
    for i, text in shuffled_apart([len(image.captions) for image in images], seed=seed):
        image = images[i]
        yield DatasetRow(f"{image.image_id}_{text}", image.captions[text], image.filename)


def _retrieval_set(
    out: Path,
    dataset: str,
    split: str,
    images: Sequence[CaptionedImage],
    store: PictureStore,
    made_from: dict[str, Any],
    shard_size: int,
    work: Work,
) -> dict[str, Any]:
    rows = (
        DatasetRow(f"{image.image_id:012d}", "\n".join(image.captions), image.filename)
        for image in images
    )
    manifest = prepare_pairs(
        out / split,
        rows,
        store,
        dataset=dataset,
        split=split,
        made_from=made_from,
        encoding=Encoding(shorter_side_px=None),
        shard_size=shard_size,
        shard_name="{}.tar",
        work=work,
        total_rows=len(images),
    )
    if manifest["failures"]:
        lost = ", ".join(f"{reason} {count}" for reason, count in manifest["failures"].items())
        raise UserError(
            f"The {split} set of {dataset} lacks {sum(manifest['failures'].values())} of {len(images)} pictures ({lost}), and "
            "scores on a part of it cannot be compared: give all pictures with --source, and --retry-failed."
        )
    mark_retrieval_set(out, split, len(manifest["shards"]))
    csv_name = "valid_anno.csv" if split == "test" else "val_anno.csv"
    write_atomically(out / "zerovl" / csv_name, zerovl_csv(images))
    return manifest
