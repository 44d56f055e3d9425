"""The commands that evaluate models: retrieval, zero-shot, linear-probe, search."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.encoder_flags import EncoderFlags
from open_clip_zerovl.cli.program import RunCommand
from open_clip_zerovl.cli.shared import (
    MODEL,
    MODELS,
    add_encoder,
    encoder_of,
    encoders_of,
)
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import add_settings, redeclared, seed, settings_from
from open_clip_zerovl.evaluate.settings import (
    RetrievalFiles,
    RetrievalSettings,
    SearchSettings,
    ServeSettings,
    ZeroShotSettings,
)


def retrieval(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl retrieval`."""
    parser.description = (
        "Zero-shot retrieval both ways, with the checkpoint's own transform, as CLIP_benchmark measures it. Several models are "
        "scored on the same pairs, with the difference of RSUM from the first. On several GPUs: torchrun --nproc-per-node=N -m "
        "open_clip_zerovl.cli retrieval ..."
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help=MODEL)
    parser.add_argument(
        "--data",
        required=True,
        metavar="NAME=SET::...",
        help="a set is a folder in CLIP_benchmark's webdataset layout, shards as training reads them, a table of pairs "
        "(pairs.csv, or valid_anno.csv@PICTURES) or dataset_coco.json@PICTURES (Karpathy)",
    )
    add_encoder(parser)
    add_settings(parser, RetrievalSettings, RetrievalFiles)

    def run(arguments: argparse.Namespace) -> Any:
        from open_clip_zerovl.evaluate.retrieval.score import run_retrieval, run_retrievals

        settings = settings_from(RetrievalSettings, arguments)
        files = settings_from(RetrievalFiles, arguments)
        if len(arguments.models) > 1:
            return run_retrievals(encoders_of(arguments), arguments.data, settings, files)
        (model,) = arguments.models
        return run_retrieval(encoder_of(arguments, model), arguments.data, settings, files)

    return run


def zero_shot(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl zero-shot`."""
    parser.description = (
        "Zero-shot classification as CLIP_benchmark measures it, with intervals, for each class and source. A class is the "
        "mean of its captions in all templates."
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--data",
        required=True,
        metavar="NAME=SET::...",
        help="a set is a folder of class folders (or of sources with such folders), shards with a class, a folder in "
        "CLIP_benchmark's layout",
    )
    add_encoder(parser)
    add_settings(parser, ZeroShotSettings)

    def run(arguments: argparse.Namespace) -> Any:
        from open_clip_zerovl.evaluate.zero_shot.score import run_zero_shot

        settings = settings_from(ZeroShotSettings, arguments)
        return run_zero_shot(encoder_of(arguments, arguments.model), arguments.data, settings)

    return run


@dataclass(frozen=True, kw_only=True)
class _ProbeEncoder(EncoderFlags):
    batch_size: int = redeclared(EncoderFlags, "batch_size", 256)


def linear_probe(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl linear-probe`."""
    parser.description = (
        "Logistic regression on the image tower's features before the projection. Repeat an interrupted call with the same "
        "--out: it continues."
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    add_encoder(parser, _ProbeEncoder)
    parser.add_argument(
        "--train",
        required=True,
        metavar="DATA",
        help="a folder of class folders, or webdataset shards (DIR or DIR/{000..099}.tar)",
    )
    parser.add_argument("--test", required=True, metavar="DATA", help="the test set")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="results and stored features"
    )
    parser.add_argument(
        "--label",
        default="cls",
        metavar="cls|json:FIELD",
        help="member that holds the class (default %(default)s)",
    )
    parser.add_argument("--amp", action="store_true", help="run the tower in bf16")
    parser.add_argument("--seed", type=seed, default=0, help="of the images by which C is chosen")

    def run(arguments: argparse.Namespace) -> None:
        from open_clip_zerovl.evaluate.probe import run_linear_probe

        run_linear_probe(
            encoder_of(arguments, arguments.model),
            arguments.train,
            arguments.test,
            out=arguments.out,
            label=arguments.label,
            amp=arguments.amp,
            seed=arguments.seed,
        )

    return run


def search(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl search`."""
    parser.description = (
        "Pictures are embedded once and kept; changed ones, and those for another model, are embedded again. A call that was "
        "stopped continues when it is made again."
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[NAME=]MODEL ... DIR WORDS",
        help=f"models ({MODELS}); a folder of pictures, shards (DIR or DIR/{{000..099}}.tar), or a CSV; the words "
        '("" with --image alone; none with --serve)',
    )
    add_encoder(parser, without=("model_name",))
    add_settings(parser, SearchSettings, ServeSettings)

    def run(arguments: argparse.Namespace) -> Any:
        given = list(arguments.words)
        query = "" if arguments.serve else given.pop()
        if len(given) < 2:
            raise UserError("give a model, a folder of pictures, and the words to search for")
        data, arguments.models = given.pop(), given
        if arguments.serve:
            from open_clip_zerovl.evaluate.search.serve import serve

            return serve(
                encoders_of(arguments),
                data,
                settings_from(ServeSettings, arguments),
                arguments.cache,
            )
        from open_clip_zerovl.evaluate.search.ranking import run_search

        settings = settings_from(SearchSettings, arguments, words=query)
        return run_search(encoders_of(arguments), data, settings)

    return run
