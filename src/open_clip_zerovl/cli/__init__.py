"""`zerovl <command>`: the one place in the library that reads a command line."""

from open_clip_zerovl.cli.program import main

__all__ = ["main"]
