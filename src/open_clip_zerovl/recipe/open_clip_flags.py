"""The names of the flags of open_clip's own training program, which this library never imports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from open_clip_zerovl.core.errors import UserError, argparse_sentence


@cache
def open_clip_options() -> frozenset[str]:
    """`--lr` and the others, as they stand in the source of open_clip_train's parser."""
    package = importlib.util.find_spec("open_clip_train")
    folders = [] if package is None else package.submodule_search_locations or []
    files = [Path(folder, "params.py") for folder in folders]
    found = (re.findall(r"""["'](--[a-z][\w-]*)["']""", file.read_text("utf-8")) for file in files if file.is_file())
    return frozenset(name for names in found for name in names)


def check_known(flags: Iterable[str], ours: Collection[str], help_command: str) -> None:
    """
    Args:
        flags: given, without values.
        ours: all flags that open_clip has not.

    Raises:
        UserError: a flag that training does not have; open_clip's may be abbreviated.
    """
    theirs = open_clip_options()
    for flag in flags:
        if theirs and flag not in ours and not any(name.startswith(flag) for name in theirs):
            raise UserError(argparse_sentence(f"unrecognized arguments: {flag}", [*ours, *theirs], help_command))
