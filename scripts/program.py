"""Programs of this folder: the parameters of a function are the flags, as of a `zerovl` command (`core.flags`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from open_clip_zerovl.core.errors import DEBUG, DEBUG_HELP, ended
from open_clip_zerovl.core.flags import make_parser, run


def program(function: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Call a function with the words of a command line, and return the exit status.

    The help begins with the text of the function's module.
    """
    module: Any = sys.modules[function.__module__]
    name = module.__spec__.name.removesuffix(".__main__")
    words = sys.argv[1:] if argv is None else argv

    def call() -> Any:
        parser = make_parser(function, f"python -m {name}")
        parser.description = module.__doc__
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP)
        return run(function, parser.parse_args(words))

    return ended(call, name, words)
