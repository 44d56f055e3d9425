"""Image-text retrieval: recall@K both ways and RSUM (the metric of the paper's section 5 and of its tables).

Legend: `I` images, `T` captions, `D` embedding width, `C` rows of the score matrix alive at once. A caption belongs to
exactly one image, an image has one caption or more; `text_to_image` (T,) holds the image's index for each caption.

- image -> text R@K: the share of images with *any* of their captions among the K best-scored captions.
- text -> image R@K: the share of captions whose image is among the K best-scored images.
- RSUM: the sum of R@1, R@5, R@10 both ways in percent points, 0 to 600.

**Ties are counted without luck.** Where other items score exactly as much as the query's best positive, the order among
them is arbitrary; the query then counts with the probability that a random order puts a positive into the top K. A
collapsed model, which scores everything alike, so gets the chance level and not 100 % (or 0 %) by the accident of a
sort, and without ties the number is the ordinary recall. Scores of features are accumulated in float64 and rounded to
float32, so that equal features tie whatever the chunk, the order of rows or the BLAS kernel.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from open_clip_zerovl.checkpoints import load_model
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.retrieval_data import (
    RetrievalSet,
    check_captions_per_image,
    open_retrieval_set,
    parse_retrieval_data,
    retrieval_batches,
)

log = logging.getLogger(__name__)

RECALL_KS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")


# ---------------------------------------------------------------------------------------------------------------------
# The metric: pure functions of features or scores and a text-to-image map
# ---------------------------------------------------------------------------------------------------------------------


def retrieval_metrics(
    image_features: Tensor,
    text_features: Tensor,
    text_to_image: Tensor | Sequence[int],
    *,
    ks: Sequence[int] = RECALL_KS,
    chunk_size: int = 256,
) -> dict[str, float]:
    """Recall@K both ways and RSUM from features, in memory bounded by `chunk_size` rows of scores.

    Args:
        image_features: (I, D), L2-normalised (a pair's score is the plain inner product), on the CPU or a CUDA device.
        text_features: (T, D), likewise, on the same device.
        text_to_image: (T,) index in [0, I) of the image that each caption belongs to.
        ks: the K of recall@K, positive. A K beyond the number of candidates gives 1.
        chunk_size: `C`, rows of scores alive at once; about `12 * C * max(I, T)` bytes. It does not change the result.

    Returns:
        `image_to_text_R@K` and `text_to_image_R@K` for each K, as shares in [0, 1] (the names of open_clip's own
        metrics), and, where `ks` holds 1, 5 and 10, `rsum` in percent points (0 to 600).

    Raises:
        UserError: shapes that do not fit, an index out of range, an image without caption, a NaN or infinite feature.
    """
    _check_features(image_features, text_features)
    links = _checked_links(text_to_image, len(image_features), len(text_features), image_features.device)
    images, texts = image_features.double(), text_features.double()
    return _metrics(
        score_rows=lambda start, stop: (images[start:stop] @ texts.T).float(),
        score_columns=lambda start, stop: (texts[start:stop] @ images.T).float(),
        links=links,
        num_images=len(images),
        ks=ks,
        chunk_size=chunk_size,
    )


def retrieval_metrics_from_scores(
    scores: Tensor,
    text_to_image: Tensor | Sequence[int],
    *,
    ks: Sequence[int] = RECALL_KS,
    chunk_size: int = 256,
) -> dict[str, float]:
    """As `retrieval_metrics`, from a ready matrix of scores (I, T), higher meaning a better match."""
    if scores.ndim != 2 or not scores.is_floating_point():
        raise UserError(f"scores must be a floating-point matrix (images, texts), got {_describe(scores)}")
    # Infinite scores are a legitimate mask here; only NaN has no place in an order.
    if bool(scores.isnan().any()):
        raise UserError("the scores hold NaN, which has no rank: look for the diverged model or broken input first")
    links = _checked_links(text_to_image, scores.shape[0], scores.shape[1], scores.device)
    return _metrics(
        score_rows=lambda start, stop: scores[start:stop],
        score_columns=lambda start, stop: scores[:, start:stop].T,
        links=links,
        num_images=scores.shape[0],
        ks=ks,
        chunk_size=chunk_size,
    )


def _metrics(
    score_rows: Callable[[int, int], Tensor],
    score_columns: Callable[[int, int], Tensor],
    links: Tensor,
    num_images: int,
    ks: Sequence[int],
    chunk_size: int,
) -> dict[str, float]:
    """Both directions; `score_rows(a, b)` scores images a..b, (b-a, T), `score_columns(a, b)` texts a..b, (b-a, I)."""
    ks = sorted(set(ks))
    if not ks or ks[0] < 1:
        raise UserError(f"ks must be positive numbers such as (1, 5, 10), got {ks}")
    if chunk_size < 1:
        raise UserError(f"chunk_size must be at least 1, got {chunk_size}")

    texts_by_image = torch.argsort(links, stable=True)  # (T,) captions, grouped by their image
    image_of_sorted = links[texts_by_image].contiguous()

    def caption_positives(start: int, stop: int) -> tuple[Tensor, Tensor]:
        bounds = torch.tensor([start, stop], device=links.device)
        low, high = torch.searchsorted(image_of_sorted, bounds).tolist()
        return image_of_sorted[low:high] - start, texts_by_image[low:high]

    def image_positives(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return torch.arange(stop - start, device=links.device), links[start:stop]

    directions = {
        "image_to_text": (num_images, score_rows, caption_positives),
        "text_to_image": (len(links), score_columns, image_positives),
    }
    metrics: dict[str, float] = {}
    for direction, (num_queries, score, positives) in directions.items():
        hits = torch.zeros(len(ks), dtype=torch.float64)
        for start in range(0, num_queries, chunk_size):
            stop = min(start + chunk_size, num_queries)
            hits += _hit_probability(score(start, stop), *positives(start, stop), ks).sum(dim=1).cpu()
        for k, hit in zip(ks, hits.tolist(), strict=True):
            metrics[f"{direction}_R@{k}"] = hit / num_queries
    if set(RECALL_KS) <= set(ks):
        metrics["rsum"] = 100 * sum(metrics[f"{direction}_R@{k}"] for direction in DIRECTIONS for k in RECALL_KS)
    return metrics


def _hit_probability(scores: Tensor, rows: Tensor, columns: Tensor, ks: Sequence[int]) -> Tensor:
    """Probability that a positive is in the top K of each row, over all orders of tied items.

    With g items scored above the row's best positive and p positives and t others scored like it, the top K has
    s = K - g places left for the p + t tied items, and misses all p positives with probability
    t/(p+t) * (t-1)/(p+t-1) * ... (s factors).

    Args:
        scores: (C, M) one row a query.
        rows, columns: (P,) positions of the positives in `scores`; each row has at least one.
        ks: ascending.

    Returns:
        (len(ks), C) in float64.
    """
    positive = scores[rows, columns]  # (P,)
    best = scores.new_full((len(scores),), -torch.inf).scatter_reduce_(0, rows, positive, reduce="amax")  # (C,)
    above = (scores > best[:, None]).sum(dim=1)
    tied = (scores == best[:, None]).sum(dim=1)
    tied_positives = torch.zeros_like(tied).index_add_(0, rows, (positive == best[rows]).to(tied.dtype))
    tied_others = tied - tied_positives

    hit = torch.zeros(len(ks), len(scores), dtype=torch.float64, device=scores.device)
    miss = torch.ones(len(scores), dtype=torch.float64, device=scores.device)
    # Place by place: `drawn` tied items sit above the current place, once the g better ones are through.
    for place in range(ks[-1]):
        drawn = place - above
        factor = (tied_others - drawn).clamp(min=0).double() / (tied - drawn).clamp(min=1)
        miss = torch.where(drawn >= 0, miss * factor, miss)
        for index, k in enumerate(ks):
            if place == k - 1:
                hit[index] = 1 - miss
    return hit


def _check_features(image_features: Tensor, text_features: Tensor) -> None:
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        if features.ndim != 2 or not features.is_floating_point():
            raise UserError(f"{name} must be a floating-point matrix (items, width), got {_describe(features)}")
        if not bool(features.isfinite().all()):
            row = int((~features.isfinite()).any(dim=1).nonzero()[0, 0])
            raise UserError(
                f"{name} holds NaN or infinity (first in row {row}): the model diverged or its input is bad"
            )
    if image_features.shape[1] != text_features.shape[1]:
        raise UserError(
            f"image_features and text_features must have the same width, got {image_features.shape[1]} and "
            f"{text_features.shape[1]}"
        )


def _checked_links(text_to_image: Tensor | Sequence[int], num_images: int, num_texts: int, device: Any) -> Tensor:
    links = torch.as_tensor(text_to_image, device=device)
    if num_images == 0 or num_texts == 0:
        raise UserError(f"retrieval needs images and captions, got {num_images} images and {num_texts} captions")
    if links.ndim != 1 or len(links) != num_texts or links.is_floating_point() or links.dtype == torch.bool:
        raise UserError(
            f"text_to_image must hold one image index for each of the {num_texts} captions, got {_describe(links)}"
        )
    links = links.long()
    if int(links.min()) < 0 or int(links.max()) >= num_images:
        raise UserError(
            f"text_to_image must lie in 0..{num_images - 1} (there are {num_images} images), got values from "
            f"{int(links.min())} to {int(links.max())}"
        )
    captions = torch.bincount(links, minlength=num_images)
    if int(captions.min()) == 0:
        raise UserError(f"image {int(captions.argmin())} has no caption: leave it out or give it one")
    return links


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------------------------------------------------------------
# A model on a data set
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside; afterwards each module is as it was (a frozen tower may be in eval among others)."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def encode_retrieval(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Sequence[Sequence[str]]]],
    tokenizer: Callable[[list[str]], Tensor],
    *,
    device: str | torch.device = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    input_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes images and their captions.

    Args:
        model: an open_clip model on `device` (not wrapped in DDP). It is in eval mode inside and restored afterwards.
        batches: yields (images (b, 3, H, W), for each image its captions).
        tokenizer: captions -> (n, context_length) tokens.
        autocast: makes the context the towers run in, such as open_clip's `get_autocast(precision)`; none by default,
            which is what the numbers of CLIP_benchmark's `--no_amp` are equal to.
        input_dtype: images are cast to it, for a model held in half precision.

    Returns:
        image_features (I, D), text_features (T, D), both L2-normalised, float32, on the CPU; text_to_image (T,).

    Raises:
        UserError: no batch at all, or an image without caption.
    """
    context = autocast or nullcontext
    image_features: list[Tensor] = []
    text_features: list[Tensor] = []
    text_to_image: list[int] = []
    seen = 0
    with _evaluating(model), torch.no_grad():
        for images, captions in batches:
            if len(images) != len(captions):
                raise UserError(f"a batch holds {len(images)} images but captions for {len(captions)}")
            for offset, own in enumerate(captions):
                if not own:
                    raise UserError(f"image {seen + offset} of the retrieval set has no caption")
                text_to_image.extend([seen + offset] * len(own))
            seen += len(images)
            tokens = tokenizer([caption for own in captions for caption in own]).to(device)
            with context():
                image = model.encode_image(images.to(device=device, dtype=input_dtype))
                text = model.encode_text(tokens)
            image_features.append(F.normalize(image.float(), dim=-1).cpu())
            text_features.append(F.normalize(text.float(), dim=-1).cpu())
    if not seen:
        raise UserError("the retrieval set yields no image")
    return torch.cat(image_features), torch.cat(text_features), torch.tensor(text_to_image)


def evaluate_retrieval(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    dataset: RetrievalSet,
    *,
    captions_per_image: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str | torch.device = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    input_dtype: torch.dtype | None = None,
    ks: Sequence[int] = RECALL_KS,
) -> dict[str, float]:
    """Metrics of one model on one retrieval set; see `encode_retrieval` and `retrieval_metrics`.

    Args:
        preprocess: image -> (3, H, W), the checkpoint's own evaluation transform unless something else is meant.
        captions_per_image: keep that many captions of each image, the first ones; None keeps all, as CLIP_benchmark.

    Raises:
        UserError: an unreadable image, named by file and key, and what the two functions refuse.
    """
    batches = retrieval_batches(
        dataset, preprocess, captions_per_image=captions_per_image, batch_size=batch_size, num_workers=num_workers
    )
    features = encode_retrieval(model, batches, tokenizer, device=device, autocast=autocast, input_dtype=input_dtype)
    return retrieval_metrics(*features, ks=ks)


# ---------------------------------------------------------------------------------------------------------------------
# `zerovl retrieval`
# ---------------------------------------------------------------------------------------------------------------------


def run_retrieval(
    model: str,
    data: str,
    *,
    model_name: str | None = None,
    text_model: str | None = None,
    split: str = "test",
    captions_per_image: int | None = 5,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "auto",
    output: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Scores a checkpoint on retrieval sets and prints the paper's row for each.

    Args:
        model: what `load_model` takes: an exported folder, an `epoch_N.pt` of a run, or `NAME/pretrained`.
        data: `name=folder::name=folder`, see `parse_retrieval_data`.
        model_name, text_model: for a checkpoint that lies away from its run's `params.txt`; see `load_model`.
        split: the split's folder in CLIP_benchmark's layout.
        captions_per_image: the first five by default, as in the papers (COCO's test set has 25,010); None for all.
        batch_size: images at once.
        device: `auto` takes CUDA where there is one.
        output: JSON file to write.

    Returns:
        For each set, its metrics and the counts `images` and `captions`.
    """
    check_captions_per_image(captions_per_image)
    # The cheap checks come before the model is loaded: a typo should not cost minutes.
    sets = {name: open_retrieval_set(path, split) for name, path in parse_retrieval_data(data).items()}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, preprocess, tokenizer = load_model(model, model_name=model_name, text_model=text_model, device=device)
    results: dict[str, dict[str, float]] = {}
    for name, dataset in sets.items():
        log.info("Evaluating %s: %d images of %s.", name, len(dataset), dataset.path)
        metrics = evaluate_retrieval(
            loaded,
            preprocess,
            tokenizer,
            dataset,
            captions_per_image=captions_per_image,
            batch_size=batch_size,
            num_workers=num_workers,
            device=device,
        )
        counts = {"images": len(dataset), "captions": dataset.num_captions(captions_per_image)}
        results[name] = {**counts, **metrics}
    print(format_retrieval(results))
    if output is not None:
        settings = {"model": str(model), "split": split, "captions_per_image": captions_per_image}
        target = Path(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**settings, "results": results}, indent=2) + "\n", encoding="utf-8")
    return results


def format_retrieval(results: Mapping[str, Mapping[str, float]]) -> str:
    """The paper's row for each set: recalls in percent, image -> text, text -> image, RSUM."""
    width = max(len("set"), *(len(name) for name in results)) if results else len("set")
    recalls = "".join(f"{f'R@{k}':>7}" for k in RECALL_KS)
    lines = [
        f"{'':{width}}  {'':>7} {'':>8}  {'image -> text':^21}  {'text -> image':^21}",
        f"{'set':{width}}  {'images':>7} {'captions':>8}  {recalls}  {recalls}  {'RSUM':>6}",
    ]
    for name, row in results.items():
        both = "  ".join("".join(f"{100 * row[f'{way}_R@{k}']:7.1f}" for k in RECALL_KS) for way in DIRECTIONS)
        lines.append(f"{name:{width}}  {row['images']:7d} {row['captions']:8d}  {both}  {row['rsum']:6.1f}")
    return "\n".join(lines)
