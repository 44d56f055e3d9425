"""`zerovl trial`: does a larger batch, debiased sampling or the whole recipe help on one's own data?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from open_clip_zerovl.cli.program import RunCommand
from open_clip_zerovl.cli.shared import add_encoder, encoder_of
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import add_settings, settings_from
from open_clip_zerovl.trial.flags import TrialFlags


def trial(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl trial`."""
    parser.description = (
        "Trains one model in several ways, with the same compute, data, seeds and first weights, and says whether a larger "
        "batch, debiased sampling or the whole recipe helps. The same call continues after a stop; more --seeds add runs."
    )
    parser.epilog = "Training flags after -- hold for all arms: -- --freeze text"
    parser.add_argument(
        "--from", dest="start", metavar="MODEL", help="the model to start from, as for finetune"
    )
    parser.add_argument(
        "--image",
        metavar="ENCODER",
        help="in its place encoders, which are aligned first: see zerovl align",
    )
    parser.add_argument("--text", metavar="ENCODER")
    parser.add_argument(
        "--data", required=True, metavar="DIR|NAME=SHARDS::...", help="pairs, as for finetune"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    add_settings(parser, TrialFlags)
    add_encoder(parser)
    parser.add_argument("training", nargs="*", metavar="-- FLAGS", help="training flags")

    def run(arguments: argparse.Namespace) -> None:
        from open_clip_zerovl.recipe.arguments import settings_of
        from open_clip_zerovl.trial.running import Request, run_trial

        encoders = (arguments.image, arguments.text)
        if all(encoders) is (arguments.start is not None) or any(encoders) is not all(encoders):
            raise UserError(
                "give the start of the trial: --from MODEL, or --image ENCODER --text ENCODER"
            )
        request = settings_from(
            Request,
            arguments,
            start=encoder_of(arguments, arguments.start or ""),
            data=arguments.data,
            out=arguments.out.expanduser().absolute(),
            encoders=encoders if all(encoders) else None,
            given=settings_of(arguments.training),
        )
        run_trial(request, say=lambda line: print(f"trial: {line}", file=sys.stderr, flush=True))

    return run
