"""The report as one HTML page, with samples as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import islice
from typing import Any

from open_clip_zerovl.prepare.pack.store import Store, Stored
from open_clip_zerovl.report.html import heading, html_page, paragraph, table, thumbnail
from open_clip_zerovl.shards.pictures import BadPicture, decoded, rgb

_SAMPLES = 12  # shown of a source and split
_SOURCES = 8
_CAPTION = 160  # characters


def report_page(
    report: dict[str, Any], store: Store, contents: Callable[[Stored], bytes], commands: Sequence[str]
) -> str:
    """The page.

    Args:
        report: of `report.summarize`.
        store: with its samples split.
        contents: a sample's bytes.
        commands: what to type next.
    """
    body = [
        paragraph(
            f"{report['pictures']:,} pictures with {report['captions']:,} captions, of {report['rows']:,} rows.", "lead"
        ),
        table(
            ("input", "form", "columns", "rows"),
            [
                (one["input"], one["form"], "; ".join([one["columns"], *one["notes"]]), f"{one['rows']:,}")
                for one in report["inputs"]
            ],
            "words",
        ),
        table(
            ("source", "split", "pictures", "captions", "shards", "MB"),
            [
                (
                    one["source"],
                    one["split"],
                    *(f"{one[name]:,}" for name in ("pictures", "captions", "shards")),
                    f"{one['bytes'] / 1e6:,.1f}",
                )
                for one in report["written"]
            ],
        ),
        heading("Train on it"),
        *(f"<pre>{escape(command)}</pre>" for command in commands),
        heading("Refused"),
        _refused(report),
        heading("Lengths and sizes"),
        _spreads(report),
        *_repeated(report, store, contents),
    ]
    for one in report["written"][: 2 * _SOURCES]:
        body += [heading(f"{one['source']} {one['split']}: {min(_SAMPLES, one['pictures'])} of {one['pictures']:,}")]
        body.append(
            _strip(store, one["source"], islice(store.samples(one["source"], one["split"]), _SAMPLES), contents)
        )
    return html_page("What was packed", body)


def _refused(report: dict[str, Any]) -> str:
    if not report["refused"]:
        return paragraph("Nothing.")
    rows = [
        (reason, f"{entry['rows']:,}", "; ".join(example["at"] for example in entry["examples"]))
        for reason, entry in report["refused"].items()
    ]
    return paragraph("refused.csv lists every row.") + table(("reason", "rows", "first"), rows, "words")


def _spreads(report: dict[str, Any]) -> str:
    named = [("words of a caption", report["words"])]
    if report["tokens"]:
        named.append((f"tokens of CLIP ({report['tokens']['captions']:,} captions)", report["tokens"]))
    named += [("longer side in px", report["sizes"]["longer_side"]), ("shorter side", report["sizes"]["shorter_side"])]
    return table(
        ("", "smallest", "half up to", "95 % up to", "largest"),
        [(name, *(f"{spread[key]:,}" for key in ("min", "median", "p95", "max"))) for name, spread in named],
    )


def _repeated(report: dict[str, Any], store: Store, contents: Callable[[Stored], bytes]) -> list[str]:
    said = []
    if most := report["repeated_captions"]["most"]:
        said += [
            heading("Captions of several pictures"),
            table(("caption", "pictures"), [(_cut(one["caption"]), f"{one['pictures']:,}") for one in most]),
        ]
    if most := report["repeated_pictures"]["most"]:
        said.append(heading("Pictures of several rows"))
        said.append(
            paragraph(
                "A picture is one sample with the captions of all its rows. One that comes very often, from many files, may "
                "be a placeholder."
            )
        )
        figures = []
        for one in most:
            sample = store.sample(one["source"], one["key"])
            if sample is not None:
                note = f"{one['rows']:,} rows, {one['files']:,} file{'s' * (one['files'] > 1)}"
                figures.append(_figure(sample, note, contents))
        said.append(f'<div class="strip">{"".join(figures)}</div>')
    return said


def _strip(store: Store, source: str, samples: Any, contents: Callable[[Stored], bytes]) -> str:
    figures = [_figure(sample, " / ".join(store.captions_of(source, sample.key)), contents) for sample in list(samples)]
    return f'<div class="strip">{"".join(figures)}</div>'


def _figure(sample: Stored, caption: str, contents: Callable[[Stored], bytes]) -> str:
    try:
        image = decoded(contents(sample), lambda opened: rgb(opened).copy())
    except BadPicture:
        return f"<figure><figcaption>{escape(_cut(caption))}</figcaption></figure>"
    return f"<figure>{thumbnail(image, _cut(caption))}<figcaption>{escape(_cut(caption))}</figcaption></figure>"


def _cut(text: str) -> str:
    return text if len(text) <= _CAPTION else f"{text[:_CAPTION]}..."
