"""Results of a run for the demo and the ablation: numbers, loss curve, and a table of the numbers.

Numbers come from `bias` and `retrieval`, loss curves from the training log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.bias.pools import POOLS


@dataclass(frozen=True)
class RunRecord:
    """One run's row in the table and part of the picture.

    Attributes:
        loss_curve: (samples seen, loss).
        rsum: `within`, `across`, `mixed` -> 0..600 (`bias.pool_metrics`).
        probe_images, probe_texts, probe_chance: accuracies and chance level, 0..1 (`bias.source_probe_accuracy`).
        log_p_same_source, log_p_other_source: means over negative pairs (`bias.mean_log_p_negatives`).
    """

    loss_curve: Sequence[tuple[int, float]]
    rsum: Mapping[str, float]
    probe_images: float
    probe_texts: float
    probe_chance: float
    log_p_same_source: float
    log_p_other_source: float


_TRAIN_LINE = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/(\d+) .*\bLoss: (\S+) \(")


def read_training_log(path: str | Path) -> list[tuple[int, float]]:
    """The loss curve of a run, from the `Train Epoch:` lines of its `out.log`.

    Each value is the loss of the logged step, on the first rank. If a resumed run repeats a step, the later line counts.

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


def results_table(runs: Mapping[str, RunRecord], *, markdown: bool = False) -> str:
    """One row a run: RSUM in the three pools, the source probe in percent, mean log p of negatives.

    Args:
        markdown: a Markdown table; else columns with two header lines, for a terminal.

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
    # A group's name is centred over all of its columns.
    over, i = [], 0
    while i < len(groups):
        span = [j for j in range(i, len(groups)) if groups[j] == groups[i]]
        over.append(groups[i].center(sum(widths[j] for j in span) + 2 * (len(span) - 1)))
        i += len(span)
    body = ("  ".join(_padded(cell, widths[i], i) for i, cell in enumerate(row)) for row in (columns, *rows))
    return "\n".join(line.rstrip() for line in ("  ".join(over), *body))


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
