"""The report as one HTML page, with samples as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from open_clip_zerovl.prepare.pack.report import commands, next_line
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored
from open_clip_zerovl.report.html import thumbnail, write_page
from open_clip_zerovl.report.verdicts import LOW_BEST, SHARED_CAPTIONS
from open_clip_zerovl.shards.pictures import BadPicture, as_shown, decoded

_SAMPLES = 12  # shown of a source and split
_SOURCES = 8
_Figures = list[tuple[str | None, str]]


def write_report_page(
    out: Path, report: dict[str, Any], store: PairDatabase, contents: Callable[[Stored], bytes]
) -> None:
    """Write `report.html`.

    Args:
        out: the folder of the shards.
        report: of `report.summarize`.
        store: with its samples split.
        contents: a sample's bytes.
    """

    def figures(samples: Iterable[tuple[Stored | None, str]]) -> _Figures:
        return [
            (_thumbnail(contents(sample)), words) for sample, words in samples if sample is not None
        ]

    samples = []
    for part in report["written"][: 2 * _SOURCES]:
        some = [
            (sample, " / ".join(texts))
            for sample, texts, _ in islice(store.pairs(part["source"], part["split"]), _SAMPLES)
        ]
        heading = f"{part['source']} {part['split']}: {len(some)} of {part['pictures']:,}"
        samples.append((heading, figures(some)))
    often = [
        (
            store.sample(entry["source"], entry["key"]),
            f"{entry['rows']:,} rows, {entry['files']:,} file{'s' * (entry['files'] > 1)}",
        )
        for entry in report["repeated_pictures"]["most"]
    ]
    best = report["repeated_captions"]["best_rsum"]
    write_page(
        out / "report.html",
        "pack.html",
        title="What was packed",
        report=report,
        next_line=next_line(report),
        commands=commands(report, out),
        samples=samples,
        often=figures(often),
        few_captions=SHARED_CAPTIONS if best < LOW_BEST else "",
    )


def _thumbnail(content: bytes) -> str | None:
    try:
        return thumbnail(decoded(content, lambda opened: as_shown(opened).copy()))
    except BadPicture:
        return None
