"""The commands `zerovl data ...`: your own pairs, the paper's datasets, and tools for existing shards."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from open_clip_zerovl.cli.program import Parser, RunCommand
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import (
    add_settings,
    natural,
    positive,
    redeclared,
    seed,
    settings_from,
)
from open_clip_zerovl.prepare.public.download import Limits
from open_clip_zerovl.prepare.public.gather import Work

NEAR_HELP = "largest distance of a copy, of 256 bits (default 56; see docs/data.md)"


@dataclass(frozen=True)
class _PackWork(Work):
    threads: int = redeclared(Work, "threads", max(8, 2 * (os.cpu_count() or 1)))


def pack(parser: Parser) -> RunCommand:
    """`zerovl data pack`."""
    from open_clip_zerovl.prepare.pack.packing import PackSettings
    from open_clip_zerovl.prepare.pack.rows import Columns

    parser.description = (
        "Pictures and captions in the form in which they are, to webdataset shards with sizes.json, a held-out set and a "
        "report. Called again, it continues where it stopped."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="[NAME=]INPUT",
        help="a folder of pictures with .txt or .json beside them, or sorted into classes (CLASS/1.jpg), a CSV, TSV or JSON "
        "lines, parquet, a `datasets` folder (save_to_disk), tars (img2dataset's, for example), a list of addresses; NAME "
        "makes it a source of its own",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--drop-near",
        metavar="NAME=SET::...",
        help="leave out training pictures that are copies of these sets' (as for `data near`)",
    )
    add_settings(parser, PackSettings)
    add_settings(parser.add_argument_group("columns (default: guessed from their names)"), Columns)
    add_settings(parser.add_argument_group("work"), _PackWork, Limits, without=("part",))

    def run(arguments: argparse.Namespace) -> Any:
        from open_clip_zerovl.prepare.pack.packing import pack as pack_inputs
        from open_clip_zerovl.prepare.pack.report import next_lines

        settings = settings_from(
            PackSettings,
            arguments,
            columns=settings_from(Columns, arguments),
            exclusions=_exclusions(arguments),
        )
        work = settings_from(Work, arguments)
        report = pack_inputs(
            arguments.inputs, arguments.out, settings, limits=_limits(arguments), work=work
        )
        if parser.typed and work.progress:
            print("\n".join(next_lines(report, arguments.out)))
        return report

    return run


def _limits(arguments: argparse.Namespace) -> Limits:
    return settings_from(
        Limits, arguments, idle_seconds=min(Limits.idle_seconds, arguments.total_seconds)
    )


def _exclusions(arguments: argparse.Namespace) -> list[Any]:
    if arguments.drop_near is None:
        return []
    from open_clip_zerovl.prepare.dedup.near import NEAR
    from open_clip_zerovl.prepare.dedup.overlap import near_exclusion

    threads, progress = arguments.threads, arguments.progress
    return [
        near_exclusion(
            arguments.drop_near, arguments.out, within=NEAR, threads=threads, progress=progress
        )
    ]


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Writes webdataset shards with sizes.json and a manifest. Called again, it continues where it "
        "stopped. docs/datasets.md has the pairs, disk and hours to expect."
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--source",
        nargs="+",
        metavar="FILE",
        help="local annotation files, and folders or zips of pictures (default: fetch them)",
    )
    parser.add_argument(
        "--shard-size", type=positive, default=10_000, help="rows a shard (default %(default)s)"
    )


def _url_list(name: str, parser: argparse.ArgumentParser) -> RunCommand:
    """A dataset whose pictures lie on many hosts."""
    _add_dataset(parser)
    add_settings(parser, Work, Limits)

    def run(arguments: argparse.Namespace) -> None:
        from open_clip_zerovl.prepare.public.lists import prepare_list

        prepare_list(
            name,
            arguments.out,
            source=arguments.source,
            shard_size=arguments.shard_size,
            limits=_limits(arguments),
            work=settings_from(Work, arguments),
        )

    return run


def _annotated(name: str, parser: argparse.ArgumentParser) -> RunCommand:
    """A dataset of annotations and archives of pictures."""
    _add_dataset(parser)
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="seed of the order of the samples (default %(default)s)",
    )
    add_settings(parser, Work, without=("part",))

    def run(arguments: argparse.Namespace) -> None:
        from open_clip_zerovl.prepare.public.karpathy import prepare_karpathy
        from open_clip_zerovl.prepare.public.vg import prepare_vg

        prepare = prepare_vg if name == "vg" else partial(prepare_karpathy, name)
        prepare(
            arguments.out,
            source=arguments.source,
            seed=arguments.seed,
            shard_size=arguments.shard_size,
            work=settings_from(Work, arguments, attempts=1),
        )

    return run


sbu, cc3m, cc12m = (partial(_url_list, name) for name in ("sbu", "cc3m", "cc12m"))
vg, coco, f30k = (partial(_annotated, name) for name in ("vg", "coco", "f30k"))


def check(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl data check`."""
    parser.description = f"{parser.description} Exit status 2 if one has a fault."
    parser.add_argument("folder", type=Path, metavar="DIR", help="a source's folder of shards")
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="only count the samples, from the headers, into sizes.json",
    )
    parser.add_argument(
        "--hash", action="store_true", help="also compare with the manifest's hashes"
    )
    parser.add_argument("--decode", action="store_true", help="also decode every picture (slow)")
    parser.add_argument(
        "--threads", type=positive, default=4, help="shards at the same time (default %(default)s)"
    )
    return _run_check


def _run_check(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.data.table import find_table
    from open_clip_zerovl.prepare.check import check_shards, write_sizes
    from open_clip_zerovl.shards.faults import check_report

    folder, threads = arguments.folder, arguments.threads
    if (table := find_table(str(folder))) is not None:
        raise UserError(
            f"{table} is a table, whose rows `zerovl data pack` checks; give a folder of shards"
        )
    if arguments.sizes:
        sizes = write_sizes(folder, threads=threads)
        print(f"{folder}: {sum(sizes.values()):,} samples in {len(sizes):,} shards, in sizes.json")
        return
    result = check_shards(folder, threads=threads, hashes=arguments.hash, decode=arguments.decode)
    print(check_report(result))
    if result.faults:
        raise UserError(f"{folder} has {sum(result.faults.values())} faults: see above.")


def near(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl data near`."""
    parser.description = (
        "Compare the pictures of sources with those of test sets, and list copies: re-encoded, resized or lightly cropped ones "
        "too."
    )
    parser.add_argument(
        "data",
        metavar="NAME=SHARDS::...",
        help="sources as in --train-data: local shards or tables",
    )
    parser.add_argument(
        "--test",
        required=True,
        metavar="NAME=SET::...",
        help="sets as for `zerovl retrieval`, or folders of pictures",
    )
    parser.add_argument("--split", default="test", help="split of the sets (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("near"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--distance", type=natural, metavar="BITS", help=NEAR_HELP)
    parser.add_argument(
        "--threads",
        type=positive,
        default=4,
        help="pictures at the same time (default %(default)s)",
    )

    def run(arguments: argparse.Namespace) -> None:
        from open_clip_zerovl.prepare.dedup.near import NEAR
        from open_clip_zerovl.prepare.dedup.overlap import run_overlap

        within = NEAR if arguments.distance is None else arguments.distance
        run_overlap(
            arguments.data,
            arguments.test,
            arguments.out,
            split=arguments.split,
            within=within,
            threads=arguments.threads,
        )

    return run
