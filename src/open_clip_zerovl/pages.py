"""Self-contained HTML pages: one file, pictures embedded, no script, nothing loaded from elsewhere.

`bias_page` shows a bias report (figures 3 and 4), `demo_page` the two runs of the demo with their loss curves and retrieval
examples. All text that comes from data is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from open_clip_zerovl.bias_report import BiasReport
from open_clip_zerovl.charts import DPI, caption_picture, log_p_picture, loss_picture, map_picture, probe_picture
from open_clip_zerovl.datasets.shards import write_atomically
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.reports import MIXED_POOL_NOTE, POOLS, RetrievalExample, RunRecord

THUMBNAIL_PX = 96
SHOWN_SAMPLES = 6  # of each source

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 60rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.4rem 0 0.8rem; max-width: 46rem; }
.lead { font-size: 1.05rem; color: #444; }
img { max-width: 100%; height: auto; }
img.thumb { width: 64px; height: 64px; object-fit: contain; background: #f4f4f4; border-radius: 6px; }
img.right { outline: 4px solid #009E73; outline-offset: 1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.6rem 0; }
th, td { padding: 0.35rem 0.9rem 0.35rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: #555; vertical-align: bottom; }
.strip { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 0.4rem 0 1rem; }
.strip figure { margin: 0; width: 8.5rem; }
.strip figcaption { font-size: 0.8rem; line-height: 1.3; color: #555; overflow-wrap: anywhere; }
.example { border-top: 1px solid #e6e6e6; padding: 0.8rem 0; }
.query { display: flex; align-items: center; gap: 0.75rem; font-weight: 600; }
.query small, .ranking small { font-weight: normal; color: #666; }
.ranking { display: flex; flex-wrap: wrap; align-items: center; gap: 0.6rem; margin: 0.6rem 0 0 0; }
.ranking .run { width: 11rem; line-height: 1.3; }
@media (max-width: 40rem) { .ranking .run { width: 100%; } img.thumb { width: 52px; height: 52px; } }
"""


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of HTML
# ---------------------------------------------------------------------------------------------------------------------


def html_page(title: str, body: Sequence[str]) -> str:
    """A whole document around pieces of HTML; the title is plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def picture(png: bytes, description: str, kind: str = "") -> str:
    """An `<img>` with the PNG in it; the description is for those who cannot see it."""
    data = base64.b64encode(png).decode("ascii")
    attribute = f' class="{kind}"' if kind else ""
    return f'<img{attribute} src="data:image/png;base64,{data}" alt="{escape(description)}">'


def chart(png: bytes, description: str) -> str:
    """A chart of `charts`, at the size its lettering is meant for, or as wide as the screen allows."""
    width = int.from_bytes(png[16:20], "big")  # of the IHDR chunk
    return picture(png, description).replace("<img ", f'<img width="{width * 105 // DPI}" ', 1)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is a name, the others are numbers."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def thumbnail(image: Image.Image | np.ndarray, description: str, kind: str = "") -> str:
    """A small picture, at most 96 px wide and high; (H, W, 3) uint8 or a PIL image."""
    small = Image.fromarray(image) if isinstance(image, np.ndarray) else image.copy()
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return picture(buffer.getvalue(), description, f"thumb {kind}".strip())


# ---------------------------------------------------------------------------------------------------------------------
# The bias report
# ---------------------------------------------------------------------------------------------------------------------


def bias_page(path: str | Path, report: BiasReport, *, title: str = "Did the models learn their sources?") -> Path:
    """Write a bias report as one HTML file."""
    body = [
        paragraph(
            f"{_list([f'{name} ({len(words)})' for name, words in report.caption_words.items()])}: "
            f"{len(report.samples)} samples, the same for {_list(list(report.models))}.",
            "lead",
        ),
        *bias_sections(report),
    ]
    write_atomically(path, html_page(title, body))
    return Path(path)


def bias_sections(report: BiasReport) -> list[str]:
    """The measurements as pieces of HTML: table, figure 4, probe, figure 3, captions, what the sources look like."""
    size = max(next(iter(report.models.values())).log_p)
    rows = []
    for name, one in report.models.items():
        mean = one.log_p[size]["mean"]
        rows.append(
            (
                name,
                f"{100 * one.probe_images:.1f} %",
                f"{100 * one.probe_texts:.1f} %",
                _number(mean["same_source"]),
                _number(mean["other_source"]),
                f"{1 / one.logit_scale:.4f}",
            )
        )
    header = (
        "model", "source guessed from images", "source guessed from texts",
        f"log p, same source, batch {size}", f"log p, other source, batch {size}", "temperature",
    )  # fmt: skip
    return [
        heading("In numbers"),
        table(header, rows),
        heading("Can the source be read off an embedding?"),
        paragraph(
            f"A linear probe guesses the source from one embedding that it was not fitted on. Chance is "
            f"{100 * report.probe_chance:.1f} %; the lower, the less the model kept of its sources. Pictures and captions of "
            "different sources do differ, so that chance itself is not expected."
        ),
        chart(probe_picture(report), "Accuracy of the source probe by model, from images and from texts"),
        heading("Do negatives still teach? (figure 4)"),
        paragraph(
            "Mean log p of negative pairs, by the source of the query. A negative's p is its weight in the gradient: the "
            "lower a line, the less those pairs teach. Where the dashed line lies far under the solid one, the model pushes "
            "other sources away as a whole."
        ),
        chart(log_p_picture(report), "Mean log p of negatives over the batch size, by source and model"),
        heading("Where the embeddings lie (figure 3)"),
        paragraph(
            f"t-SNE maps of {len(report.map_rows)} samples, each dot one sample in the colour of its source. Islands of one "
            "colour are sources that the model keeps apart. Distances between islands, and sizes, mean nothing."
        ),
        chart(map_picture(report), "t-SNE maps of image and text embeddings, coloured by source"),
        heading("How long the captions are"),
        paragraph("A difference here is a mark that a model can learn instead of the content (appendix A.5)."),
        chart(caption_picture(report), "Share of captions by number of words, for each source"),
        heading("What the sources look like"),
        *_source_samples(report),
    ]


def _source_samples(report: BiasReport) -> list[str]:
    pieces = []
    for source in report.sources:
        own = [sample for sample in report.samples if sample.source == source]
        step = max(1, len(own) // SHOWN_SAMPLES)
        shown = own[step // 2 :: step][:SHOWN_SAMPLES]
        figures = "".join(
            f"<figure>{thumbnail(sample.picture(), sample.caption)}<figcaption>{escape(_short(sample.caption))}</figcaption>"
            "</figure>"
            for sample in shown
        )
        skipped = report.skipped.get(source, 0)
        note = f" ({skipped} samples passed over: no readable picture or no caption)" if skipped else ""
        pieces.append(f'{paragraph(source + note)}<div class="strip">{figures}</div>')
    return pieces


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---------------------------------------------------------------------------------------------------------------------
# The demo
# ---------------------------------------------------------------------------------------------------------------------


def demo_page(
    path: str | Path,
    records: Mapping[str, RunRecord],
    examples: Sequence[RetrievalExample] = (),
    *,
    bias: BiasReport | None = None,
    title: str = "Debiased against random sampling",
    lead: str = "",
) -> Path:
    """Write the demo's report: results, loss curves, retrieval examples, and the bias report of the same runs.

    Args:
        records: by run, as `reports.demo_picture` takes them.
        examples: see `reports.retrieval_examples`.
        bias: `bias_report.measure_bias` of the same runs.
        lead: a sentence or two under the title.

    Raises:
        UserError: no run, or an example that lacks one.
    """
    if not records:
        raise UserError("a demo page needs at least one run")
    for example in examples:
        if missing := [name for name in records if name not in example.top]:
            raise UserError(f"the retrieval example {example.query!r} has no pictures of run {missing[0]}")
    body = [paragraph(lead, "lead")] if lead else []
    body += [
        heading("Retrieval of held-out pairs"),
        table(
            ("run", *(f"RSUM {pool}" for pool in POOLS)),
            [(name, *(f"{record.rsum[pool]:.1f}" for pool in POOLS)) for name, record in records.items()],
        ),
        paragraph(
            "RSUM sums recall at 1, 5 and 10 in both directions, 600 at most. Within: the pairs of one source. Across: "
            "pictures of one source, captions of another. Mixed: all sources in one pool."
        ),
        paragraph(MIXED_POOL_NOTE),
        heading("Training loss"),
        paragraph(
            "Each run on its own kind of batch, so that the losses are not of one task: where all negatives come from one "
            "source, knowing the source helps nothing, and the loss stays higher for the same knowledge."
        ),
        chart(loss_picture(records), "Training loss over the samples seen, by run"),
    ]
    if examples:
        body += [
            heading("Text to picture, all sources mixed"),
            paragraph("A caption and its own picture; then each run's best pictures, the right one framed in green."),
            *(_example(example, list(records)) for example in examples),
        ]
    if bias is not None:
        body += bias_sections(bias)
    write_atomically(path, html_page(title, body))
    return Path(path)


def _example(example: RetrievalExample, runs: Sequence[str]) -> str:
    lines = []
    for run in runs:
        shown = "".join(
            thumbnail(
                one.pixels, f"{one.source}{', the right picture' if one.right else ''}", "right" if one.right else ""
            )
            for one in example.top[run]
        )
        lines.append(
            f'<div class="ranking"><div class="run">{escape(run)}<br><small>right picture at rank {example.rank[run]}'
            f"</small></div>{shown}</div>"
        )
    query = f"<span>{escape(example.query)}<br><small>{escape(example.source)}</small></span>"
    return (
        f'<div class="example"><div class="query">{thumbnail(example.target, "the own picture")}{query}</div>'
        f"{''.join(lines)}</div>"
    )
