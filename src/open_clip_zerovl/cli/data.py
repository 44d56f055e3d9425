"""The command lines of `zerovl data ...` and `zerovl cluster` (see program.py)."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from open_clip_zerovl.cli.encoder import add_encoder_flags, encoder_of
from open_clip_zerovl.cli.pack import add_pack
from open_clip_zerovl.cli.values import natural, part, positive, seed
from open_clip_zerovl.core.errors import UserError

_DATASETS = {
    "sbu": "SBU Captioned Photos, from its list of addresses",
    "cc3m": "Conceptual Captions 3M, from Train_GCC-training.tsv (--source)",
    "cc12m": "Conceptual 12M, from cc12m.tsv",
    "vg": "Visual Genome: five largest regions' phrases an image",
    "coco": "MS-COCO with Karpathy's splits",
    "f30k": "Flickr30K with Karpathy's splits (--source)",
}

_DRAWN = {
    "emoji": (
        "four emoji sets as four sources of the same concepts (the demo's data)",
        "Noto, Twemoji, OpenMoji and Fluent emoji with their metadata",
    ),
    "icons": (
        "four icon families as four sources of unequal size and few shared concepts",
        "Material Design Icons, game-icons, IconPark and Streamline's Ultimate color icons",
    ),
}


def add_data(commands) -> None:
    """Add `zerovl data ...`: your own pairs, the emoji and icons, the paper's datasets, and tools for existing shards."""
    data = commands.add_parser("data", help="prepare a dataset as webdataset shards", description="Prepare a dataset.")
    datasets = data.add_subparsers(title="datasets and tools", metavar="DATASET", required=True)
    add_pack(datasets)
    for name, (title, packages) in _DRAWN.items():
        drawn = datasets.add_parser(
            name,
            help=title,
            description=f"Fetch {packages}, rasterise them and write webdataset shards of each source, held-out retrieval sets "
            "and a small BERT folder. A second call does nothing.",
        )
        drawn.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
        drawn.add_argument(
            "--px", type=positive, default=64, help="side of the pictures in pixels (default %(default)s)"
        )
        drawn.add_argument("--seed", type=seed, default=0, help="seed of the split (default %(default)s)")
        drawn.add_argument("--force", action="store_true", help="write the data again where it exists")
        drawn.set_defaults(run=_run_drawn, drawn=name)
    _add_url_lists(datasets)
    _add_annotated(datasets)
    _add_shard_tools(datasets)


def _run_drawn(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.prepare.drawn.emoji import EMOJI
    from open_clip_zerovl.prepare.drawn.icons import ICONS
    from open_clip_zerovl.prepare.drawn.make import prepare_drawn

    data = {"emoji": EMOJI, "icons": ICONS}[arguments.drawn]
    prepare_drawn(data, arguments.out, px=arguments.px, seed=arguments.seed, force=arguments.force)


def _add_dataset(datasets, name: str) -> argparse.ArgumentParser:
    parser = datasets.add_parser(
        name,
        help=_DATASETS[name],
        description=f"{_DATASETS[name]}: webdataset shards with sizes.json and a manifest. Called again, it goes on where it "
        "stopped. docs/datasets.md has the pairs, disk and hours to expect.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--source",
        nargs="+",
        metavar="FILE",
        help="local annotation files, and folders or zips of pictures (default: fetch them)",
    )
    parser.add_argument("--shard-size", type=positive, default=10_000, help="rows a shard (default %(default)s)")
    parser.add_argument("--threads", type=positive, default=32, help="pictures at the same time (default %(default)s)")
    parser.add_argument("--retry-failed", action="store_true", help="try rows again that failed for a passing reason")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(dataset=name, attempts=1, part=(0, 1))
    return parser


def _add_url_lists(datasets) -> None:
    for name in ("sbu", "cc3m", "cc12m"):
        parser = _add_dataset(datasets, name)
        parser.add_argument("--attempts", type=positive, default=3, help="attempts per address (default %(default)s)")
        parser.add_argument(
            "--timeout", type=float, default=30.0, help="seconds a picture may take (default %(default)s)"
        )
        parser.add_argument("--no-tls-verify", action="store_true", help="accept hosts whose certificate is wrong")
        parser.add_argument(
            "--part", type=part, default=(0, 1), metavar="I/N", help="do every N-th shard: N processes share a folder"
        )
        parser.set_defaults(run=_run_url_list)


def _add_annotated(datasets) -> None:
    for name in ("vg", "coco", "f30k"):
        parser = _add_dataset(datasets, name)
        parser.add_argument("--seed", type=seed, default=0, help="for the order of the samples (default %(default)s)")
        parser.set_defaults(run=_run_annotated)


def _work(arguments: argparse.Namespace):
    from open_clip_zerovl.prepare.public.pairs import Work

    return Work(
        threads=arguments.threads,
        attempts=arguments.attempts,
        part=arguments.part,
        retry_failed=arguments.retry_failed,
        progress=not arguments.quiet,
    )


def _run_url_list(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.prepare.public.download import Limits
    from open_clip_zerovl.prepare.public.lists import prepare_list

    idle_seconds = min(Limits.idle_seconds, arguments.timeout)
    limits = Limits(idle_seconds=idle_seconds, total_seconds=arguments.timeout, verify_tls=not arguments.no_tls_verify)
    prepare_list(
        arguments.dataset,
        arguments.out,
        source=arguments.source,
        shard_size=arguments.shard_size,
        limits=limits,
        work=_work(arguments),
    )


def _run_annotated(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.prepare.public.karpathy import prepare_karpathy
    from open_clip_zerovl.prepare.public.vg import prepare_vg

    prepare = prepare_vg if arguments.dataset == "vg" else partial(prepare_karpathy, arguments.dataset)
    prepare(
        arguments.out,
        source=arguments.source,
        seed=arguments.seed,
        shard_size=arguments.shard_size,
        work=_work(arguments),
    )


def _add_shard_tools(datasets) -> None:
    report = datasets.add_parser("report", help="table 2 of the paper beside the contents of your folders")
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    report.set_defaults(run=_run_report)
    index = datasets.add_parser("index", help="count the samples of existing shards into sizes.json")
    index.add_argument(
        "folder",
        metavar="DIR|s3://...",
        help="a source's folder of shards, or a URL that fsspec opens; tables need no count",
    )
    index.add_argument("--threads", type=positive, default=8, help="shards at the same time (default %(default)s)")
    index.set_defaults(run=_run_index)
    check = datasets.add_parser(
        "check", help="read every sample of every shard, or every row of a table; status 2 if one has a fault"
    )
    check.add_argument("folder", metavar="DIR|TABLE", help="a source's folder, or a .csv or .tsv of pairs")
    check.add_argument("--hash", action="store_true", help="also compare with the manifest's hashes")
    check.add_argument("--decode", action="store_true", help="also decode every picture (slow)")
    check.add_argument("--threads", type=positive, default=4, help="shards at the same time (default %(default)s)")
    check.set_defaults(run=_run_check)
    _add_near(datasets)


def _add_near(datasets) -> None:
    near = datasets.add_parser(
        "near",
        help="training pictures that are in a test set, found by perceptual hashes",
        description="Compare the pictures of sources with those of test sets, and list copies: re-encoded, resized or lightly "
        "cropped ones too.",
    )
    near.add_argument("data", metavar="NAME=SHARDS::...", help="sources as in --train-data: local shards or tables")
    near.add_argument(
        "--test", required=True, metavar="NAME=SET::...", help="sets as for `zerovl retrieval`, or folders of pictures"
    )
    near.add_argument("--split", default="test", help="split of the sets (default %(default)s)")
    near.add_argument("--out", type=Path, default=Path("near"), metavar="DIR", help="default %(default)s")
    near.add_argument(
        "--distance",
        type=natural,
        metavar="BITS",
        help="largest distance of a copy, of 256 bits (default 56; docs/data.md says why)",
    )
    near.add_argument("--threads", type=positive, default=4, help="pictures at the same time (default %(default)s)")
    near.set_defaults(run=_run_near)


def _run_near(arguments: argparse.Namespace) -> None:
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


def _run_report(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.plan.holdings import report

    print(report(arguments.folders))


def _run_index(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.core.files import check_writable
    from open_clip_zerovl.data.table import find_table
    from open_clip_zerovl.prepare.public.index import index_shards

    if (table := find_table(arguments.folder)) is not None:
        raise UserError(
            f"{table} is a table, whose rows are counted whenever it is opened: it needs no sizes.json; `zerovl data check` "
            "reads its rows"
        )
    if Path(arguments.folder).is_dir():
        check_writable(Path(arguments.folder, "sizes.json"))
    index_shards(arguments.folder, threads=arguments.threads)


def _run_check(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.data.check import check_table
    from open_clip_zerovl.data.table import find_table
    from open_clip_zerovl.prepare.public.index import check_shards
    from open_clip_zerovl.shards.faults import check_report

    if (table := find_table(arguments.folder)) is not None:
        if arguments.hash:
            raise UserError(f"{table} is a table, for which no hashes are kept: check it without --hash")
        result = check_table(table, threads=arguments.threads, decode=arguments.decode)
    else:
        result = check_shards(
            arguments.folder, threads=arguments.threads, hashes=arguments.hash, decode=arguments.decode
        )
    print(check_report(result))
    if result.faults:
        raise UserError(f"{arguments.folder} has {sum(result.faults.values())} faults: see above.")


def add_cluster(commands) -> None:
    """Add `zerovl cluster`."""
    cluster = commands.add_parser(
        "cluster",
        help="split one source into k-means clusters, each a source of its own (A.6)",
        description="Encode one source with any open_clip model, cluster the features by k-means, and write an assignment "
        "with a report and previews. Training reads the clusters from the original shards; --reshard writes each cluster as "
        "shards of its own.",
    )
    cluster.add_argument("model", metavar="MODEL", help="as for retrieval")
    cluster.add_argument(
        "--data", required=True, metavar="NAME=SHARDS", help="one source, as in --train-data: shards or a table"
    )
    cluster.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    cluster.add_argument("--clusters", type=positive, default=100, metavar="K", help="default %(default)s")
    cluster.add_argument(
        "--min-size",
        type=positive,
        default=1,
        metavar="N",
        help="move the samples of clusters below N samples to others; N is the effective batch (default %(default)s)",
    )
    cluster.add_argument("--features", choices=("image", "text", "both"), default="image", help="default %(default)s")
    cluster.add_argument("--reshard", action="store_true", help="write each cluster as shards (as much disk again)")
    cluster.add_argument(
        "--preview", type=natural, default=25, metavar="N", help="pictures a preview (default %(default)s)"
    )
    cluster.add_argument(
        "--passes", type=positive, default=10, help="passes of k-means over the features (default %(default)s)"
    )
    cluster.add_argument("--batch-size", type=positive, default=256, help="default %(default)s")
    cluster.add_argument("--seed", type=seed, default=0, help="default %(default)s")
    add_encoder_flags(cluster)
    cluster.set_defaults(run=_run_cluster)


def _run_cluster(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.prepare.clusters.run import ClusterSettings, cluster_source

    encoder = encoder_of(arguments, arguments.model)
    settings = ClusterSettings(
        clusters=arguments.clusters,
        min_size=arguments.min_size,
        features=arguments.features,
        passes=arguments.passes,
        seed=arguments.seed,
        preview=arguments.preview,
        reshard=arguments.reshard,
    )
    cluster_source(arguments.data, encoder, arguments.out, settings)
