"""The demo's page: both runs with their bias report, loss curves and retrieval examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.examples import RetrievalExample, example_html
from open_clip_zerovl.evaluate.bias.page import bias_sections
from open_clip_zerovl.evaluate.bias.pools import MIXED_POOL_NOTE, POOLS
from open_clip_zerovl.evaluate.bias.report import BiasReport
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table
from scripts.emoji.picture import loss_picture
from scripts.emoji.records import RunRecord


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
        records: by run, as for `picture.demo_picture`.
        examples: see `bias.examples.retrieval_examples`.
        bias: `bias.measure_bias` of the same runs.
        lead: one or two sentences under the title.

    Raises:
        UserError: no run, or an example without one of the runs.
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
            "The losses are not comparable, because each run has its own kind of batch: where all negatives come from one "
            "source, knowing the source does not help, and the loss of an equally good model is higher."
        ),
        chart(loss_picture(records), "Training loss over the samples seen, by run"),
    ]
    if examples:
        body += [
            heading("Text to picture, all sources mixed"),
            paragraph("A caption with its picture, then the best pictures of each run, the right one framed in green."),
            *(example_html(example, list(records)) for example in examples),
        ]
    if bias is not None:
        body += bias_sections(bias)
    write_atomically(path, html_page(title, body))
    return Path(path)
