"""The command line of `zerovl data pack` (see data.py)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from open_clip_zerovl.cli.values import natural, positive, seed
from open_clip_zerovl.core.errors import UserError


def add_pack(datasets) -> None:
    """Add `zerovl data pack`."""
    parser = datasets.add_parser(
        "pack",
        help="your own pairs: a folder, CSV, JSON lines, parquet, tars or a list of addresses to shards",
        description="Pictures and captions in the form in which they are, to webdataset shards with sizes.json, a held-out set "
        "and a report. Called again, it goes on where it stopped.",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="[NAME=]INPUT",
        help="a folder of pictures with .txt or .json beside them, a CSV, TSV or JSON lines, parquet, a `datasets` folder "
        "(save_to_disk), tars of img2dataset or others, a list of addresses; NAME makes it a source of its own",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--format",
        choices=("folder", "table", "json", "parquet", "arrow", "webdataset"),
        help="form of the inputs (default: look at each)",
    )
    columns = parser.add_argument_group("columns (default: guessed from their names)")
    columns.add_argument("--picture-column", metavar="COL", help="path, address or bytes of the picture")
    columns.add_argument(
        "--caption-column", nargs="+", metavar="COL", help="caption; several: all of them are captions"
    )
    columns.add_argument(
        "--source-column", metavar="COL", help="one source for each value (folder: each folder of a folder of pictures)"
    )
    columns.add_argument(
        "--pictures-in", type=Path, metavar="DIR", help="folder that relative paths lead from (default: the table's)"
    )
    columns.add_argument("--separator", metavar="CHAR", help="between columns (default: told from the first line)")
    parser.add_argument(
        "--test-share", type=float, default=0.0, metavar="SHARE", help="share to hold out, by pictures: 0.05"
    )
    parser.add_argument(
        "--drop-near",
        metavar="NAME=SET::...",
        help="leave out training pictures that are copies of these sets' (as for `data near`)",
    )
    parser.add_argument(
        "--near-distance",
        type=natural,
        metavar="BITS",
        help="with --drop-near: largest distance of a copy (default 56)",
    )
    parser.add_argument("--max-side", type=positive, metavar="PX", help="shrink larger pictures to this longer side")
    parser.add_argument(
        "--min-side", type=positive, default=16, metavar="PX", help="refuse smaller pictures (default %(default)s)"
    )
    parser.add_argument("--shard-size", type=positive, default=10_000, help="pictures a shard (default %(default)s)")
    parser.add_argument(
        "--seed", type=seed, default=0, help="of the order and of what is held out (default %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=max(8, 2 * (os.cpu_count() or 1)),
        help="pictures at the same time (default %(default)s; give more for addresses)",
    )
    web = parser.add_argument_group("addresses")
    web.add_argument("--attempts", type=positive, default=3, help="attempts per address (default %(default)s)")
    web.add_argument("--timeout", type=float, default=30.0, help="seconds a picture may take (default %(default)s)")
    web.add_argument("--no-tls-verify", action="store_true", help="accept hosts whose certificate is wrong")
    web.add_argument("--retry-failed", action="store_true", help="try rows again that failed for a passing reason")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no report")
    parser.set_defaults(run=_run_pack)


def _exclusions(arguments: argparse.Namespace) -> list[Any]:
    if arguments.drop_near is None:
        if arguments.near_distance is not None:
            raise UserError("--near-distance goes with --drop-near, which names the sets to compare with")
        return []
    from open_clip_zerovl.prepare.dedup.left_out import near_exclusion
    from open_clip_zerovl.prepare.dedup.near import NEAR

    within = NEAR if arguments.near_distance is None else arguments.near_distance
    threads, progress = arguments.threads, not arguments.quiet
    return [near_exclusion(arguments.drop_near, arguments.out, within=within, threads=threads, progress=progress)]


def _run_pack(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.prepare.pack.rows import Columns
    from open_clip_zerovl.prepare.pack.run import PackSettings, pack
    from open_clip_zerovl.prepare.public.download import Limits
    from open_clip_zerovl.prepare.public.gather import Work

    settings = PackSettings(
        form=arguments.format,
        columns=Columns(
            picture=arguments.picture_column,
            captions=arguments.caption_column and tuple(arguments.caption_column),
            source=arguments.source_column,
            pictures_in=arguments.pictures_in,
            separator=arguments.separator,
        ),
        max_side_px=arguments.max_side,
        min_side_px=arguments.min_side,
        test_share=arguments.test_share,
        shard_size=arguments.shard_size,
        seed=arguments.seed,
        exclusions=_exclusions(arguments),
    )
    limits = Limits(
        idle_seconds=min(Limits.idle_seconds, arguments.timeout),
        total_seconds=arguments.timeout,
        verify_tls=not arguments.no_tls_verify,
    )
    work = Work(
        threads=arguments.threads,
        attempts=arguments.attempts,
        retry_failed=arguments.retry_failed,
        progress=not arguments.quiet,
    )
    pack(arguments.inputs, arguments.out, settings, limits=limits, work=work)
