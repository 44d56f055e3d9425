"""The part of `zerovl`'s command line that finds pictures: `zerovl search` (see program.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from open_clip_zerovl.cli.encoder import add_models_flags, encoder_of
from open_clip_zerovl.cli.values import natural, positive


def add_search(commands) -> None:
    """Add `zerovl search`."""
    search = commands.add_parser(
        "search",
        help="the pictures of a folder that are nearest to words or to a picture, by one or several models",
        description="Pictures are embedded once and kept; changed ones, and those for another model, are embedded again. A "
        "call that was stopped goes on when it is made again.",
    )
    search.add_argument(
        "models", nargs="+", metavar="[NAME=]MODEL", help="exported folders, training checkpoints, NAME/pretrained"
    )
    search.add_argument(
        "data", metavar="DIR", help="a folder of pictures, shards (DIR or DIR/{000..099}.tar), or a CSV"
    )
    search.add_argument("words", metavar="WORDS", help='what to search for; "" with --image alone')
    search.add_argument(
        "--image", type=Path, metavar="FILE", help="search for what is like this picture, and the words"
    )
    search.add_argument("--best", type=positive, default=10, metavar="K", help="pictures to show (default %(default)s)")
    search.add_argument("--page", type=Path, metavar="FILE.html", help="also write a page with thumbnails")
    search.add_argument("--output", type=Path, metavar="FILE.json", help="also write what was found as JSON")
    search.add_argument(
        "--cache", type=Path, metavar="DIR", help="where embeddings are kept (default ~/.cache/zerovl/search)"
    )
    search.add_argument("--batch-size", type=positive, default=64, help="pictures at once (default %(default)s)")
    search.add_argument("--workers", type=natural, default=0, help="threads that decode pictures (default %(default)s)")
    add_models_flags(search)
    search.set_defaults(run=_run_search)


def _run_search(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.evaluate.bias.encode import name_models
    from open_clip_zerovl.evaluate.search.run import SearchSettings, run_search

    settings = SearchSettings(
        words=arguments.words,
        image=arguments.image,
        best=arguments.best,
        cache=arguments.cache,
        page=arguments.page,
        output=arguments.output,
    )
    encoders = {
        name: encoder_of(arguments, model, one_of_several=True) for name, model in name_models(arguments.models).items()
    }
    run_search(encoders, arguments.data, settings)
