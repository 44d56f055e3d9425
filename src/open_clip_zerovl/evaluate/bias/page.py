"""The bias report as one HTML page (figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.charts import caption_picture, log_p_picture, map_picture, probe_picture
from open_clip_zerovl.evaluate.bias.report import BiasReport
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table, thumbnail

SHOWN_SAMPLES = 6  # of each source


def bias_page(path: str | Path, report: BiasReport, *, title: str = "Did the models learn their sources?") -> Path:
    """Write a bias report as one HTML file; returns its path.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
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
            f"A linear probe guesses the source from one embedding that it was not fitted on. The lower its accuracy, the less "
            f"the model kept of its sources. Chance is {100 * report.probe_chance:.1f} %. No model is expected to reach it: "
            "pictures and captions of different sources do differ."
        ),
        chart(probe_picture(report), "Accuracy of the source probe by model, from images and from texts"),
        heading("Do negatives still teach?"),
        paragraph(
            "Mean log p of negative pairs, by the source of the query. A negative's p is its weight in the gradient: the "
            "lower a line, the less the model learns from those pairs. Where the dashed line lies far below the solid one, the "
            "model pushes other sources away as a whole."
        ),
        chart(log_p_picture(report), "Mean log p of negatives by batch size, for each source and model"),
        heading("Where the embeddings lie"),
        paragraph(
            f"t-SNE maps of {len(report.map_rows)} samples, each dot one sample in the colour of its source. Islands of one "
            "colour are sources that the model keeps apart. Distances between islands, and sizes, mean nothing."
        ),
        chart(map_picture(report), "t-SNE maps of image and text embeddings, coloured by source"),
        heading("How long the captions are"),
        paragraph("Where sources differ here, a model can learn the length instead of the content (appendix A.5)."),
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
