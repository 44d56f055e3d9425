"""The part of `zerovl`'s command line that fine-tunes: `zerovl finetune` (see program.py)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from open_clip_zerovl.cli.encoder import add_encoder_flags, encoder_of
from open_clip_zerovl.cli.interpolate import SETS, add_curve_flags
from open_clip_zerovl.cli.values import natural, positive, seed



def add_finetune(commands) -> None:
    """Add `zerovl finetune`."""
    command = commands.add_parser(
        "finetune",
        help="fine-tune a model on your own pairs, and keep what it could",
        description="Chooses every setting for a thousand to some million pairs and says why; trains both towers, keeps the "
        "best epoch on held-out pairs, and takes weights between before and after (WiSE-FT). The same call goes on where one "
        "was stopped.",
        epilog="Training flags (python -m training.main --help) replace the chosen ones: --set lr=5e-6, or "
        "all of them after --.",
    )
    command.add_argument(
        "--from",
        dest="start",
        required=True,
        metavar="MODEL",
        help="an exported folder, a training checkpoint, or open_clip's NAME/TAG, such as ViT-B-32/laion2b_s34b_b79k",
    )
    command.add_argument(
        "--data",
        required=True,
        metavar="DIR|NAME=SHARDS::...",
        help="pairs: a folder of `zerovl data pack`, of shards or with a table, or named sources as --train-data takes them",
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    command.add_argument(
        "--retrieval-data",
        metavar=SETS,
        help="held-out pairs (default: the set that comes with --data, else a part of it)",
    )
    command.add_argument("--kept", metavar=SETS, help="retrieval sets of the ability to keep, such as coco=/data/coco")
    command.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE",
        help="set or replace a training flag, or effective-batch; FLAG alone sets a switch, FLAG= removes a flag",
    )  # fmt: skip
    command.add_argument(
        "--patience",
        type=natural,
        default=PATIENCE,
        metavar="EPOCHS",
        help="end when the held-out score has not risen for so many epochs; 0: never (default %(default)s)",
    )
    command.add_argument("--seed", type=seed, default=0, help="of the split and the training (default %(default)s)")
    command.add_argument(
        "--skip-overlap", action="store_true", help="do not look for held-out pictures among those to train on"
    )
    add_curve_flags(command.add_argument_group("weights in between, as for interpolate"))
    command.add_argument("--batch-size", type=positive, default=64, help="images at once in evaluations (default 64)")
    add_encoder_flags(command)
    command.add_argument("training", nargs="*", metavar="-- FLAGS", help="training flags")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.finetune.request import Request
    from open_clip_zerovl.finetune.run import run_finetune
    from open_clip_zerovl.recipe.arguments import parse_settings, settings_of

    request = Request(
        encoder_of(arguments, arguments.start),
        arguments.data,
        arguments.out.expanduser().absolute(),
        retrieval_data=arguments.retrieval_data,
        kept=arguments.kept,
        given={**parse_settings(arguments.set), **settings_of(arguments.training)},
        patience=arguments.patience,
        seed=arguments.seed,
        compare_pictures=not arguments.skip_overlap,
        alphas=arguments.alphas,
        rule=arguments.rule,
        kept_share=arguments.keep,
    )
    run_finetune(request, say=lambda line: print(f"finetune: {line}", file=sys.stderr, flush=True))
