"""The report as one HTML page, with samples as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from open_clip_zerovl.prepare.pack.store import Store, Stored
from open_clip_zerovl.report.bounds import LOW_BEST, best_sentence
from open_clip_zerovl.report.html import thumbnail, write_page
from open_clip_zerovl.shards.pictures import BadPicture, decoded, rgb

_SAMPLES = 12  # shown of a source and split
_SOURCES = 8
_Figures = list[tuple[str | None, str]]


def write_report_page(
    path: Path,
    report: dict[str, Any],
    store: Store,
    contents: Callable[[Stored], bytes],
    next_line: str,
    commands: Sequence[str],
) -> None:
    """Write the page.

    Args:
        report: of `report.summarize`.
        store: with its samples split.
        contents: a sample's bytes.
        next_line, commands: to type next.
    """

    def figures(samples: Iterable[tuple[Stored | None, str]]) -> _Figures:
        return [(_thumbnail(contents(sample)), words) for sample, words in samples if sample is not None]

    samples = []
    for one in report["written"][: 2 * _SOURCES]:
        some = list(islice(store.samples(one["source"], one["split"]), _SAMPLES))
        captions = [" / ".join(store.captions_of(one["source"], sample.key)) for sample in some]
        heading = f"{one['source']} {one['split']}: {len(some)} of {one['pictures']:,}"
        samples.append((heading, figures(zip(some, captions, strict=True))))
    often = [
        (
            store.sample(one["source"], one["key"]),
            f"{one['rows']:,} rows, {one['files']:,} file{'s' * (one['files'] > 1)}",
        )
        for one in report["repeated_pictures"]["most"]
    ]
    best = report["repeated_captions"]["best_rsum"]
    write_page(
        path,
        "pack.html",
        title="What was packed",
        report=report,
        next_line=next_line,
        commands=commands,
        samples=samples,
        often=figures(often),
        few_captions=best_sentence(best) if best < LOW_BEST else "",
    )


def _thumbnail(content: bytes) -> str | None:
    try:
        return thumbnail(decoded(content, lambda opened: rgb(opened).copy()))
    except BadPicture:
        return None
