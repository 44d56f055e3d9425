"""`zerovl bias`: models are encoded on the same samples, and the report is printed and written as JSON and as a page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.bias.charts import bias_values
from open_clip_zerovl.evaluate.bias.report import BiasReport, check_batch_sizes, measure_bias
from open_clip_zerovl.evaluate.bias.samples import check_probe, encode, read_samples
from open_clip_zerovl.evaluate.settings import BiasSettings
from open_clip_zerovl.report.html import write_page
from open_clip_zerovl.report.plot import require_matplotlib


def bias_page(path: str | os.PathLike[str], report: BiasReport) -> Path:
    """Write a bias report as one HTML file; returns its path.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    return write_page(path, "bias.html", title="Did the models learn their sources?", **bias_values(report))


def run_bias(
    encoders: Mapping[str, Encoder],
    data: str,
    settings: BiasSettings | None = None,
    *,
    out: str | os.PathLike[str],
) -> BiasReport:
    """Measure checkpoints on named sources; prints a table, writes `bias.json` and `bias.html` into `out`.

    Args:
        encoders: the checkpoints, by the names that the report gives them.
        data: `name=shards::name=shards`, as `--train-data`, and retrieval sets in CLIP_benchmark's layout; held-out pairs tell
            more than pairs trained on.

    Raises:
        UserError: data or a checkpoint that cannot be read or do not fit, an `out` that cannot be written, a missing package.
    """
    require_matplotlib()
    settings, out = settings or BiasSettings(), Path(out)
    check_writable(out, folder=True)
    for encoder in encoders.values():
        encoder.check()
    sources = parse_sources(data, evaluation=True)
    if len(sources) < 2:
        raise UserError(f"--data {data!r} names one source; bias is measured between two or more: a=SHARDS::b=SHARDS")
    samples, skipped = read_samples(sources, settings.samples_per_source, concept_field=settings.concept_field)
    check_batch_sizes(settings.batch_sizes or (), len(samples))
    check_probe(samples)
    report = measure_bias(
        {name: encode(encoder, samples, name, out / "features") for name, encoder in encoders.items()},
        samples,
        skipped=skipped,
        batch_sizes=settings.batch_sizes,
        map_samples=settings.map_samples,
        seed=settings.seed,
    )
    write_atomically(out / "bias.json", json.dumps(report.to_json(), indent=1) + "\n")
    page = bias_page(out / "bias.html", report)
    print(f"{report.table()}\nWritten: {page}, {out / 'bias.json'}")
    return report
