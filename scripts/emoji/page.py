"""The demo's page: both runs with their bias report, loss curves and retrieval examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.bias.charts import bias_values
from open_clip_zerovl.evaluate.bias.pools import MIXED_POOL_NOTE, POOLS
from open_clip_zerovl.evaluate.bias.report import BiasReport
from open_clip_zerovl.evaluate.retrieval.examples import RetrievalExample
from open_clip_zerovl.report.html import write_page
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
        examples: see `retrieval.examples.retrieval_examples`.
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
    return write_page(
        path,
        "demo.html",
        Path(__file__).parent,
        title=title,
        lead=lead,
        header=("run", *(f"RSUM {pool}" for pool in POOLS)),
        rows=[(name, *(f"{record.rsum[pool]:.1f}" for pool in POOLS)) for name, record in records.items()],
        note=MIXED_POOL_NOTE,
        loss=loss_picture(records),
        examples=examples,
        **(bias_values(bias) if bias is not None else {"bias": None}),
    )
