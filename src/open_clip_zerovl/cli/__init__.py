"""`zerovl <command>`: the one place in the library that reads a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, see `program.main`; `zerovl train` becomes the training program."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["train"]:  # its words are read by the training program: no parser is made for them here
        from open_clip_zerovl.cli.train import become_training

        return become_training(words[1:])
    from open_clip_zerovl.cli.program import main as run_command

    return run_command(words)
