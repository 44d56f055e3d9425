"""The command line of `zerovl compare` (see program.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from open_clip_zerovl.cli.encoder import add_models_flags, encoder_of
from open_clip_zerovl.cli.values import positive, seed


def add_compare(commands) -> None:
    """Add `zerovl compare`."""
    compare = commands.add_parser(
        "compare",
        help="did another way of sampling help on your sources: models side by side, with intervals",
        description="Retrieval within sources, across them, in one pool of all and in unseen sources, the source probe, and "
        "log p of negatives, for two models or more on the same held-out pairs. Differences are from the first model.",
    )
    compare.add_argument(
        "models",
        nargs="+",
        metavar="NAME=MODEL[,MODEL...]",
        help="sides, each a model as for retrieval; several runs a side are runs of other seeds, in the same order on each "
        "side",
    )
    compare.add_argument(
        "--data",
        required=True,
        metavar="NAME=SHARDS::...",
        help="held-out pairs of the sources trained on: shards, tables, or retrieval sets",
    )
    compare.add_argument("--unseen", metavar="NAME=SHARDS::...", help="likewise, of sources that were in no training")
    compare.add_argument(
        "--concept",
        metavar="FIELD",
        help="json field, or column of a table, that says what a sample shows: samples of two sources with the same value "
        "match",
    )
    compare.add_argument(
        "--held-out",
        metavar="FIELD",
        help="likewise, true for pairs kept out of training; the others of --data are only matches of other sources' pictures "
        "(default: all were kept out)",
    )
    compare.add_argument("--out", type=Path, default=Path("compare"), metavar="DIR", help="default %(default)s")
    compare.add_argument(
        "--samples", type=positive, default=1000, metavar="N", help="pairs of each source (default %(default)s)"
    )
    compare.add_argument(
        "--draws", type=positive, default=1000, metavar="N", help="draws for the intervals (default %(default)s)"
    )
    compare.add_argument(
        "--batch-size", type=positive, default=64, help="samples encoded at once (default %(default)s)"
    )
    compare.add_argument("--seed", type=seed, default=0, help="of draws and folds (default %(default)s)")
    add_models_flags(compare)
    compare.set_defaults(run=_run_compare)


def _run_compare(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.evaluate.bias.compare import CompareSettings, run_compare
    from open_clip_zerovl.evaluate.bias.encode import name_sides

    sides = {
        name: [encoder_of(arguments, model, one_of_several=True) for model in runs]
        for name, runs in name_sides(arguments.models).items()
    }
    settings = CompareSettings(
        samples_per_source=arguments.samples,
        concept_field=arguments.concept,
        held_out_field=arguments.held_out,
        draws=arguments.draws,
        seed=arguments.seed,
    )
    run_compare(sides, arguments.data, settings, unseen=arguments.unseen, out=arguments.out)
