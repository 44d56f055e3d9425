"""`zerovl retrieval`: models scored on retrieval sets (section 5.1), by one process or by all that torchrun started.

Under torchrun (or srun with the same variables) each rank encodes its share of the images with their captions on its own
device. The first rank gathers the features and scores them. Nothing else is exchanged, so gloo is enough for GPUs too.

`--gallery` shows hits and misses. In a hit an item that belongs to the query comes first, without a tie; in a miss neither one
of those nor one with the same caption is among the ten best. The queries shown are spread evenly over the set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.core.processes import require_threads
from open_clip_zerovl.data.images import paper_transform_of
from open_clip_zerovl.data.sets import (
    IndexedSet,
    open_retrieval_set,
    parse_retrieval_data,
    retrieval_batches,
)
from open_clip_zerovl.evaluate.metrics import (
    DIRECTIONS,
    RECALL_KS,
    QueryRanks,
    interval,
    recall_bounds,
    recalls,
    resampled,
    retrieval_ranks,
    rsum_over_pictures,
)
from open_clip_zerovl.evaluate.settings import RetrievalFiles, RetrievalSettings
from open_clip_zerovl.features.encoder import FrozenModel, padding_of
from open_clip_zerovl.models.configs import ClipModel
from open_clip_zerovl.report.pages import thumbnail, write_page
from open_clip_zerovl.report.tables import Scores, text_table
from open_clip_zerovl.report.verdicts import bounds_remarks


def spread(positions: Sequence[Any], count: int) -> list[Any]:
    """Choose at most `count` of the items, evenly spaced among them, whatever their results."""
    if len(positions) <= count:
        return list(positions)
    return [positions[(2 * i + 1) * len(positions) // (2 * count)] for i in range(count)]


MISSED_BEYOND = max(RECALL_KS)
QUERIES = 6  # hits to show, and misses, in each direction
BEST = 5  # items to show of a ranking


@dataclass(frozen=True)
class GallerySet:
    """One evaluated set.

    Attributes:
        captions_of: the captions of each image.
        read_image: number of an image -> the image.
        image_features, text_features: (I, D) and (T, D).
        text_to_image: (T,) image of each caption.
        ranks: result of `retrieval_ranks`.
        metrics: result of `recalls`, with the counts `images` and `captions`.
    """

    name: str
    captions_of: Sequence[Sequence[str]]
    read_image: Callable[[int], Image.Image]
    image_features: Tensor
    text_features: Tensor
    text_to_image: Tensor
    ranks: Mapping[str, QueryRanks]
    metrics: Mapping[str, float]

    @classmethod
    def scored(
        cls,
        name: str,
        captions_of: Sequence[Sequence[str]],
        read_image: Callable[[int], Image.Image],
        features: tuple[Tensor, Tensor, Tensor],
    ) -> GallerySet:
        """Make a set with the ranks and metrics of its features.

        The captions lie image by image.

        Raises:
            UserError: as `retrieval_ranks`.
        """
        ranks = retrieval_ranks(*features)
        captions = [caption for image_captions in captions_of for caption in image_captions]
        counts = {"images": len(captions_of), "captions": len(captions)}
        metrics = {**counts, **recalls(ranks), **recall_bounds(captions, features[2])}
        return cls(name, captions_of, read_image, *features, ranks, metrics)

    @property
    def captions(self) -> list[str]:
        """Read the captions (T,)."""
        return [caption for image_captions in self.captions_of for caption in image_captions]


def write_gallery(path: str | os.PathLike[str], sets: Sequence[GallerySet], *, model: str) -> Path:
    """Write the page.

    Args:
        path: the HTML file. Its folder is made.
        model: the model's name on the page.

    Returns:
        The path.

    Raises:
        UserError: a picture that cannot be read.
    """
    return write_page(path, "gallery.html", title=f"Retrieval: {model}", gallery=gallery_of(sets))


def gallery_of(sets: Sequence[GallerySet]) -> dict[str, Any]:
    """Make the variable `gallery` of the template `gallery_parts.html`.

    Arguments and errors as for `write_gallery`.
    """
    sections = [
        {
            "name": gallery_set.name,
            "metrics": gallery_set.metrics,
            "remarks": bounds_remarks({gallery_set.name: gallery_set.metrics}),
            "parts": [_part(gallery_set, *way) for way in _PARTS],
        }
        for gallery_set in sets
    ]
    return {"sections": sections, "beyond": MISSED_BEYOND}


_PARTS = [(way, kind) for way in ("text_to_image", "image_to_text") for kind in ("hit", "miss")]


def _part(shown: GallerySet, way: str, kind: str) -> dict[str, Any]:
    """Select the hits or the misses of one direction."""
    ranks = shown.ranks[way]
    mask = (
        (ranks.above == 0) & (ranks.tied == ranks.tied_positives)
        if kind == "hit"
        else ranks.above >= MISSED_BEYOND
    )
    candidates = mask.nonzero().flatten().tolist()
    make_card = _caption if way == "text_to_image" else _picture
    cards = []
    # A query that the metric counts as missed may have found another picture with the caption, or the same words.
    for query in spread(candidates, 2 * QUERIES):
        card = make_card(shown, query)
        if kind == "hit" or not any(right for _, right in card["top"]):
            cards.append({**card, "top": card["top"][:BEST], "rank": _rank(ranks, query)})
    return {
        "way": way,
        "kind": kind,
        "cards": spread(cards, QUERIES),
        "found": len(candidates),
        "of": len(ranks),
    }


def _caption(shown: GallerySet, query: int) -> dict[str, Any]:
    """Describe a caption with its ten best pictures, (picture, whether the caption is its own), and its own picture."""
    words, target = shown.captions[query], int(shown.text_to_image[query])
    top = [
        (thumbnail(shown.read_image(image)), words in shown.captions_of[image])
        for image in _best_of(shown.image_features, shown.text_features[query])
    ]
    return {"words": words, "picture": thumbnail(shown.read_image(target)), "top": top}


def _picture(shown: GallerySet, query: int) -> dict[str, Any]:
    """Describe a picture with its ten best captions, (caption, whether it is its own), and its own captions."""
    captions = shown.captions_of[query]
    best = _best_of(shown.text_features, shown.image_features[query])
    top = [(shown.captions[text], shown.captions[text] in captions) for text in best]
    return {"words": "; ".join(captions), "picture": thumbnail(shown.read_image(query)), "top": top}


def _best_of(features: Tensor, query: Tensor) -> list[int]:
    """List the best of some features (n, D) for a query (D,), in float64 and rounded as for the metrics.

    Ties keep their order.
    """
    scores = (features.double() @ query.double()).float()
    return torch.argsort(scores, descending=True, stable=True)[:MISSED_BEYOND].tolist()


def _rank(ranks: QueryRanks, query: int) -> str:
    above, tied = int(ranks.above[query]), int(ranks.tied[query] - ranks.tied_positives[query])
    return f"rank {above + 1}" + (f" to {above + tied + 1}, tied" if tied else "")


# ---------------------------------------------------------------------------------------------------------------------
# Features. Legend: `I` images, `T` captions, `b` images of one batch, `D` embedding width
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation within the block.

    Afterwards each module has its own mode again (a frozen tower stays in eval).
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def encode_retrieval(
    model: ClipModel,
    batches: Iterable[tuple[Tensor, Sequence[Sequence[str]]]],
    tokenizer: Callable[[list[str]], Tensor],
    *,
    device: str | torch.device = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    input_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode images and their captions.

    Args:
        model: an open_clip model on `device`, not wrapped in DDP. It runs in eval mode. Its modes are restored afterwards.
        batches: yields (images (b, 3, H, W), for each image its captions).
        tokenizer: captions -> tokens (captions, context_length).
        autocast: makes the context in which the towers run, such as open_clip's `get_autocast(precision)`. None runs them
            without. The metrics then equal those of CLIP_benchmark with `--no_amp`.
        input_dtype: images are cast to it, for a model in half precision.

    Returns:
        image_features (I, D), text_features (T, D), both L2-normalised, float32, on the CPU, and text_to_image (T,).
    """
    frozen = FrozenModel(
        "retrieval",
        lambda pixels: model.encode_image(pixels),
        lambda tokens: model.encode_text(tokens),
        tokenizer,
        padding_of(model),
        torch.device(device),
        context=autocast or nullcontext,
        input_dtype=input_dtype,
    )
    image_features: list[Tensor] = []
    text_features: list[Tensor] = []
    text_to_image: list[int] = []
    seen = 0
    with evaluating(model):
        for images, captions in batches:
            for offset, image_captions in enumerate(captions):
                text_to_image.extend([seen + offset] * len(image_captions))
            seen += len(images)
            image_features.append(frozen.images(images).cpu())
            text_features.append(
                frozen.texts(
                    [caption for image_captions in captions for caption in image_captions]
                ).cpu()
            )
    return torch.cat(image_features), torch.cat(text_features), torch.tensor(text_to_image)


# image_features (I, D), text_features (T, D), text_to_image (T,)
Features = tuple[Tensor, Tensor, Tensor]


def run_retrieval(
    encoders: Encoder | Mapping[str, Encoder],
    data: str,
    settings: RetrievalSettings | None = None,
    files: RetrievalFiles | None = None,
) -> Scores:
    """Score one or several models on the same retrieval sets, and write the files that are asked for.

    The text has the paper's row of each set, and the differences of RSUM of several models from the first.

    Args:
        encoders: the model, or name -> model. With device `auto` each rank takes one GPU.
        data: `name=set::name=set`, see `parse_retrieval_data` and `open_retrieval_set`.

    Returns:
        For each set, its metrics and the counts `images` and `captions`; of several models, this for each. {} on all ranks but
        the first.

    Raises:
        UserError: bad data, settings or files, a model that cannot be loaded. On every rank if one finds it.
    """
    settings, files = settings or RetrievalSettings(), files or RetrievalFiles()
    several = isinstance(encoders, Mapping)
    models = dict(encoders) if isinstance(encoders, Mapping) else {encoders.model: encoders}
    scored = dict(zip(models, _score([*models.values()], data, settings, files), strict=True))
    first, *others = scored
    if not scored[first]:
        return Scores({}, "")
    shown = {
        f"{name}, {model}" if several else name: sets[name]
        for name in scored[first]
        for model, sets in scored.items()
    }
    reports: dict[str, dict[str, Any]] = {
        model: {
            "model": encoder.model,
            "split": settings.split,
            "captions_per_image": settings.captions_per_image,
            "transform": "squash 256, crop 224" if settings.paper_transform else "checkpoint",
            "results": {name: dict(of_set.metrics) for name, of_set in scored[model].items()},
        }
        for model, encoder in models.items()
    }
    text = format_retrieval({name: of_set.metrics for name, of_set in shown.items()})
    report = reports[first]
    if several:
        differences = {
            name: {
                model: rsum_difference(scored[first][name], scored[model][name]) for model in others
            }
            for name in scored[first]
        }
        text += f"\n\n{_format_differences(first, differences)}"
        report = {"models": reports, "rsum_differences_from_the_first": differences}
    if files.json is not None:
        write_atomically(files.json, json.dumps(report, indent=2) + "\n")
    if files.gallery is not None:
        pictured = [replace(of_set, name=name) for name, of_set in shown.items()]
        text += f"\nGallery: {write_gallery(files.gallery, pictured, model=', '.join(models))}"
    results = {model: of_model["results"] for model, of_model in reports.items()}
    return Scores(results if several else results[first], text)


def _score(
    encoders: Sequence[Encoder], data: str, settings: RetrievalSettings, files: RetrievalFiles
) -> list[dict[str, GallerySet]]:
    """Score each model on each set.

    Returns:
        {} on all ranks but the first.
    """
    # The cheap checks come before a model is loaded.
    files.check()
    sets = {
        name: open_retrieval_set(path, settings.split)
        for name, path in parse_retrieval_data(data).items()
    }
    for encoder in encoders:
        encoder.check()
    every: list[dict[str, GallerySet]] = []
    with _ranks() as ranks:
        for encoder in encoders:
            loaded, preprocess, tokenizer, device = encoder.load(local_rank=ranks.local_rank)
            if settings.paper_transform:
                preprocess = paper_transform_of(loaded.visual)
            model = (loaded, preprocess, tokenizer, device)
            scored: dict[str, GallerySet] = {}
            for name, dataset in sets.items():
                of_set = score_set(model, name, dataset, settings, encoder=encoder, ranks=ranks)
                if of_set is not None:
                    scored[name] = of_set
            every.append(scored)
    return every


def rsum_difference(first: GallerySet, second: GallerySet) -> dict[str, float]:
    """Return `difference` of RSUM, second - first, with `low` and `high` of its 95 % interval over the pictures of a set.

    Both are resampled on the same draws of pictures with their captions, so that the interval leaves out how difficult the set
    is. It does not cover another seed of training.
    """
    measures = {
        name: rsum_over_pictures(of_set.ranks, of_set.text_to_image)
        for name, of_set in (("first", first), ("second", second))
    }
    drawn = resampled(measures, draws=1000, seed=0)
    low, high = interval(drawn["second"] - drawn["first"])
    difference = measures["second"].value - measures["first"].value
    return {"difference": difference, "low": low, "high": high}


Loaded = tuple[nn.Module, Callable[[Any], Tensor], Callable[[list[str]], Tensor], torch.device]


def score_set(
    loaded: Loaded,
    name: str,
    dataset: IndexedSet,
    settings: RetrievalSettings,
    *,
    encoder: Encoder,
    ranks: ProcessRank | None = None,
) -> GallerySet | None:
    """Score a loaded model on one set: features, ranks and metrics.

    Args:
        loaded: model, transform, tokenizer and device, as `Encoder.load` gives them. The transform is used as it is.
        encoder: how many images at once, by how many loader processes.

    Returns:
        `metrics` has the counts `images` and `captions` too. None on all ranks but the first.

    Raises:
        UserError: an error of `encode_retrieval` or `retrieval_ranks`.
    """
    model, preprocess, tokenizer, device = loaded
    ranks = ranks or ProcessRank()
    part = dataset.part(ranks.rank, ranks.world_size)

    def encode() -> Features | None:
        if not len(part):
            return None
        batches = retrieval_batches(
            part,
            preprocess,
            captions_per_image=settings.captions_per_image,
            batch_size=encoder.batch_size,
            num_workers=encoder.workers,
        )
        total = -(-len(part) // encoder.batch_size)
        # None: no bar in a file of lines
        hidden = None if ranks.rank == 0 else True
        bar = tqdm(batches, total=total, desc=name, unit=" batches", leave=False, disable=hidden)
        return encode_retrieval(model, bar, tokenizer, device=device)

    features = on_all_ranks(encode, ranks)
    if features is None:
        return None
    captions = dataset.captions(settings.captions_per_image)
    return GallerySet.scored(name, captions, dataset.image, features)


# ---------------------------------------------------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessRank:
    """The rank of this process among those that evaluate together, on all machines and on this one (`local_rank`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@contextmanager
def _ranks() -> Iterator[ProcessRank]:
    """Join the processes that torchrun started by gloo within the block.

    Without torchrun, this one.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield ProcessRank()
        return
    require_threads()
    dist.init_process_group("gloo")
    try:
        yield ProcessRank(dist.get_rank(), world_size, int(os.environ.get("LOCAL_RANK", 0)))
    finally:
        dist.destroy_process_group()


def on_all_ranks(encode: Callable[[], Features | None], ranks: ProcessRank) -> Features | None:
    """Gather the features of all ranks' parts on the first one.

    Args:
        encode: encodes the rank's part; None for an empty one.

    Returns:
        None on the other ranks.

    Raises:
        UserError: the error of one rank, on every rank, so that none waits for a rank that has ended.
    """
    if ranks.world_size == 1:
        return encode()
    part: Features | str | None
    try:
        part = encode()
    except UserError as error:
        part = str(error)
    every: list[Features | str | None] = [None] * ranks.world_size
    dist.all_gather_object(every, part)
    if wrong := [result for result in every if isinstance(result, str)]:
        raise UserError(wrong[0])
    if ranks.rank != 0:
        return None
    images, texts, links = zip(
        *(result for result in every if isinstance(result, tuple)), strict=True
    )
    offsets = torch.tensor([0, *map(len, images)]).cumsum(0).tolist()
    moved = [own_links + offset for own_links, offset in zip(links, offsets[:-1], strict=True)]
    return torch.cat(images), torch.cat(texts), torch.cat(moved)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def format_retrieval(results: Mapping[str, Mapping[str, float]]) -> str:
    """Format the scores as text, one row a set, as the paper's.

    Recalls in percent both ways, RSUM and that of chance, with remarks.
    """
    header = [
        "set",
        "images",
        "captions",
        *(f"{way} R@{k}" for way in ("I2T", "T2I") for k in RECALL_KS),
        "RSUM",
        "chance",
    ]
    rows = []
    for name, row in results.items():
        percent = (f"{100 * row[f'{way}_R@{k}']:.1f}" for way in DIRECTIONS for k in RECALL_KS)
        sums = (f"{row[key]:.1f}" for key in ("rsum", "rsum_chance"))
        rows.append([name, f"{row['images']}", f"{row['captions']}", *percent, *sums])
    return "\n".join([text_table(header, rows), *bounds_remarks(results)])


def _format_differences(
    first: str, differences: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> str:
    """Format a table, one row a set, of the differences from the first model with their intervals."""
    models = next(iter(differences.values()))
    header = ["RSUM", *(f"{model} - {first}" for model in models)]
    rows = [
        [
            name,
            *(
                f"{d['difference']:+.1f} ({d['low']:+.1f} to {d['high']:+.1f})"
                for d in of_set.values()
            ),
        ]
        for name, of_set in differences.items()
    ]
    note = "In brackets: 95 % over the pictures of a set. Another seed of training may turn a difference."
    return f"{text_table(header, rows)}\n{note}"
