"""How models are measured: recalls of retrieval, accuracies of classifiers, and intervals by resampling queries.

Legend: `I` images, `T` captions, `D` embedding width, `C` rows of the score matrix alive at once. A caption belongs to
exactly one image, an image has one caption or more; `text_to_image` (T,) holds the image's index for each caption.

- image -> text R@K: the share of images with *any* of their captions among the K best-scored captions.
- text -> image R@K: the share of captions whose image is among the K best-scored images.
- RSUM: the sum of R@1, R@5, R@10 both ways in percent points, 0 to 600 (section 5 of the paper, and its tables).

**Ties count by expectation.** Where other items have exactly the score of the query's best positive, their order is arbitrary.
The query then counts with the probability that a random order puts a positive into the top K. A collapsed model, which gives
everything one score, thus gets the chance level; a sort would give it 100 % or 0 %. Without ties this is the ordinary recall.
Scores are accumulated in float64 and rounded to float32, so that equal features tie for any chunk, order of rows or BLAS
kernel. Accuracies count ties alike: a model that gives all C classes one score is right with probability 1/C.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import take_product_buffer
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.report.verdicts import CONFIDENCE, RECALL_KS, Estimate, estimate_by_t

DIRECTIONS = ("image_to_text", "text_to_image")

#: Memory for a block of scores: large enough for a fast matrix product, small enough for the processor's caches.
CHUNK_BYTES = 2**25


def retrieval_metrics(
    image_features: Tensor,
    text_features: Tensor,
    text_to_image: Tensor | Sequence[int],
    *,
    ks: Sequence[int] = RECALL_KS,
    chunk_size: int | None = None,
) -> dict[str, float]:
    """Compute recall@K both ways and RSUM from features, in memory bounded by a block of rows of scores.

    Args:
        image_features: (I, D), L2-normalised (a pair's score is the plain inner product), on the CPU or a CUDA device.
        text_features: (T, D), likewise, on the same device.
        text_to_image: (T,) index in [0, I) of the image that each caption belongs to.
        ks: the K of recall@K, positive. A K beyond the number of candidates gives 1.
        chunk_size: `C`, rows of scores alive at once. None takes CHUNK_BYTES at 16 bytes a score. A float64 copy of the
            features needs memory too. The result does not depend on it.

    Returns:
        `image_to_text_R@K` and `text_to_image_R@K` for each K, as shares in [0, 1] (the names of open_clip's own
        metrics), and, where `ks` holds 1, 5 and 10, `rsum` in percent points (0 to 600).

    Raises:
        UserError: an index out of range, an image without caption, a NaN or infinite feature.
    """
    return recalls(
        retrieval_ranks(image_features, text_features, text_to_image, chunk_size=chunk_size), ks
    )


@dataclass(frozen=True)
class QueryRanks:
    """The rank of each query's best positive, as counts (Q,) on the CPU.

    The rank lies in above + 1 .. above + tied - tied_positives + 1.

    Attributes:
        above: items with a higher score than the best positive.
        tied: items with exactly its score, itself included.
        tied_positives: those of them that belong to the query.
    """

    above: Tensor
    tied: Tensor
    tied_positives: Tensor

    def __len__(self) -> int:
        return len(self.above)


def retrieval_ranks(
    image_features: Tensor,
    text_features: Tensor,
    text_to_image: Tensor | Sequence[int],
    *,
    chunk_size: int | None = None,
) -> dict[str, QueryRanks]:
    """Rank each query's best positive, by direction.

    Arguments and errors as `retrieval_metrics`.

    `recalls` makes metrics of them. The gallery finds hits and misses by them.
    """
    _check_features(image_features, text_features)
    links = _checked_links(
        text_to_image, len(image_features), len(text_features), image_features.device
    )
    images, texts = image_features.double(), text_features.double()
    positive = _paired_scores(images, texts, links)
    at_once = min(chunk_size or max(1, CHUNK_BYTES // (16 * len(links))), len(images))
    # All blocks use the same memory: glibc before 2.38 does not reuse freed aligned blocks, so that a new one for each block of
    # rows let a process grow to the size of all scores.
    exact = images.new_empty(at_once, len(texts))
    rounded = torch.empty_like(exact, dtype=torch.float32)
    # Comparisons as 0.0 and 1.0: a sum of booleans makes a copy of 8 bytes each. float32 counts exactly up to 2^24.
    comparisons = exact if len(links) >= 2**24 else torch.empty_like(rounded)

    def count(compare: Callable[..., Tensor], scores: Tensor, others: Tensor, dim: int) -> Tensor:
        return compare(scores, others, out=comparisons[: len(scores)]).sum(dim=dim).long()

    by_image: list[tuple[Tensor, Tensor, Tensor]] = []
    text_above = torch.zeros(len(links), dtype=torch.long, device=links.device)
    text_tied = torch.zeros_like(text_above)
    for start in range(0, len(images), at_once):
        part = images[start : start + at_once]
        torch.mm(part, texts.T, out=exact[: len(part)])
        scores = rounded[: len(part)].copy_(exact[: len(part)])  # (C, T)
        # (P,) places of the positives
        columns = ((links >= start) & (links < start + len(part))).nonzero()[:, 0]
        rows = links[columns] - start
        positive_scores = scores[rows, columns]

        # (C,)
        best = scores.new_full((len(scores),), -torch.inf).scatter_reduce_(
            0, rows, positive_scores, reduce="amax"
        )
        above, tied = (
            count(compare, scores, best[:, None], dim=1) for compare in (torch.gt, torch.eq)
        )
        tied_positives = torch.zeros_like(tied).index_add_(
            0, rows, (positive_scores == best[rows]).to(tied.dtype)
        )
        by_image.append((above, tied, tied_positives))

        text_above += count(torch.gt, scores, positive, dim=0)
        text_tied += count(torch.eq, scores, positive, dim=0)
        # A caption's own image ties with itself, even where two ways to compute their score differ in the last bit.
        text_above[columns] -= (positive_scores > positive[columns]).long()
        text_tied[columns] += (positive_scores != positive[columns]).long()
    image = [torch.cat(part).cpu() for part in zip(*by_image, strict=True)]
    text = text_above.cpu(), text_tied.cpu(), torch.ones(len(links), dtype=torch.long)
    return {"image_to_text": QueryRanks(*image), "text_to_image": QueryRanks(*text)}


def _paired_scores(
    images: Tensor, texts: Tensor, links: Tensor, captions_at_once: int = 4096
) -> Tensor:
    """Compute the score (T,) of each caption with its own image."""
    parts = zip(links.split(captions_at_once), texts.split(captions_at_once), strict=True)
    return torch.cat([(images[own] * part).sum(dim=1) for own, part in parts]).float()


def recalls(ranks: Mapping[str, QueryRanks], ks: Sequence[int] = RECALL_KS) -> dict[str, float]:
    """Compute the metrics of `retrieval_metrics` from ranks."""
    ks = sorted(set(ks))
    metrics: dict[str, float] = {}
    for direction in DIRECTIONS:
        for k, hit in zip(
            ks, hit_probabilities(ranks[direction], ks).mean(dim=1).tolist(), strict=True
        ):
            metrics[f"{direction}_R@{k}"] = hit
    if set(RECALL_KS) <= set(ks):
        metrics["rsum"] = 100 * sum(
            metrics[f"{direction}_R@{k}"] for direction in DIRECTIONS for k in RECALL_KS
        )
    return metrics


def hit_probabilities(ranks: QueryRanks, ks: Sequence[int]) -> Tensor:
    """Compute the probability that a positive is in the top K of each query, over all orders of tied items.

    (len(ks), Q), float64.

    With g items scored above the best positive and p positives and t other items scored like it, the top K has s = K - g
    places left for the p + t tied items, and misses all p positives with probability
    t/(p+t) * (t-1)/(p+t-1) * ... (s factors). `ks` ascend.
    """
    tied_others = ranks.tied - ranks.tied_positives
    hit = torch.zeros(len(ks), len(ranks), dtype=torch.float64)
    miss = torch.ones(len(ranks), dtype=torch.float64)
    # Place by place: after the g better items, `drawn` tied items are above the current place.
    for place in range(ks[-1]):
        drawn = place - ranks.above
        factor = (tied_others - drawn).clamp(min=0).double() / (ranks.tied - drawn).clamp(min=1)
        miss = torch.where(drawn >= 0, miss * factor, miss)
        for index, k in enumerate(ks):
            if place == k - 1:
                hit[index] = 1 - miss
    return hit


def recall_bounds(
    captions: Sequence[str], text_to_image: Tensor | Sequence[int]
) -> dict[str, float]:
    """Compute RSUM of chance and of the best possible model, as entries to add to the metrics of a set.

    Pictures with the same caption cannot be distinguished by it: the best model ranks all of them
    alike. Where few captions serve many pictures, RSUM stays far below 600.

    Args:
        captions: (T,).
        text_to_image: (T,) image of each caption. Each image has one.

    Returns:
        `rsum_chance`: expected RSUM of random orders. `rsum_chance_upper`: two standard deviations above it, where queries of
        one direction are taken as independent and both directions as one. `rsum_best`: that of the best model.
    """
    links = torch.as_tensor(text_to_image)
    caption_counts = torch.bincount(links)  # (I,) captions of each image

    def ranks(tied: Tensor, tied_positives: Tensor, text_tied: Tensor) -> dict[str, QueryRanks]:
        none = torch.zeros_like
        return {
            "image_to_text": QueryRanks(none(tied), tied, tied_positives),
            "text_to_image": QueryRanks(none(text_tied), text_tied, torch.ones_like(text_tied)),
        }

    number = {text: i for i, text in enumerate(dict.fromkeys(captions))}
    texts = torch.tensor([number[text] for text in captions])
    copies = torch.bincount(texts)[texts]  # (T,) captions of the same text
    all_captions = torch.full_like(caption_counts, len(links))
    # The caption of each image that fewest images share is the best to rank first.
    fewest = all_captions.scatter_reduce(0, links, copies, reduce="amin")
    same = torch.zeros_like(fewest).index_add_(0, links, (copies == fewest[links]).long())
    chance_ranks = ranks(all_captions, caption_counts, torch.full_like(links, len(caption_counts)))
    deviation = 0.0
    for query_ranks in chance_ranks.values():
        first, five, ten = hit_probabilities(query_ranks, RECALL_KS)
        # A query scores 3 with a match at the first place, 2 up to the fifth, 1 up to the tenth.
        of_query = 9 * first + 4 * (five - first) + (ten - five) - (first + five + ten) ** 2
        deviation += float(of_query.sum().clamp(min=0)) ** 0.5 / len(query_ranks)
    chance = recalls(chance_ranks)["rsum"]
    return {
        "rsum_chance": chance,
        "rsum_chance_upper": min(600.0, chance + 200 * deviation),
        "rsum_best": recalls(ranks(fewest, same.clamp(max=fewest), copies))["rsum"],
    }


def _check_features(image_features: Tensor, text_features: Tensor) -> None:
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        if not bool(features.isfinite().all()):
            row = int((~features.isfinite()).any(dim=1).nonzero()[0, 0])
            raise UserError(
                f"{name} holds NaN or infinity (first in row {row}): the model diverged or its input is bad"
            )


def _checked_links(
    text_to_image: Tensor | Sequence[int], num_images: int, num_texts: int, device: Any
) -> Tensor:
    links = torch.as_tensor(text_to_image, device=device).long()
    if len(links) != num_texts or not bool(((links >= 0) & (links < num_images)).all()):
        raise UserError(
            f"text_to_image must hold an image's index in 0..{num_images - 1} for each of the {num_texts} captions; it has "
            f"{len(links)} entries"
        )
    captions = torch.bincount(links, minlength=num_images)
    if not num_images or int(captions.min()) == 0:
        number = f"image {int(captions.argmin())}" if num_images else "the set without images"
        raise UserError(f"{number} has no caption: leave it out or give it one")
    return links


# ---------------------------------------------------------------------------------------------------------------------
# Accuracies of classifiers, zero-shot and linear. Legend: `N` pictures, `C` classes
# ---------------------------------------------------------------------------------------------------------------------


def class_indices(labels: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Find the index in `classes` of each label, (N,)."""
    index_of = {label: i for i, label in enumerate(classes)}
    return torch.tensor([index_of[label] for label in labels])


def distinct_names(named: Mapping[str, str]) -> list[str]:
    """Name each class, from label -> name.

    With the label where classes share a name, as in CLIP's names of ImageNet.
    """
    times = Counter(named.values())
    return [name if times[name] == 1 else f"{name} ({label})" for label, name in named.items()]


def accuracies(
    scores: Tensor, targets: Tensor, names: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Compute accuracies from scores (N, C) and class indices (N,), as shares.

    Args:
        names: (C,) of the classes. None takes their numbers.

    Returns:
        `images`, `top1`, `top1_interval` (95 %, over pictures), `top5` with more than five classes, `mean_per_class` (over the
        classes that occur), `chance` (1/C), `commonest` (the top-1 of always naming the commonest class), and `per_class`:
        name -> `images`, `top1`, `top1_interval`.

    Raises:
        UserError: scores that are not finite.
    """
    names = range(scores.shape[1]) if names is None else names
    right = in_top(1, scores, targets)
    rows = {int(index): right[targets == index] for index in targets.unique()}
    return {
        "images": len(targets),
        **_share(right),
        **({"top5": float(in_top(5, scores, targets).mean())} if scores.shape[1] > 5 else {}),
        "mean_per_class": float(
            torch.stack([class_rows.mean() for class_rows in rows.values()]).mean()
        ),
        "chance": 1 / scores.shape[1],
        "commonest": max(map(len, rows.values())) / len(targets),
        "per_class": {
            names[index]: {"images": len(class_rows), **_share(class_rows)}
            for index, class_rows in rows.items()
        },
    }


def in_top(k: int, scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the probability (N,) that the class is among the first k, where ties have a random order.

    Arguments as for `accuracies`.

    Raises:
        UserError: scores that are not finite. A class of NaN would be above none and tie with none: always right.
    """
    finite = scores.isfinite()
    if not bool(finite.all()):
        classes = (~finite).any(dim=0).nonzero()[:, 0]
        raise UserError(
            f"the scores of {len(classes)} of {scores.shape[1]} classes (first: number {int(classes[0])}) are NaN or infinite: "
            "the model has diverged, or its weights are bad; give an earlier checkpoint"
        )
    target_scores = scores.gather(1, targets[:, None])  # (N, 1)
    above, tied = (scores > target_scores).sum(dim=1), (scores == target_scores).sum(dim=1)
    return ((k - above) / tied).clamp(0, 1).double()


def _share(right: Tensor) -> dict[str, Any]:
    share = float(right.mean())
    return {"top1": share, "top1_interval": wilson(share, len(right))}


def is_above_chance(metrics: Mapping[str, Any]) -> bool:
    """Return whether the metrics of `accuracies` are above chance, by their interval and by the mean per class.

    A model that guesses one class for all pictures has a mean per class of exactly 1/C, whatever the classes' sizes.
    """
    return min(metrics["top1_interval"][0], metrics["mean_per_class"] - 1e-6) > metrics["chance"]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share of `count` pictures."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return max(0.0, middle - reach), min(1.0, middle + reach)


def difference_of_shares(first: float, second: float, count: int) -> Estimate:
    """Estimate second - first, two shares of `count` pictures, in percentage points, as if the pictures were not the same.

    The interval is wider than that of pairs, of which the shares alone say nothing.
    """
    error = math.sqrt((first * (1 - first) + second * (1 - second)) / count)
    return estimate_by_t(100 * (second - first), 100 * error, count - 1)


def in_percent(metrics: Mapping[str, Any]) -> str:
    """Write top-1 of `accuracies` with its interval: `52.0 [45.1 to 58.8]`."""
    low, high = metrics["top1_interval"]
    return f"{100 * metrics['top1']:.1f} [{100 * low:.1f} to {100 * high:.1f}]"


# ---------------------------------------------------------------------------------------------------------------------
# Intervals by resampling queries (the bootstrap). Legend: `U` units, `R` draws, `T` terms of a measure
#
# A unit is drawn as a whole: all queries of one concept, in all pools, since they are not independent. Only queries are drawn;
# the candidates that a query is ranked against do not change. All models are measured on the same draws, so that
# the interval of a difference leaves out the difficulty of a test set that all of them share. (`scipy.stats.bootstrap` draws
# for each statistic anew, and one at a time.)
# ---------------------------------------------------------------------------------------------------------------------


_DRAWS_AT_ONCE_BYTES = 1 << 26


@dataclass(frozen=True)
class Measure:
    """A number that is a weighted sum of means over queries: sum_t c_t * mean_t.

    Attributes:
        sums: (T, U) of the queries' values in each unit.
        counts: (T, U) queries in each unit.
        factors: (T,) the c_t.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    factors: NDArray[np.float64]

    @property
    def value(self) -> float:
        """Return the number itself."""
        return float(self.weighted(np.ones((1, self.sums.shape[1])))[0])

    def weighted(self, weights: NDArray) -> NDArray[np.float64]:
        """Compute the number (R,) where unit u counts `weights[r, u]` times.

        Weights (R, U). NaN where a mean has no query.
        """
        take_product_buffer()
        with np.errstate(invalid="ignore"):
            return (weights @ self.sums.T / (weights @ self.counts.T)) @ self.factors


def mean_over(terms: Sequence[tuple[Tensor, Tensor]], units: int, factor: float = 1.0) -> Measure:
    """Make a measure of `factor` times the sum of some means.

    Args:
        terms: for each mean (unit (Q,) of each query, values (Q,), or (2, Q) of sums and counts).
        units: U.
    """
    per_unit = torch.zeros(len(terms), 2, units, dtype=torch.float64)
    for term, (unit, values) in zip(per_unit, terms, strict=True):
        values = values.double()
        term.index_add_(
            1, unit, torch.stack([values, torch.ones_like(values)]) if values.ndim == 1 else values
        )
    return Measure(per_unit[:, 0].numpy(), per_unit[:, 1].numpy(), np.full(len(terms), factor))


def rsum_over_pictures(ranks: Mapping[str, QueryRanks], text_to_image: Tensor) -> Measure:
    """Make a measure of the RSUM of one set, whose units are pictures with their captions (T,)."""
    units = (torch.arange(len(ranks["image_to_text"])), text_to_image)
    hits = [hit_probabilities(ranks[way], RECALL_KS).sum(dim=0) for way in DIRECTIONS]
    return mean_over(list(zip(units, hits, strict=True)), len(units[0]), 100.0)


def resampled(
    measures: Mapping[str, Measure], draws: int, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Compute each measure (R,) on R draws of U units with replacement.

    All measures are on the same draws.
    """
    units = next(iter(measures.values())).sums.shape[1]
    rng = stream(seed, Purpose.BOOTSTRAP)
    at_once = max(1, _DRAWS_AT_ONCE_BYTES // (8 * units))
    parts: dict[str, list[NDArray]] = {name: [] for name in measures}
    for begin in range(0, draws, at_once):
        weights = rng.multinomial(
            units, np.full(units, 1 / units), size=min(at_once, draws - begin)
        ).astype(np.float64)
        for name, measure in measures.items():
            parts[name].append(measure.weighted(weights))
    return {name: np.concatenate(part) for name, part in parts.items()}


def interval(values: NDArray) -> tuple[float, float]:
    """Compute the central CONFIDENCE of the values (R,), NaN left out."""
    low, high = np.nanquantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
