"""The part of `zerovl`'s command line that writes weights between two models: `zerovl interpolate` (see program.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from open_clip_zerovl.cli.encoder import add_encoder_flags, encoder_of
from open_clip_zerovl.cli.values import captions, positive, share
from open_clip_zerovl.evaluate.interpolation.names import ALPHAS, KEPT_SHARE, PLAIN_ALPHA, RULES

SETS = "NAME=SET::..."


def add_interpolate(commands) -> None:
    """Add `zerovl interpolate`."""
    command = commands.add_parser(
        "interpolate",
        help="weights between a model before and after fine-tuning",
        description="A model between two others (WiSE-FT): what fine-tuning has taught, with less of what it has made the "
        "model forget. With --data the models along the way are scored and one is chosen. The folder loads in stock open_clip.",
    )
    command.add_argument("before", metavar="BEFORE", help="the model before fine-tuning, named as for retrieval")
    command.add_argument("after", metavar="AFTER", help="the model after fine-tuning")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    command.add_argument(
        "--alpha",
        type=share,
        metavar="A",
        help=f"0 is BEFORE, 1 is AFTER (default {PLAIN_ALPHA}; with --data it is chosen)",
    )
    curve = command.add_argument_group("a curve")
    curve.add_argument("--data", metavar=SETS, help="retrieval sets of the new ability, as for retrieval")
    curve.add_argument("--kept", metavar=SETS, help="retrieval sets of the ability to keep")
    add_curve_flags(curve)
    curve.add_argument("--split", default="test", help="split of the sets (default %(default)s)")
    curve.add_argument(
        "--captions",
        type=captions,
        default=5,
        metavar="N|all",
        help="captions kept of each image (default %(default)s)",
    )
    curve.add_argument("--batch-size", type=positive, default=64, help="images at once (default %(default)s)")
    add_encoder_flags(command)
    command.add_argument("--fp16", action="store_true", help="store the weights in half precision, half the size")
    command.add_argument("--force", action="store_true", help="replace an earlier export that is there")
    command.set_defaults(run=_run)


def add_curve_flags(group) -> None:
    """The flags that say which points are scored and how one is chosen; fine-tuning has them too."""
    group.add_argument(
        "--alphas",
        type=_alphas,
        default=ALPHAS,
        metavar="A,A,...",
        help="points to score, besides 0 and 1 (default 0 to 1 in steps of 0.1)",
    )
    group.add_argument(
        "--rule",
        choices=RULES,
        help="kept: the best on the new sets of the points that keep --keep of the score on the kept sets; mean: the best mean "
        "of both; new: the best on the new sets (default: kept where there are kept sets, else new)",
    )
    group.add_argument(
        "--keep",
        type=share,
        default=KEPT_SHARE,
        metavar="SHARE",
        help="share of BEFORE's score on the kept sets that is to be kept (default %(default)s)",
    )


def _alphas(text: str) -> tuple[float, ...]:
    return tuple(share(part) for part in text.split(","))


def _run(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.checkpoints.export import loading_notes
    from open_clip_zerovl.core.errors import UserError
    from open_clip_zerovl.evaluate.interpolation.interpolate import CurveSettings, run_interpolation
    from open_clip_zerovl.evaluate.retrieval.score import RetrievalSettings

    if arguments.data is None and arguments.kept is not None:
        raise UserError("--kept is weighed against the new ability; give its sets too: --data NAME=SET")
    if arguments.data is not None and arguments.alpha is not None:
        raise UserError(
            f"--alpha {arguments.alpha:g} is a point and --data chooses one; give --alphas, or leave --data out"
        )

    settings = None
    if arguments.data is not None:
        settings = CurveSettings(
            arguments.data,
            arguments.kept,
            arguments.alphas,
            arguments.rule,
            arguments.keep,
            RetrievalSettings(arguments.split, arguments.captions),
        )
    folder = run_interpolation(
        encoder_of(arguments, arguments.before, one_of_several=True),
        encoder_of(arguments, arguments.after, one_of_several=True),
        arguments.out,
        alpha=arguments.alpha,
        settings=settings,
        precision="fp16" if arguments.fp16 else None,
        force=arguments.force,
    )
    print(f"Written. Load it with open_clip.create_model_and_transforms('local-dir:{folder}').")
    for note in loading_notes(folder):
        print(note)
