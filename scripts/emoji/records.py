"""What the demo and the ablation keep of a run: its numbers, its loss curve, retrieval examples, and a table of them.

Numbers come from `bias` and `retrieval`, loss curves from open_clip's own training log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.errors import UserError

POOLS = ("within", "across", "mixed")

MIXED_POOL_NOTE = (
    "The mixed pool rewards guessing the source: a model that knows the query's source has only that source's pairs left "
    "to tell apart, so a model without the bias can score lower there although it knows the content better."
)


@dataclass(frozen=True)
class RunRecord:
    """What the table and the picture show of one run.

    `loss_curve` holds (samples seen, loss) pairs. `rsum` maps `within`, `across`, `mixed` to 0..600 (`bias.pool_metrics`).
    Probe accuracies and their chance level are shares (`bias.source_probe_accuracy`), the log p are means over negative
    pairs (`bias.mean_log_p_negatives`).
    """

    loss_curve: Sequence[tuple[int, float]]
    rsum: Mapping[str, float]
    probe_images: float
    probe_texts: float
    probe_chance: float
    log_p_same_source: float
    log_p_other_source: float


@dataclass(frozen=True)
class RetrievedPicture:
    """One picture of a ranking, (H, W, 3) uint8: which source drew it, and whether the query's caption is its own."""

    pixels: np.ndarray
    source: str
    right: bool


@dataclass(frozen=True)
class RetrievalExample:
    """A caption as query: its own picture, and for each run the best pictures and the rank (from 1) of its own one."""

    query: str
    source: str
    target: np.ndarray
    top: Mapping[str, Sequence[RetrievedPicture]]
    rank: Mapping[str, int]


_TRAIN_LINE = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/(\d+) .*\bLoss: (\S+) \(")


def read_training_log(path: str | Path) -> list[tuple[int, float]]:
    """The loss curve of a run, from the `Train Epoch:` lines of open_clip's `out.log`.

    Each value is the loss of the one step that was logged, on the first rank. Where a resumed run repeats a step, the
    later line counts.

    Returns:
        (samples seen since the start of training, loss), ascending.

    Raises:
        UserError: no such file, or no training step in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no training log {path}")
    curve: dict[int, float] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := _TRAIN_LINE.search(line):
                epoch, samples, samples_per_epoch = (int(match[i]) for i in (1, 2, 3))
                curve[epoch * samples_per_epoch + samples] = float(match[4])
    if not curve:
        raise UserError(f"{path} holds no 'Train Epoch:' line, so no step was logged; lower --log-every-n-steps")
    return sorted(curve.items())


def retrieval_examples(
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    sources: Sequence[str],
    features: Mapping[str, tuple[Tensor, Tensor]],
    queries: Sequence[int],
    *,
    k: int = 5,
) -> list[RetrievalExample]:
    """Rank a pool of N pairs for some of its captions, by each run's features.

    Args:
        pictures, captions, sources: (N,) the pool; pictures are (H, W, 3) uint8.
        features: by run, image_features and text_features (N, D), L2-normalised.
        queries: indices of the captions to ask with.
        k: pictures to keep.
    """
    examples = []
    for query in queries:
        top, rank = {}, {}
        for run, (image_features, text_features) in features.items():
            scores = image_features @ text_features[query]  # (N,)
            best = torch.argsort(scores, descending=True, stable=True)[:k].tolist()
            top[run] = [RetrievedPicture(np.asarray(pictures[i]), sources[i], i == query) for i in best]
            rank[run] = 1 + int((scores > scores[query]).sum())
        examples.append(RetrievalExample(captions[query], sources[query], np.asarray(pictures[query]), top, rank))
    return examples


def results_table(runs: Mapping[str, RunRecord], *, markdown: bool = False) -> str:
    """One row a run: RSUM in the three pools, the source probe in percent, mean log p of negatives.

    Args:
        markdown: pipes and a rule for a Markdown file; else two header lines and blanks, for a terminal.

    Raises:
        UserError: no run.
    """
    if not runs:
        raise UserError("a table of results needs at least one run")
    groups = ("", "RSUM", "RSUM", "RSUM", "source probe", "source probe", "log p negatives", "log p negatives")
    columns = ("run", *POOLS, "images", "texts", "same source", "other source")
    rows = [
        (
            name,
            *(f"{run.rsum[pool]:.1f}" for pool in POOLS),
            f"{100 * run.probe_images:.1f} %",
            f"{100 * run.probe_texts:.1f} %",
            f"{run.log_p_same_source:.2f}",
            f"{run.log_p_other_source:.2f}",
        )
        for name, run in runs.items()
    ]
    if markdown:
        header = tuple(f"{group} {column}".strip() for group, column in zip(groups, columns, strict=True))
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [
            [_padded(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
            for row in (header, *rows)
        ]
        rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    # A group's name stands over the first of its columns, as wide as all of them.
    over, i = [], 0
    while i < len(groups):
        span = [j for j in range(i, len(groups)) if groups[j] == groups[i]]
        over.append(groups[i].center(sum(widths[j] for j in span) + 2 * (len(span) - 1)))
        i += len(span)
    body = ("  ".join(_padded(cell, widths[i], i) for i, cell in enumerate(row)) for row in (columns, *rows))
    return "\n".join(line.rstrip() for line in ("  ".join(over), *body))


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
