"""`zerovl retrieval`: a checkpoint scored on retrieval sets, by one process or by all that torchrun started.

Under torchrun (or srun with the same variables) each rank encodes its share of the images with their captions on its own
device. The first rank gathers the features and scores them. Nothing else is exchanged, so gloo is enough for GPUs too.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.retrieval import (
    RetrievalSet,
    open_retrieval_set,
    parse_retrieval_data,
    retrieval_batches,
)
from open_clip_zerovl.data.transforms import paper_transform_of
from open_clip_zerovl.evaluate.retrieval.encode import encode_retrieval
from open_clip_zerovl.evaluate.retrieval.gallery import GallerySet, write_gallery
from open_clip_zerovl.evaluate.retrieval.metrics import DIRECTIONS, RECALL_KS, recalls, retrieval_ranks
from open_clip_zerovl.evaluate.settings import RetrievalFiles as RetrievalFiles
from open_clip_zerovl.evaluate.settings import RetrievalSettings as RetrievalSettings

log = logging.getLogger(__name__)

# image_features (I, D), text_features (T, D), text_to_image (T,)
Features = tuple[Tensor, Tensor, Tensor]


def run_retrieval(
    encoder: Encoder,
    data: str,
    settings: RetrievalSettings | None = None,
    files: RetrievalFiles | None = None,
) -> dict[str, dict[str, float]]:
    """Scores a checkpoint on retrieval sets and prints the paper's row for each.

    Args:
        encoder: the checkpoint; with device `auto` each rank takes one GPU.
        data: `name=set::name=set`, see `parse_retrieval_data` and `open_retrieval_set`.

    Returns:
        For each set, its metrics and the counts `images` and `captions`; {} on all ranks but the first.

    Raises:
        UserError: bad data, settings or files, a checkpoint that cannot be loaded; on every rank where one finds it.
    """
    settings, files = settings or RetrievalSettings(), files or RetrievalFiles()
    # The cheap checks come before the model is loaded.
    files.check()
    sets = {name: open_retrieval_set(path, settings.split) for name, path in parse_retrieval_data(data).items()}
    with _ranks() as ranks:
        loaded, preprocess, tokenizer, device = encoder.load(local_rank=ranks.local_rank)
        if settings.paper_transform:
            preprocess = paper_transform_of(loaded.visual)
        results: dict[str, dict[str, float]] = {}
        shown: list[GallerySet] = []
        for name, dataset in sets.items():
            log.info("Evaluating %s: %d images of %s.", name, len(dataset), dataset.path)
            scored = score_set(
                (loaded, preprocess, tokenizer, device), name, dataset, settings, encoder=encoder, ranks=ranks
            )
            if scored is None:
                continue
            results[name] = dict(scored.metrics)
            if files.gallery is not None:
                shown.append(scored)
    if results:
        print(format_retrieval(results))
        _write(files, encoder.model, settings, results, shown)
    return results


Loaded = tuple[nn.Module, Callable[[Any], Tensor], Callable[[list[str]], Tensor], torch.device]


def score_set(
    loaded: Loaded,
    name: str,
    dataset: RetrievalSet,
    settings: RetrievalSettings,
    *,
    encoder: Encoder,
    ranks: Ranks | None = None,
) -> GallerySet | None:
    """Features, ranks and metrics of a loaded model on one set.

    Args:
        loaded: model, transform, tokenizer and device, as `Encoder.load` gives them; the transform is used as it is.
        encoder: how many images at once, by how many loader processes.

    Returns:
        `metrics` has the counts `images` and `captions` too. None on all ranks but the first.

    Raises:
        UserError: what `encode_retrieval` and `retrieval_ranks` refuse.
    """
    model, preprocess, tokenizer, device = loaded

    def batches(part: RetrievalSet) -> Any:
        return retrieval_batches(
            part,
            preprocess,
            captions_per_image=settings.captions_per_image,
            batch_size=encoder.batch_size,
            num_workers=encoder.workers,
        )

    features = encode_on_ranks(model, dataset, batches, tokenizer, ranks or Ranks(), device=device)
    if features is None:
        return None
    ranking = retrieval_ranks(*features)
    counts = {"images": len(dataset), "captions": dataset.num_captions(settings.captions_per_image)}
    metrics = {**counts, **recalls(ranking)}
    return GallerySet(name, dataset, settings.captions_per_image, *features, ranking, metrics)


def _write(
    files: RetrievalFiles,
    model: str,
    settings: RetrievalSettings,
    results: dict[str, dict[str, float]],
    shown: list[GallerySet],
) -> None:
    """Write the files that are wanted."""
    how = {
        "model": model,
        "split": settings.split,
        "captions_per_image": settings.captions_per_image,
        "transform": "squash 256, crop 224" if settings.paper_transform else "checkpoint",
    }
    if files.json is not None:
        write_atomically(files.json, json.dumps({**how, "results": results}, indent=2) + "\n")
    if files.csv is not None:
        write_csv(files.csv, results, how)
    if files.gallery is not None:
        print(f"Gallery: {write_gallery(files.gallery, shown, model=model)}")


# ---------------------------------------------------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that evaluate together, on all machines and on this one (`local_rank`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@contextmanager
def _ranks() -> Iterator[Ranks]:
    """The processes that torchrun started, joined by gloo inside the block; without torchrun, this one."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), world_size, int(os.environ.get("LOCAL_RANK", 0)))
    finally:
        dist.destroy_process_group()


def encode_on_ranks(
    model: nn.Module,
    dataset: RetrievalSet,
    batches: Callable[[RetrievalSet], Any],
    tokenizer: Callable[[list[str]], Tensor],
    ranks: Ranks,
    *,
    device: str | torch.device,
) -> Features | None:
    """`encode_retrieval` of a whole set, a part on each rank; the features on the first rank, None on the others.

    Args:
        batches: part of the set -> its batches.

    Raises:
        UserError: the error of one rank, on every rank, so that none waits for a rank that has ended.
    """
    if ranks.world_size == 1:
        return encode_retrieval(model, batches(dataset), tokenizer, device=device)
    part = dataset.part(ranks.rank, ranks.world_size)
    own: Features | None = None  # stays None where there are fewer images than ranks
    wrong_here: str | None = None
    try:
        if len(part):
            own = encode_retrieval(model, batches(part), tokenizer, device=device)
    except UserError as error:
        wrong_here = str(error)
    sentences: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(sentences, wrong_here)
    if wrong := [sentence for sentence in sentences if sentence is not None]:
        raise UserError(wrong[0])
    parts: list[Features | None] | None = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(own, parts)
    if parts is None:
        return None
    whole = [features for features in parts if features is not None]
    offsets = torch.tensor([0, *(len(image) for image, _, _ in whole)]).cumsum(0).tolist()
    links = [links + offset for (_, _, links), offset in zip(whole, offsets[:-1], strict=True)]
    return torch.cat([image for image, _, _ in whole]), torch.cat([text for _, text, _ in whole]), torch.cat(links)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def format_retrieval(results: Mapping[str, Mapping[str, float]]) -> str:
    """A text table, one row a set, as the paper's: recalls in percent, image -> text and text -> image, RSUM."""
    width = max(len("set"), *(len(name) for name in results)) if results else len("set")
    columns = "".join(f"{f'R@{k}':>7}" for k in RECALL_KS)
    lines = [
        f"{'':{width}}  {'':>7} {'':>8}  {'image -> text':^21}  {'text -> image':^21}",
        f"{'set':{width}}  {'images':>7} {'captions':>8}  {columns}  {columns}  {'RSUM':>6}",
    ]
    for name, row in results.items():
        both = "  ".join("".join(f"{100 * row[f'{way}_R@{k}']:7.1f}" for k in RECALL_KS) for way in DIRECTIONS)
        lines.append(f"{name:{width}}  {row['images']:7d} {row['captions']:8d}  {both}  {row['rsum']:6.1f}")
    return "\n".join(lines)


def write_csv(
    path: str | os.PathLike[str], results: Mapping[str, Mapping[str, float]], settings: Mapping[str, Any]
) -> None:
    """Write a table of one row a set: the settings, recalls as shares in [0, 1], RSUM in percent points.

    Args:
        settings: columns that are the same in all rows.

    Raises:
        UserError: the file cannot be written.
    """
    rows = [
        {"set": name, **settings, "captions_per_image": settings["captions_per_image"] or "all", **row}
        for name, row in results.items()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
